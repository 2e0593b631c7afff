"""Decoded rows: Arrow columns taken over as numpy arrays, list columns as (values, offsets).

Arrow already stores a list column as one flat array of values and an array of offsets, which is what a jagged feature
is; so nothing here makes a Python object per row or per event. Where a column is one chunk without nulls the flat
values are the Arrow buffer itself (no copy). All parallel lists of a stream share one offsets array: their offsets are
compared once, here, and every later step (cut, choose) computes once per stream, not per column.

    array = pa.array([[7, 8], [], [9]])  ->  values [7, 8, 9], offsets [0, 2, 2, 3]

Cost: offsets are widened from int32 to int64 (8 bytes a row), labels and dense floats are stacked into row-major
matrices (a copy of 4 bytes a value), scalar ids into one (K, R) matrix (8 bytes a value).

Shapes: R rows, T tasks, F dense features, K scalar ids, N events of one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gem_data.interface import DataError, Schema
from gem_data.schema import Column, columns, did_you_mean, impression_part, request_part, stream_columns

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

LIST_TYPE = pa.list_(pa.field("element", pa.int64(), nullable=False))
MOST_EVENTS = (1 << 28) - 1
"""Most events that a row of a batch may hold in one column (window.py)."""

ARROW_TYPES = {"int": pa.int64(), "float": pa.float32(), "list": LIST_TYPE}


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where rows come from, for messages. `row_group` is None for rows that were never in a file.

    `first_row` is added to row numbers: the rows at hand are a part of what the reader of the message knows.
    `owners` (I,): the numbers at hand are those of impressions; impression i belongs to row owners[i].
    """

    file: str
    row_group: int | None = None
    first_row: int = 0
    owners: Int64 | None = None

    def error(
        self,
        *,
        column: str | None = None,
        row: int | None = None,
        sample_id: int | None = None,
        expected: str,
        came: str,
        todo: str,
    ) -> DataError:
        """A DataError that names the place, both sides and the next step."""
        place = [self.file]
        if self.row_group is not None:
            place.append(f"row group {self.row_group}")
        if row is not None:
            inside = ""
            if self.owners is not None:
                own = np.flatnonzero(self.owners == self.owners[row])
                inside, row = f", impression {row - int(own[0])} of {own.size}", int(self.owners[row])
            row += self.first_row
            place.append((f"row {row}" if sample_id is None else f"row {row} (sample_id {sample_id})") + inside)
        if column is not None:
            place.append(f"column {column}")
        message = f"{', '.join(place)}: expected {expected}, came {came}. {todo}"
        return DataError(message, file=self.file, row_group=self.row_group, row=row, column=column)


@dataclass(frozen=True, kw_only=True)
class Jagged:
    """One list column: row r owns values[offsets[r]:offsets[r + 1]]. offsets (R + 1,) int64, starts at 0."""

    values: Int64
    offsets: Int64


@dataclass(frozen=True, kw_only=True)
class Events:
    """One stream: `columns` are the id fields in schema order, then action, then time; all share `offsets`."""

    columns: tuple[Int64, ...]
    offsets: Int64


@dataclass(frozen=True, kw_only=True)
class Rows:
    """R decoded rows.

    keys     (3, R) int64: sample_id, user_id, timestamp
    labels   (R, T) float32; weights (R, T) float32; dense (R, F) float32
    scalars  (K, R) int64
    lists    one Jagged per schema.lists; streams one Events per schema.streams, in schema order
    origin   (R, 3) int64: file, row group, row within the group (-1, -1, row for rows that were never in a file)
    inner, bounds  of requests: their impressions as rows (of schema.impression_part; the rest is of request_part), and
             (R + 1,) whose are whose: request r has the inner rows bounds[r]:bounds[r + 1]. None where rows are plain
    """

    keys: Int64
    labels: Float32
    weights: Float32
    dense: Float32
    scalars: Int64
    lists: tuple[Jagged, ...]
    streams: tuple[Events, ...]
    origin: Int64
    inner: Rows | None = None
    bounds: Int64 | None = None

    def __len__(self) -> int:
        return int(self.keys.shape[1])


