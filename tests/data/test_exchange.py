"""Rows as bytes: what is sent arrives, in the order of the buffers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gem_data.api import batch_from_dicts, batch_from_table
from gem_data.exchange import pack_rows, row_bytes, rows_of_batch, take_rows, unpack_rows
from gem_data.interface import IdFeature, LabelInfo, Schema, TableInfo
from gem_data.testing import batch_difference, tiny_schema, tiny_table
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 25), st.data())
def test_rows_sent_in_any_division_are_the_rows(count: int, data: st.DataObject) -> None:
    schema, table = tiny_schema(), tiny_table(rows=count, seed=count)
    batch = batch_from_table(schema, table)
    owner = np.array(data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    rows, sizes = rows_of_batch(schema, batch), row_bytes(schema, batch)
    takes = [np.flatnonzero(owner == rank) for rank in range(4)]
    chunks = [pack_rows(schema, rows, take) for take in takes]
    assert [chunk.numel() for chunk in chunks] == [int(sizes[take].sum()) for take in takes]
    # As after an all-to-all: one flat buffer, cut.
    flat = torch.cat(chunks)
    cut = list(torch.split(flat, [chunk.numel() for chunk in chunks]))
    came = unpack_rows(schema, cut, [len(take) for take in takes], global_rows=batch.global_rows, step=batch.step)
    order = np.concatenate(takes)
    wanted = batch_from_table(schema, table.take(order))
    assert came.row_index[:, 2].tolist() == order.tolist()
    came.row_index.copy_(wanted.row_index)
    assert batch_difference(came, wanted) is None


def test_chosen_rows_and_none() -> None:
    schema, table = tiny_schema(), tiny_table(rows=9, seed=1)
    batch = batch_from_table(schema, table, step=4)
    some = take_rows(schema, batch, np.array([7, 2]))
    assert some.sample_ids.tolist() == [batch.sample_ids[7], batch.sample_ids[2]]
    assert (some.global_rows, some.step) == (9, 4)
    assert (
        some.ids["views.item"].values()[: int(some.streams["views"].offsets[1])].tolist()
        == (table.column("stream.views.item")[7].as_py()[-12:])
    )
    none = take_rows(schema, batch, np.empty(0, np.int64))
    assert none.sample_ids.numel() == 0
    assert none.streams["buys"].offsets.tolist() == [0]


@pytest.mark.parametrize("dense", [0, 1, 2])
def test_floats_of_odd_and_even_width_stay_aligned(dense: int) -> None:
    schema = Schema(
        name="x",
        created_by="test",
        tables=(TableInfo(name="item", rows=9),),
        labels=(LabelInfo(name="click"),),
        scalars=(IdFeature(name="item", table="item"),),
        dense=tuple(f"d{i}" for i in range(dense)),
    )
    rows = [
        {"sample_id": i, "user_id": 1, "timestamp": 5, "label.click": i % 2, "id.item": i}
        | {f"dense.d{k}": i + k / 4 for k in range(dense)}
        for i in range(5)
    ]
    batch = batch_from_dicts(schema, rows)
    packed = pack_rows(schema, rows_of_batch(schema, batch), np.array([4, 1, 3]))
    assert packed.numel() == int(row_bytes(schema, batch)[[4, 1, 3]].sum())
    came = unpack_rows(schema, [packed], [3], global_rows=5, step=0)
    assert came.dense.tolist() == batch.dense[[4, 1, 3]].tolist()
    assert came.labels.tolist() == [[0.0], [1.0], [1.0]]
    assert came.ids.values().tolist() == [4, 1, 3]
