"""Plain samples into requests and back: the same samples, with the user's part stored once or for each impression.

A log is usually written an impression a row, with the history copied into every row. `group_requests` finds what was
shown together, consecutive samples of one user and timestamp whose request-level features are equal to the bit, and
writes them as one row; `expand_requests` undoes it. Nothing is lost or reordered: expanding what was grouped gives the
table that it was made of. (Grouping what was expanded may join two neighbouring requests that are alike in everything
but their impressions, which then are one request.)

Only neighbours are joined, so a log sorted by time must be sorted by user within a second. Sizes fall by about the mean
number of impressions times the share of the histories, and with them reading, hashing and decoding.

    user 1 at second 50 was shown items 7 and 8, user 2 at second 50 item 7: three samples, requests of [7, 8] and [7]

Row groups stay what they are, of the same requests (a request is in that in which its first sample was): windows of
time are made of them, and so are the same before and after.

Cost: one pass; in memory are a row group at a time, the one before it as requests, and the samples of its last one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gem_data.interface import Schema
from gem_data.remote import RemotePath
from gem_data.rows import Int64, Jagged, Rows, Where, arrow_type, check_types, decode
from gem_data.schema import SPLITS, check_schema, columns, read_schema, request_part
from gem_data.shards import Shards
from gem_data.validation import check_values
from gem_data.writing import write_dataset

_WHERE = Where(file="table")

Placed = tuple[pa.Table, Where]
"""A table and where its rows come from, for messages."""


def request_schema(schema: Schema, impression: Sequence[str]) -> Schema:
    """`schema` of plain samples as that of requests: `impression` names what each impression has of its own.

    Raises DataError for names that the schema does not have, ValueError for none and for what is requests already.
    """
    if schema.impression:
        raise ValueError("the samples are requests already (schema.json has `impression`); expand them first")
    if not impression:
        raise ValueError(
            "impression: expected the features that each impression has of its own, such as id.item; came none"
        )
    found = dataclasses.replace(schema, impression=tuple(impression), files=())
    check_schema(found, source="schema")
    return found


def to_requests(schema: Schema, tables: pa.Table | Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Tables of plain samples, one after the other, as tables of the requests of `schema` (`request_schema`).

    A request may begin in one table and end in a later one; it comes with those of the former. Raises DataError for
    columns that do not fit, which names the table by its number, where there are several, and the row in it.
    """
    if isinstance(tables, pa.Table):
        return _to_requests(schema, [(tables, _WHERE)])
    return _to_requests(schema, ((table, Where(file=f"table {n}")) for n, table in enumerate(tables)))


def _to_requests(schema: Schema, tables: Iterable[Placed]) -> Iterator[pa.Table]:
    """Each table is decoded alone, before rows of the one before are put in front, so that errors name its own rows.

    What comes are the requests that begin in one table, so that row groups stay what they are. held: those of the table
    before, but the last; pending: the samples of that one, which may go on.
    """
    plain = dataclasses.replace(schema, impression=())
    fields = pa.schema([pa.field(column.name, arrow_type(column, nullable=True)) for column in columns(plain)])
    held: list[pa.Table] = []
    pending: pa.Table | None = None
    for table, where in tables:
        check_types(plain, table.schema, where)
        _check(plain, decode(plain, table, where), where)
        # Files may differ in what they declare nullable, and in the width of offsets.
        table = table.select(fields.names).cast(fields)
        joined = table if pending is None else pa.concat_tables([pending, table])
        if not joined.num_rows:
            continue
        starts = _starts(schema, decode(plain, joined, _WHERE))
        first, last = 0, int(starts[-1])
        if last and pending is not None:
            first = int(starts[1])
            yield pa.concat_tables([*held, _grouped(schema, joined.slice(0, first), starts[:1])])
            held, starts = [], starts[1:]
        if first < last:
            held = [_grouped(schema, joined.slice(first, last - first), starts[:-1] - first)]
        pending = joined.slice(last)
    if pending is not None:
        yield pa.concat_tables([*held, _grouped(schema, pending, np.zeros(1, np.int64))])


def to_impressions(schema: Schema, table: pa.Table) -> pa.Table:
    """A table of requests as plain samples, each with a copy of its request's part."""
    return _to_impressions(schema, (table, _WHERE))


def _to_impressions(schema: Schema, placed: Placed) -> pa.Table:
    table, where = placed
    check_types(schema, table.schema, where)
    rows = decode(schema, table, where)
    _check(schema, rows, where)
    assert rows.bounds is not None
    owners = pa.array(np.repeat(np.arange(len(rows)), np.diff(rows.bounds)))
    arrays = {}
    for column in columns(schema):
        values = table.column(column.name).combine_chunks()
        found = values.flatten() if column.each else values.take(owners)
        arrays[column.name] = found.cast(arrow_type(dataclasses.replace(column, each=False), nullable=True))
    return pa.table(arrays)