def check_types(schema: Schema, arrow_schema: pa.Schema, where: Where) -> None:
    """Every column of `schema` exists in `arrow_schema` with its type; else DataError naming file and column."""
    names = set(arrow_schema.names)
    for column in columns(schema):
        if column.name not in names:
            raise where.error(
                column=column.name,
                expected=f"a column of type {_type_text(column)}",
                came="no such column" + did_you_mean(column.name, names),
                todo="Write the column, or take the feature out of schema.json.",
            )
        if arrow_schema.names.count(column.name) > 1:
            raise where.error(
                column=column.name, expected="one column", came="several of that name", todo="Remove the others."
            )
        came = arrow_schema.field(column.name).type
        if not _fits(column, came):
            raise where.error(
                column=column.name,
                expected=f"type {_type_text(column)}",
                came=f"{came}",
                todo="Cast the column where it is written; ids and times are never narrowed or converted in reading.",
            )


def decode(schema: Schema, table: pa.Table, where: Where, *, file_index: int = -1) -> Rows:
    """Take the columns of `table` over as numpy arrays. Types must have been checked (`check_types`).

    Raises DataError for nulls and for parallel lists of unequal length. Values are checked in validation.py.
    """
    if schema.impression:
        return _decode_requests(schema, table, where, file_index)
    count = table.num_rows
    sample_ids = _flat(table, "sample_id", where, None)

    def flat(name: str) -> npt.NDArray[Any]:
        return _flat(table, name, where, sample_ids)

    def jagged(name: str) -> Jagged:
        return _jagged(table, name, where, sample_ids)

    def short(name: str, kept: int) -> Jagged:
        """kept: to how many events a row is cut before it comes into a batch."""
        found = jagged(name)
        if kept >= MOST_EVENTS and count and int(np.diff(found.offsets).max()) > MOST_EVENTS:
            raise _too_long_error(name, found, where, sample_ids)
        return found

    weights = np.ones((count, len(schema.labels)), np.float32)
    for task, label in enumerate(schema.labels):
        if label.weighted:
            weights[:, task] = flat(f"weight.{label.name}")
    origin = np.empty((count, 3), np.int64)
    origin[:, 0] = file_index
    origin[:, 1] = -1 if where.row_group is None else where.row_group
    origin[:, 2] = np.arange(count)
    return Rows(
        keys=np.stack([sample_ids, flat("user_id"), flat("timestamp")]),
        labels=_matrix([f"label.{label.name}" for label in schema.labels], flat, count),
        weights=weights,
        dense=_matrix([f"dense.{name}" for name in schema.dense], flat, count),
        scalars=np.stack([flat(f"id.{feature.name}") for feature in schema.scalars])
        if schema.scalars
        else np.empty((0, count), np.int64),
        lists=tuple(short(f"ids.{feature.name}", MOST_EVENTS) for feature in schema.lists),
        streams=tuple(
            _events(
                stream_columns(stream),
                [short(name, stream.max_length) for name in stream_columns(stream)],
                sample_ids,
                where,
            )
            for stream in schema.streams
        ),
        origin=origin,
    )


def _decode_requests(schema: Schema, table: pa.Table, where: Where, file_index: int) -> Rows:
    """Requests as rows of one schema and their impressions as rows of another: both are ordinary Arrow tables, since
    the flattened child of a list column is a column."""
    each, bounds = _impression_columns(schema, table, where)
    if table.num_rows and not int(np.diff(bounds).min()):
        raise where.error(
            column="sample_id",
            row=int(np.flatnonzero(np.diff(bounds) == 0)[0]),
            expected="at least one impression in every request",
            came="an empty list",
            todo="Leave requests without impressions out.",
        )
    once = {name: table.column(name) for name in table.column_names if name not in each}
    owners = np.repeat(np.arange(table.num_rows), np.diff(bounds))
    rows = decode(
        request_part(schema),
        pa.table({**once, "sample_id": each["sample_id"].take(pa.array(bounds[:-1]))}),
        where,
        file_index=file_index,
    )
    keys = {name: pa.array(rows.keys[number][owners]) for number, name in ((1, "user_id"), (2, "timestamp"))}
    inner = decode(impression_part(schema), pa.table({**each, **keys}), replace(where, owners=owners))
    return replace(rows, inner=replace(inner, origin=rows.origin[owners]), bounds=bounds)


