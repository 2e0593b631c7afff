"""Reading: from Parquet files to batches, one epoch in line (no reading ahead, so that all of it is counted)."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Any

from cases.case import Case, scratch
from cases.memory import count_all

ROWS, BATCH = 1200, 200


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A data set on disk (`directory` lives as long as this) and the Arrow table it was written from."""

    directory: tempfile.TemporaryDirectory[str]
    table: Any
    shuffle: bool


def make(*, shape: str, shuffle: bool) -> Inputs:
    """1200 rows with every kind of column; uniform: every list has the length 8."""
    from gem_data.api import write_dataset
    from gem_data.testing import tiny_schema, tiny_table

    table = tiny_table(rows=ROWS, seed=5)
    if shape == "uniform":
        table = with_equal_lengths(table, 8)
    directory = scratch()
    write_dataset(directory.name + "/set", tiny_schema(), {"train": table}, rows_per_file=600, rows_per_group=200)
    return Inputs(directory=directory, table=table, shuffle=shuffle)


def with_equal_lengths(table: Any, length: int) -> Any:
    """The table with every list column cut and padded (with its last value; 0 or the row's time) to one length."""
    import numpy as np
    import pyarrow as pa

    before = table.column("timestamp").to_numpy() - 1
    for index, field in enumerate(table.schema):
        if pa.types.is_list(field.type):
            fill = before if field.name.endswith(".time") else np.zeros(len(table), np.int64)
            rows = [
                (values + [int(last)] * length)[:length]
                for values, last in zip(table.column(index).to_pylist(), fill, strict=True)
            ]
            table = table.set_column(index, field, pa.array(rows, field.type))
    return table


def run(inputs: Inputs) -> list[Any]:
    """All batches of one epoch."""
    from gem_data.api import build_loader
    from gem_data.interface import LoaderConfig

    config = LoaderConfig(global_batch_size=BATCH, shuffle=inputs.shuffle, prefetch=0)
    loader = build_loader(inputs.directory.name + "/set", split="train", config=config)
    return list(loader.epoch())


def check(inputs: Inputs, batches: list[Any]) -> None:
    """Every row once, and as `check_rows` says."""
    import torch

    seen = torch.cat([batch.sample_ids for batch in batches])
    assert sorted(seen.tolist()) == inputs.table.column("sample_id").to_pylist()
    check_rows(inputs.table, batches)


def check_rows(table: Any, batches: list[Any]) -> None:
    """Ids, labels and event times of every row as in the table, later events first to be kept."""
    rows = {row["sample_id"]: row for row in table.to_pylist()}
    for batch in batches:
        items = batch.ids["item"].values().tolist()
        views, times = batch.ids["views.item"], batch.streams["views"].times
        offsets = batch.streams["views"].offsets.tolist()
        for place, sample in enumerate(batch.sample_ids.tolist()):
            row, events = rows[sample], slice(offsets[place], offsets[place + 1])
            assert items[place] == row["id.item"]
            assert batch.labels[place].tolist() == [row["label.click"], row["label.like"]]
            assert views.values()[events].tolist() == row["stream.views.item"][-12:]
            assert times[events].tolist() == row["stream.views.time"][-12:]


def tensor_bytes(inputs: Inputs) -> dict[str, int]:
    """Bytes of the files read."""
    from pathlib import Path

    return {"file_bytes": sum(f.stat().st_size for f in Path(inputs.directory.name).rglob("*.parquet"))}


CASES = tuple(
    Case(
        name=f"data.epoch_{order}_{shape}",
        make=partial(make, shape=shape, shuffle=order == "shuffled"),
        run=run,
        check=check,
        count=count_all,
        formula=tensor_bytes,
        repeat=40,
    )
    for order, shape in (("shuffled", "ragged"), ("shuffled", "uniform"), ("in_order", "ragged"))
)
