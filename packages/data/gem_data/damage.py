"""Every kind of bad input as data: how a tiny data set is spoilt, and where the error must point.

`damage(directory, kind)` spoils one file of a data set that `write_tiny` wrote; the DataError that reading it raises
must carry the `Damage`'s file, row group, row and column. None in a Damage means that the error need not name it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gem_data.blocks import block_hashes

FILE = "train-00000.parquet"
GROUP, ROW = 2, 4


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One kind of bad input. `at_start`: a loader must refuse it when it is built, before any row is read.

    says  text that the message must contain (what came)
    """

    kind: str
    spoil: Callable[[Path], None]
    says: str
    file: str = FILE
    row_group: int | None = None
    row: int | None = None
    column: str | None = None
    at_start: bool = False


def damage(directory: str | Path, kind: str) -> Damage:
    """Spoil the data set in `directory`; returns what was done and where the error must point."""
    found = next(entry for entry in DAMAGES if entry.kind == kind)
    found.spoil(Path(directory))
    return found


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Replace a Parquet file by `change` of its content, with the same row groups; checks nothing."""
    file = pq.ParquetFile(path)
    rows = file.metadata.row_group(0).num_rows
    table = file.read()
    file.close()
    # Columns become nullable: what is spoilt may be null.
    plain = pa.schema([pa.field(field.name, _nullable(field.type)) for field in table.schema])
    pq.write_table(change(table.cast(plain)), path, row_group_size=rows, write_page_checksum=True)
    refresh_block_hashes(path)


def refresh_block_hashes(path: Path) -> None:
    """Let schema.json beside `path` state the hashes of footer and row groups as they are: bad rows, well written."""
    content = json.loads((path.parent / "schema.json").read_text())
    for entry in content["files"]:
        if entry["path"] == path.name:
            entry["blocks_xxh3"] = list(block_hashes(path))
    (path.parent / "schema.json").write_text(json.dumps(content))


def set_value(table: pa.Table, row: int, column: str, value: Any, kind: pa.DataType | None = None) -> pa.Table:
    """`table` with one value replaced."""
    values = table.column(column).to_pylist()
    values[row] = value(values[row]) if callable(value) else value
    index = table.column_names.index(column)
    return table.set_column(index, column, pa.array(values, kind or table.schema.field(column).type))


def _nullable(kind: pa.DataType) -> pa.DataType:
    return pa.list_(_nullable(kind.value_type)) if pa.types.is_list(kind) else kind


def _value(kind: str, column: str, value: Any, says: str) -> Damage:
    """One value of row ROW of row group GROUP replaced."""

    def spoil(directory: Path) -> None:
        path = directory / FILE
        rows = pq.read_metadata(path).row_group(0).num_rows
        rewrite(path, lambda table: set_value(table, GROUP * rows + ROW, column, value))

    return Damage(kind=kind, spoil=spoil, says=says, row_group=GROUP, row=ROW, column=column)


def _history(kind: str, times: list[int], says: str) -> Damage:
    """The row's `views` replaced by three events at `times`, relative to the row's timestamp."""

    def change(table: pa.Table, row: int) -> pa.Table:
        stamp = table.column("timestamp")[row].as_py()
        for part, values in {"item": [1, 2, 3], "genre": [1, 2, 3], "action": [0, 1, 0]}.items():
            table = set_value(table, row, f"stream.views.{part}", values)
        return set_value(table, row, "stream.views.time", [stamp + time for time in times])

    def spoil(directory: Path) -> None:
        path = directory / FILE
        rows = pq.read_metadata(path).row_group(0).num_rows
        rewrite(path, lambda table: change(table, GROUP * rows + ROW))

    return Damage(kind=kind, spoil=spoil, says=says, row_group=GROUP, row=ROW, column="stream.views.time")


def _type(kind: str, column: str, wanted: pa.DataType, says: str) -> Damage:
    def change(table: pa.Table) -> pa.Table:
        index = table.column_names.index(column)
        return table.set_column(index, column, table.column(column).cast(wanted))

    return Damage(
        kind=kind, spoil=lambda directory: rewrite(directory / FILE, change), says=says, column=column, at_start=True
    )


def _bytes(kind: str, change: Callable[[bytes], bytes], says: str) -> Damage:
    def spoil(directory: Path) -> None:
        path = directory / FILE
        path.write_bytes(change(path.read_bytes()))

    return Damage(kind=kind, spoil=spoil, says=says, at_start=True)


def _flip(directory: Path) -> None:
    """Flip one bit in the middle of the pages of one column chunk."""
    path = directory / FILE
    metadata = pq.read_metadata(path)
    group = metadata.row_group(GROUP)
    chunk = next(group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema == "id.item")
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    content = bytearray(path.read_bytes())
    content[start + chunk.total_compressed_size - 2] ^= 4
    path.write_bytes(bytes(content))


def _drop(directory: Path) -> None:
    rewrite(directory / FILE, lambda table: table.drop_columns(["stream.views.action"]))


def _directory(directory: Path) -> None:
    (directory / FILE).unlink()
    (directory / FILE).mkdir()


def _fewer_rows(directory: Path) -> None:
    rewrite(directory / FILE, lambda table: table.slice(0, table.num_rows - 1))


def _swap_file(directory: Path) -> None:
    shutil.copy(directory / "eval-00000.parquet", directory / FILE)
    refresh_block_hashes(directory / FILE)


def _absent_table(directory: Path) -> None:
    path = directory / "schema.json"
    content = json.loads(path.read_text())
    content["scalars"][0]["table"] = "usr"
    path.write_text(json.dumps(content))


def _unknown_key(directory: Path) -> None:
    path = directory / "schema.json"
    content = json.loads(path.read_text())
    content["streams"][0]["max_lenght"] = 3
    path.write_text(json.dumps(content))


DAMAGES: tuple[Damage, ...] = (
    Damage(kind="missing column", spoil=_drop, says="no such column", column="stream.views.action", at_start=True),
    _type("int32 ids", "id.item", pa.int32(), "int32"),
    _type("float64 label", "label.click", pa.float64(), "double"),
    _type("list of floats", "stream.views.item", pa.list_(pa.float64()), "list<"),
    _type("list of int32", "ids.genres", pa.list_(pa.int32()), "int32"),
    _value("null label", "label.click", None, "null"),
    _value("null list", "stream.buys.item", None, "null"),
    _value("null element", "stream.views.item", lambda ids: [None, *ids[1:]] if ids else [None], "null"),
    _value("unequal lists", "stream.views.genre", lambda ids: [*ids, 1], "events"),
    _value("id outside its table", "id.item", 50, "id 50"),
    _value("negative id", "id.user", -1, "id -1"),
    _value("bag id outside its table", "ids.genres", [6, 7], "id 7 (element 1 of 2)"),
    _value("huge id", "id.user", 2**63 - 1, "id 9223372036854775807"),
    _value("NaN label", "label.click", float("nan"), "nan"),
    _value("label 7", "label.like", 7.0, "7.0"),
    _value("infinite dense", "dense.price", float("inf"), "inf"),
    _value("NaN dense", "dense.hour", float("nan"), "nan"),
    _value("negative weight", "weight.like", -0.5, "-0.5"),
    _value("infinite weight", "weight.like", float("inf"), "inf"),
    _history("event at the timestamp", [-3, -2, 0], "an event at"),
    _history("event after the timestamp", [-3, -2, 5], "an event at"),
    _history("decreasing times", [-2, -3, -1], "after"),
    _bytes("truncated file", lambda content: content[: len(content) // 2], "unreadable"),
    _bytes("empty file", lambda content: b"", "unreadable"),
    _bytes("not a parquet file", lambda content: b"user,item\n" * 200, "unreadable"),
    _bytes("wrong magic", lambda content: content[:-4] + b"PAR2", "unreadable"),
    _bytes("huge footer length", lambda content: content[:-8] + b"\xff\xff\xff\x7fPAR1", "unreadable"),
    Damage(kind="flipped bit", spoil=_flip, says="checksum", row_group=GROUP, column="id.item"),
    Damage(kind="absent file", spoil=lambda d: (d / FILE).unlink(), says="no such file", at_start=True),
    Damage(kind="a directory", spoil=_directory, says="unreadable", at_start=True),
    Damage(kind="fewer rows than promised", spoil=_fewer_rows, says="44 rows", at_start=True),
    Damage(kind="another file", spoil=_swap_file, says="30 rows", at_start=True),
    Damage(kind="undeclared table", spoil=_absent_table, says='"user"', file="schema.json", at_start=True),
    Damage(kind="misspelt key", spoil=_unknown_key, says='"max_length"', file="schema.json", at_start=True),
)