def _impression_columns(schema: Schema, table: pa.Table, where: Where) -> tuple[dict[str, pa.ChunkedArray], Int64]:
    """Every impression-level column flattened, and their common offsets."""
    found: dict[str, pa.ChunkedArray] = {}
    bounds = np.zeros(1, np.int64)
    for name in (column.name for column in columns(schema) if column.each):
        column = table.column(name)
        if column.null_count:
            raise _null_error(column, name, where, None)
        flat, offsets = _flattened(column)
        if not found:
            bounds = offsets
        elif not np.array_equal(offsets, bounds):
            row = int(np.flatnonzero(np.diff(offsets) != np.diff(bounds))[0])
            raise where.error(
                column=name,
                row=row,
                expected=f"a list as long as sample_id ({int(np.diff(bounds)[row])} impressions)",
                came=f"{int(np.diff(offsets)[row])} entries",
                todo="Labels, weights and the features that schema.json names in `impression` have one entry for each "
                "impression of the request: write them with equal lengths.",
            )
        found[name] = flat
    return found, bounds


def _flattened(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, Int64]:
    """A list column without nulls as one column of its elements, and (R + 1,) offsets."""
    flats, offsets = [], [np.zeros(1, np.int64)]
    for chunk in column.chunks:
        bounds = chunk.offsets.to_numpy()
        if len(bounds):
            # A sliced array keeps the whole `values`: the part that belongs to it is bounds[0]:bounds[-1].
            flats.append(chunk.values.slice(bounds[0], bounds[-1] - bounds[0]))
            offsets.append(bounds.astype(np.int64) - int(bounds[0]))
    joined = pa.chunked_array(flats, type=column.type.value_type)
    return joined, offsets[-1] if len(offsets) == 2 else join_offsets(offsets)


def join_offsets(parts: Sequence[Int64]) -> Int64:
    """Offsets of the rows of all parts, one behind the other: [0, 2] and [0, 1, 3] -> [0, 2, 3, 5]."""
    ends = np.cumsum([0] + [int(part[-1]) for part in parts])
    return np.concatenate(
        [np.zeros(1, np.int64), *(part[1:] + end for part, end in zip(parts, ends[:-1], strict=True))]
    )


def _matrix(names: Sequence[str], flat: Callable[[str], npt.NDArray[Any]], count: int) -> Float32:
    matrix = np.empty((count, len(names)), np.float32)
    for index, name in enumerate(names):
        matrix[:, index] = flat(name)
    return matrix


def _flat(table: pa.Table, name: str, where: Where, sample_ids: Int64 | None) -> npt.NDArray[Any]:
    column = table.column(name)
    if column.null_count:
        raise _null_error(column, name, where, sample_ids)
    # One chunk without nulls is the Arrow buffer itself; several are joined.
    array: npt.NDArray[Any] = column.chunk(0).to_numpy() if column.num_chunks == 1 else column.to_numpy()
    return array


