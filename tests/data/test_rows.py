"""Arrow columns taken over: no copies where none are needed, every physical form of a list column, and its refusals."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from gem_data import rows as rows_module
from gem_data.damage import set_value
from gem_data.interface import DataError
from gem_data.rows import Rows, Where, check_types, decode
from gem_data.testing import tiny_schema, tiny_table

WHERE = Where(file="f.parquet", row_group=3)
ELEMENT = pa.list_(pa.field("element", pa.int64(), nullable=False))


def lists_of(rows: Rows) -> list[list[list[int]]]:
    """Every list column as Python lists."""
    found = [(jagged.values, jagged.offsets) for jagged in rows.lists]
    found += [(column, stream.offsets) for stream in rows.streams for column in stream.columns]
    return [[v[o[i] : o[i + 1]].tolist() for i in range(len(o) - 1)] for v, o in found]


def chunked(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table.slice(0, 3), table.slice(3, 0), table.slice(3, 10), table.slice(13)])


def sliced(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table, table]).combine_chunks().slice(20, 20)


def recast(kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        fields = [pa.field(f.name, kind if pa.types.is_list(f.type) else f.type) for f in table.schema]
        return table.cast(pa.schema(fields))

    return change


@pytest.mark.parametrize(
    "change",
    [lambda table: table, chunked, sliced, recast(ELEMENT), recast(pa.large_list(pa.int64()))],
    ids=["plain", "chunked", "sliced", "elements not null", "large_list"],
)
def test_every_physical_form_decodes_alike(change: Callable[[pa.Table], pa.Table]) -> None:
    schema, table = tiny_schema(), tiny_table(rows=20, seed=0)
    changed = change(table)
    check_types(schema, changed.schema, WHERE)
    rows = decode(schema, changed, WHERE, file_index=5)
    names = ["ids.genres"]
    for stream in schema.streams:
        names += [f"stream.{stream.name}.{p}" for p in (*(f.name for f in stream.fields), "action", "time")]
    assert lists_of(rows) == [table.column(name).to_pylist() for name in names]
    assert rows.scalars.tolist() == [table.column(name).to_pylist() for name in ("id.user", "id.item")]
    assert rows.keys.tolist() == [table.column(n).to_pylist() for n in ("sample_id", "user_id", "timestamp")]
    assert rows.labels.T.tolist() == [table.column(n).to_pylist() for n in ("label.click", "label.like")]
    assert rows.weights.T.tolist() == [[1.0] * 20, table.column("weight.like").to_pylist()]
    assert rows.dense.T.tolist() == [table.column(n).to_pylist() for n in ("dense.price", "dense.hour")]
    assert rows.origin.tolist() == [[5, 3, row] for row in range(20)]


def test_list_values_are_the_arrow_buffer() -> None:
    table = tiny_table(rows=20, seed=0)
    rows = decode(tiny_schema(), table.slice(4, 10), WHERE)
    chunk = table.column("stream.views.time").chunk(0)
    address = chunk.values.buffers()[1].address + 8 * chunk.offsets[4].as_py()
    assert rows.streams[0].columns[-1].ctypes.data == address


def test_zero_rows_decode() -> None:
    rows = decode(tiny_schema(), tiny_table(rows=5, seed=0).slice(0, 0), WHERE)
    assert len(rows) == 0
    assert [stream.offsets.tolist() for stream in rows.streams] == [[0], [0]]


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("kind", ["null list", "null element", "null scalar"])
def test_nulls_are_found_in_slices_and_chunks(kind: str, pieces: int) -> None:
    table = tiny_table(rows=20, seed=0)
    column = "id.item" if kind == "null scalar" else "stream.views.genre"
    values = table.column(column).to_pylist()
    if kind == "null element":
        values[13] = [1, None, *values[13][2:]]
    else:
        values[13] = None
    index = table.column_names.index(column)
    table = table.set_column(index, column, pa.array(values, table.schema.field(column).type))
    if pieces == 3:
        table = pa.concat_tables([table.slice(2, 6), table.slice(8, 3), table.slice(11)])
    else:
        table = table.slice(2)
    with pytest.raises(DataError) as caught:
        decode(tiny_schema(), table, WHERE)
    assert (caught.value.file, caught.value.row_group, caught.value.row) == ("f.parquet", 3, 11)
    assert caught.value.column == column
    assert "(sample_id 13)" in str(caught.value)
    assert "null" in str(caught.value)


@pytest.mark.parametrize(
    ("column", "kind", "came"),
    [
        ("id.item", pa.uint64(), "uint64"),
        ("label.click", pa.float64(), "double"),
        ("timestamp", pa.timestamp("s"), "timestamp"),
        ("ids.genres", pa.list_(pa.int32()), "int32"),
        ("ids.genres", pa.list_(pa.int64(), 2), "fixed_size_list"),
        ("ids.genres", pa.list_(pa.list_(pa.int64())), "list<item: list"),
        ("dense.price", pa.string(), "string"),
        ("id.user", pa.dictionary(pa.int32(), pa.int64()), "dictionary"),
    ],
)
def test_other_types_are_refused_by_name(column: str, kind: pa.DataType, came: str) -> None:
    fields = [pa.field(f.name, kind if f.name == column else f.type) for f in tiny_table(rows=1, seed=0).schema]
    with pytest.raises(DataError, match=column) as caught:
        check_types(tiny_schema(), pa.schema(fields), WHERE)
    assert came in str(caught.value)


def test_a_missing_column_says_the_nearest_name() -> None:
    names = {"stream.views.item": "stream.views.itme"}
    table = tiny_table(rows=1, seed=0)
    table = table.rename_columns([names.get(name, name) for name in table.column_names])
    with pytest.raises(DataError, match=r'no such column \(did you mean "stream.views.itme"\?\)'):
        check_types(tiny_schema(), table.schema, WHERE)


def test_two_columns_of_one_name_are_refused() -> None:
    table = tiny_table(rows=1, seed=0)
    table = table.append_column("id.user", table.column("id.user"))
    with pytest.raises(DataError, match="several of that name"):
        check_types(tiny_schema(), table.schema, WHERE)


def test_a_row_too_long_for_a_view_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of a window counts its events with 28 bits. Of streams, only those that keep so many matter."""
    table = set_value(tiny_table(rows=20, seed=3), 4, "ids.genres", [1] * 9)
    longest = [len(events) for events in table.column("stream.views.item").to_pylist()]
    assert max(longest) > 12
    monkeypatch.setattr(rows_module, "MOST_EVENTS", 13)
    decode(tiny_schema(), table, WHERE)
    monkeypatch.setattr(rows_module, "MOST_EVENTS", 9)
    row = longest.index(max(longest))
    place = rf"f\.parquet, row group 3, row {row} \(sample_id {row}\), column stream\.views\.item: expected at most 9 "
    with pytest.raises(DataError, match=place + rf"events in a row, came {max(longest)}\. Split"):
        decode(tiny_schema(), table, WHERE)
    monkeypatch.setattr(rows_module, "MOST_EVENTS", 8)
    with pytest.raises(DataError, match=r"row group 3, row 4 .*, column ids\.genres: expected at most 8 .*came 9"):
        decode(tiny_schema(), table, WHERE)