def group_requests(
    source: str | Path | RemotePath,
    target: str | Path,
    *,
    impression: Sequence[str],
    rows_per_group: int | None = None,
    overwrite: bool = False,
) -> Schema:
    """Write the plain samples of the data set `source` as requests into the directory `target`; returns its schema.

    rows_per_group  None = the requests that begin in a row group of `source` are a row group

    Raises DataError and ValueError as `request_schema` and `write_dataset` do; nothing is written then.
    """
    plain = read_schema(source)
    schema = request_schema(plain, impression)
    tables = {split: _to_requests(schema, found) for split, found in _tables(source, plain).items()}
    return _write(target, schema, tables, rows_per_group, overwrite)


def expand_requests(
    source: str | Path | RemotePath, target: str | Path, *, rows_per_group: int | None = None, overwrite: bool = False
) -> Schema:
    """Write the requests of the data set `source` as plain samples: the inverse of `group_requests`.

    rows_per_group  None = the samples of a row group of `source` are a row group, which then takes more memory

    Raises ValueError where the rows of `source` are no requests.
    """
    schema = read_schema(source)
    if not schema.impression:
        raise ValueError(f"{source}: expected requests (`impression` in schema.json), came plain samples")
    tables = {
        split: (_to_impressions(schema, placed) for placed in found) for split, found in _tables(source, schema).items()
    }
    plain = dataclasses.replace(schema, impression=(), files=())
    return _write(target, plain, tables, rows_per_group, overwrite)


def _write(
    target: str | Path,
    schema: Schema,
    tables: Mapping[str, Iterator[pa.Table]],
    rows_per_group: int | None,
    overwrite: bool,
) -> Schema:
    return write_dataset(
        target,
        schema,
        tables,
        rows_per_group=rows_per_group,
        table_groups=rows_per_group is None,
        overwrite=overwrite,
    )


def _tables(source: str | Path | RemotePath, schema: Schema) -> dict[str, Iterator[Placed]]:
    def read(split: str) -> Iterator[Placed]:
        shards = Shards(source, schema, split)
        for footer in shards.footers:
            for group in range(len(footer.group_rows)):
                yield shards.read_table(footer.index, group), Where(file=footer.info.path, row_group=group)

    present = {file.split for file in schema.files}
    return {split: read(split) for split in SPLITS if split in present}


def _check(schema: Schema, rows: Rows, where: Where) -> None:
    """The values of a file's rows, which the writer would find too, and then call rows of what it writes."""
    if where.row_group is not None:
        check_values(schema, rows, where)


def _starts(schema: Schema, rows: Rows) -> Int64:
    """Numbers of the samples that begin a request: those that differ from the one before in what is the request's."""
    plain = dataclasses.replace(schema, impression=())
    once = request_part(schema)
    new = np.ones(len(rows), bool)
    new[1:] = _differs(rows.keys[1]) | _differs(rows.keys[2])
    for number, feature in enumerate(plain.scalars):
        if feature in once.scalars:
            new[1:] |= _differs(rows.scalars[number])
    for number, name in enumerate(plain.dense):
        if name in once.dense:
            new[1:] |= _differs(np.ascontiguousarray(rows.dense[:, number]).view(np.int32))
    for feature, jagged in zip(plain.lists, rows.lists, strict=True):
        if feature in once.lists:
            new[1:] |= _lists_differ(jagged)
    for events in rows.streams:
        for values in events.columns:
            new[1:] |= _lists_differ(Jagged(values=values, offsets=events.offsets))
    return np.flatnonzero(new)


def _differs(values: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    changed: npt.NDArray[np.bool_] = values[1:] != values[:-1]
    return changed


def _lists_differ(jagged: Jagged) -> npt.NDArray[np.bool_]:
    """(R - 1,) whether list r + 1 is another one than list r."""
    lengths = np.diff(jagged.offsets)
    changed = _differs(lengths)
    row = np.repeat(np.arange(len(lengths)), lengths)
    # Where two lists are equally long, an element's partner lies that length before it.
    alike = np.concatenate([[False], ~changed])[row]
    place = np.flatnonzero(alike)
    partner = place - lengths[row[place]]
    changed[row[place[jagged.values[place] != jagged.values[partner]]] - 1] = True
    return changed


def _grouped(schema: Schema, table: pa.Table, starts: Int64) -> pa.Table:
    """The samples of `table` as the requests that begin at `starts`."""
    bounds = pa.array(np.append(starts, table.num_rows), pa.int32())
    first = pa.array(starts)
    arrays = {}
    for column in columns(schema):
        values = table.column(column.name).combine_chunks()
        found = pa.ListArray.from_arrays(bounds, values) if column.each else values.take(first)
        arrays[column.name] = found.cast(arrow_type(column, nullable=True))
    return pa.table(arrays)