def _jagged(table: pa.Table, name: str, where: Where, sample_ids: Int64) -> Jagged:
    column = table.column(name)
    if column.null_count:
        raise _null_error(column, name, where, sample_ids)
    values: list[Int64] = []
    offsets: list[Int64] = []
    for chunk in column.chunks:
        bounds = chunk.offsets.to_numpy()
        # A sliced array keeps the whole `values`: the part that belongs to it is bounds[0]:bounds[-1].
        flat = chunk.values.slice(bounds[0], bounds[-1] - bounds[0]) if len(bounds) else chunk.values.slice(0, 0)
        if flat.null_count:
            place = int(np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False))[0]) + int(bounds[0])
            row = int(np.searchsorted(bounds, place, side="right")) - 1 + sum(len(part) - 1 for part in offsets)
            raise _null_element_error(name, row, where, sample_ids)
        values.append(flat.to_numpy())
        offsets.append(bounds.astype(np.int64) - int(bounds[0]) if len(bounds) else np.zeros(1, np.int64))
    if not values:
        return Jagged(values=np.empty(0, np.int64), offsets=np.zeros(1, np.int64))
    if len(values) == 1:
        return Jagged(values=values[0], offsets=offsets[0])
    return Jagged(values=np.concatenate(values), offsets=join_offsets(offsets))


def _events(names: Sequence[str], parts: Sequence[Jagged], sample_ids: Int64, where: Where) -> Events:
    offsets = parts[0].offsets
    for name, part in zip(names[1:], parts[1:], strict=True):
        if not np.array_equal(part.offsets, offsets):
            row = int(np.flatnonzero(np.diff(part.offsets) != np.diff(offsets))[0])
            raise where.error(
                column=name,
                row=row,
                sample_id=int(sample_ids[row]),
                expected=f"a list as long as {names[0]} ({int(np.diff(offsets)[row])} events)",
                came=f"{int(np.diff(part.offsets)[row])} events",
                todo="All lists of a stream describe the same events: write them with equal lengths.",
            )
    return Events(columns=tuple(part.values for part in parts), offsets=offsets)


def _null_error(column: pa.ChunkedArray, name: str, where: Where, sample_ids: Int64 | None) -> DataError:
    row = int(np.flatnonzero(column.is_null().to_numpy())[0])
    return where.error(
        column=name,
        row=row,
        sample_id=None if sample_ids is None else int(sample_ids[row]),
        expected="a value in every row",
        came=f"null ({column.null_count} in this row group)",
        todo="Write id 0 for an unknown id and an empty list for no events; drop rows without a label.",
    )


def _too_long_error(name: str, jagged: Jagged, where: Where, sample_ids: Int64) -> DataError:
    lengths = np.diff(jagged.offsets)
    row = int(np.argmax(lengths))
    return where.error(
        column=name,
        row=row,
        sample_id=int(sample_ids[row]),
        expected=f"at most {MOST_EVENTS} events in a row",
        came=f"{int(lengths[row])}",
        todo="Split the row, or lower the max_length of its stream.",
    )


def _null_element_error(name: str, row: int, where: Where, sample_ids: Int64) -> DataError:
    return where.error(
        column=name,
        row=row,
        sample_id=int(sample_ids[row]),
        expected="a list without null elements",
        came="null",
        todo="Write id 0 for an unknown id, or leave the event out of every list of the stream.",
    )


def _fits(column: Column, came: pa.DataType) -> bool:
    if column.each or column.kind == "list":
        if not (pa.types.is_list(came) or pa.types.is_large_list(came)):
            return False
        inside = Column(name=column.name, kind=column.kind if column.each else "int")
        return _fits(inside, came.value_type)
    return bool(came == ARROW_TYPES[column.kind])


def _type_text(column: Column) -> str:
    inside = "list<int64>" if column.kind == "list" else str(ARROW_TYPES[column.kind])
    return f"list<{inside}>" if column.each else inside


def arrow_type(column: Column, *, nullable: bool = False) -> pa.DataType:
    """The Arrow type in which `column` is written; nullable: its list elements."""
    inside = ARROW_TYPES[column.kind]
    if column.kind == "list":
        inside = pa.list_(pa.field("element", pa.int64(), nullable=nullable))
    return pa.list_(pa.field("element", inside, nullable=nullable)) if column.each else inside
