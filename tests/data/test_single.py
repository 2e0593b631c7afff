"""One batch from rows in memory: the same content and the same checks as from files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from gem_data.api import batch_from_dicts, batch_from_table, build_loader
from gem_data.interface import DataError, LoaderConfig
from gem_data.testing import batch_difference, tiny_schema, tiny_table, write_tiny


def rows() -> list[dict[str, Any]]:
    return tiny_table(rows=30, seed=0, first_sample=0).to_pylist()


@pytest.mark.parametrize("max_length", [None, 3])
def test_it_is_the_batch_that_a_loader_yields(tmp_path: Path, max_length: int | None) -> None:
    write_tiny(tmp_path / "d", train_rows=30)
    config = LoaderConfig(global_batch_size=30, shuffle=False, max_length=max_length)
    loaded = next(build_loader(tmp_path / "d", split="train", config=config).epoch())
    for batch in (
        batch_from_dicts(tiny_schema(), rows(), max_length=max_length),
        batch_from_table(tiny_schema(), tiny_table(rows=30, seed=0), max_length=max_length),
    ):
        assert batch.row_index.tolist() == [[-1, -1, row] for row in range(30)]
        assert batch_difference(dataclasses.replace(batch, row_index=loaded.row_index), loaded) is None


def test_no_rows_make_an_empty_batch() -> None:
    batch = batch_from_dicts(tiny_schema(), [])
    assert (batch.global_rows, batch.ids.stride(), batch.ids.values().numel()) == (0, 0, 0)
    assert tuple(batch.dense.shape) == (0, 2)


def test_scoring_needs_no_labels() -> None:
    given = [{k: v for k, v in row.items() if not k.startswith(("label", "weight"))} for row in rows()[:3]]
    del given[1]["sample_id"], given[2]["user_id"]
    batch = batch_from_dicts(tiny_schema(), given, scoring=True)
    assert batch.labels.tolist() == [[0.0, 0.0]] * 3
    # The first task has no weight column in the schema, so its rows weigh 1 wherever they come from.
    assert batch.weights[:, 1].tolist() == [0.0] * 3
    assert batch.sample_ids.tolist() == [0, 1, 2]
    assert batch.user_ids[2].item() == 0
    with pytest.raises(DataError, match=r"row 0, column label\.click: expected a value, came none"):
        batch_from_dicts(tiny_schema(), given[:1])


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("id.item", 50, r"row 4 \(sample_id 4\), column id.item: expected an id with 0 <= id < 50"),
        ("id.item", "x", "row 4, column id.item: expected a whole number of 64 bits, came 'x'"),
        ("id.item", 1.5, "row 4, column id.item: expected a whole number of 64 bits, came 1.5"),
        ("id.item", True, "row 4, column id.item: expected a whole number of 64 bits, came True"),
        ("id.item", None, r"row 4 \(sample_id 4\), column id.item: expected a value in every row, came null"),
        ("id.item", 2**64, "row 4, column id.item: expected a whole number of 64 bits, came 18446744073709551616"),
        ("stream.views.item", 3, "row 4, column stream.views.item: expected a list of whole numbers, came 3"),
        ("stream.views.item", [1, 2.5], "row 4, column stream.views.item: expected a list of whole numbers"),
        ("dense.price", "x", "row 4, column dense.price: expected a number, came 'x'"),
        ("stream.views.item", [1] * 99, "row 4 .*expected a list as long as stream.views.item"),
        ("label.like", float("nan"), "row 4 .*column label.like: expected 0 or 1, came nan"),
        ("id.itme", 3, r"row 4, column id.itme: .*did you mean \"id.item\""),
    ],
)
def test_bad_values_are_named(column: str, value: Any, message: str) -> None:
    given = rows()
    given[4] = {**given[4], column: value}
    with pytest.raises(DataError, match=message) as caught:
        batch_from_dicts(tiny_schema(), given)
    assert caught.value.row == 4


def test_malformed_arrow_lists_are_refused() -> None:
    """Offsets that go down cannot come out of a file, but can be handed over in memory."""
    table = tiny_table(rows=3, seed=0)
    bad = pa.ListArray.from_buffers(
        pa.list_(pa.int64()), 3, [None, pa.array([0, 2, 1, 3], pa.int32()).buffers()[1]], children=[pa.array([1, 2, 3])]
    )
    table = table.set_column(table.column_names.index("ids.genres"), "ids.genres", bad)
    with pytest.raises(DataError, match=r"column ids\.genres: expected a well-formed Arrow column"):
        batch_from_table(tiny_schema(), table)
