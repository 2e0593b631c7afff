"""Checks of decoded values: ids inside their tables, labels 0 or 1, finite floats, history before the impression.

Every check is one or two passes of numpy over a whole row group, run once when the group is decoded, never per batch.
Signed ids are checked against [0, rows) with a single maximum by viewing them as unsigned: a negative id becomes a
huge one. Only when a check fails is the failing row looked for.

`find_problems` yields the first problem of every column (verify lists them all); `check_values` raises the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np

from gem_data.interface import DataError, LoaderConfig, Schema, StreamInfo, TableInfo
from gem_data.rows import Events, Int64, Rows, Where
from gem_data.schema import impression_part, request_part

_FIX = "Fix the rows where they are written; `gemline data verify` lists every such place."


def check_values(schema: Schema, rows: Rows, where: Where, *, open_ids: Collection[str] = ()) -> None:
    """Raise the first problem of `rows` as a DataError naming file, row group, row, sample_id and column.

    open_ids: features whose ids may be any.
    """
    for problem in find_problems(schema, rows, where, open_ids=open_ids):
        raise problem


def find_problems(schema: Schema, rows: Rows, where: Where, *, open_ids: Collection[str] = ()) -> Iterator[DataError]:
    """The first problem of every column, in column order (of requests: first those of their impressions)."""
    if rows.inner is not None:
        assert rows.bounds is not None
        owners = np.repeat(np.arange(len(rows)), np.diff(rows.bounds))
        inside = dataclasses.replace(where, owners=owners)
        yield from find_problems(impression_part(schema), rows.inner, inside, open_ids=open_ids)
        schema = request_part(schema)
    yield from _label_problems(schema, rows, where)
    tables = {table.name: table for table in schema.tables}
    for index, feature in enumerate(schema.scalars):
        if feature.name in open_ids:
            continue
        yield from _id_problem(f"id.{feature.name}", rows.scalars[index], None, tables[feature.table], rows, where)
    for feature, jagged in zip(schema.lists, rows.lists, strict=True):
        if feature.name in open_ids:
            continue
        yield from _id_problem(f"ids.{feature.name}", jagged.values, jagged.offsets, tables[feature.table], rows, where)
    for index, name in enumerate(schema.dense):
        bad = np.flatnonzero(~np.isfinite(rows.dense[:, index]))
        if bad.size:
            yield _row_error(
                rows, where, f"dense.{name}", int(bad[0]), "a finite number", f"{rows.dense[bad[0], index]}"
            )
    for stream, events in zip(schema.streams, rows.streams, strict=True):
        for field, ids in zip(stream.fields, events.columns, strict=False):
            if f"{stream.name}.{field.name}" in open_ids:
                continue
            column = f"stream.{stream.name}.{field.name}"
            yield from _id_problem(column, ids, events.offsets, tables[field.table], rows, where)
        yield from _action_problem(stream, events, rows, where)
        yield from _time_problem(stream, events, rows, where)


def check_config(config: LoaderConfig, *, rank: int, world_size: int) -> None:
    """Raise ValueError naming the argument when a setting is out of range."""
    limits = {
        "global_batch_size": (config.global_batch_size, 1),
        "window_groups": (config.window_groups, 1),
        "logical_shards": (config.logical_shards, 1),
        "prefetch": (config.prefetch, 0),
        "readers": (config.readers, 0),
        "seed": (config.seed, 0),
        "base_pool": (config.base_pool, 2),
        "world_size": (world_size, 1),
        "rank": (rank, 0),
    }
    alpha = config.stochastic_length
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 1 <= alpha <= 2):
        raise ValueError(f"stochastic_length: expected a number from 1 to 2, or None, came {alpha!r}")
    if config.max_length is not None:
        limits["max_length"] = (config.max_length, 0)
    if config.base_batch is not None:
        limits["base_batch"] = (config.base_batch, 1)
    for name, (value, low) in limits.items():
        if type(value) is not int or value < low:
            raise ValueError(f"{name}: expected a whole number >= {low}, came {value!r}")
    if config.readers > 1 and not config.prefetch:
        raise ValueError(
            f"readers: expected 0 or 1 with prefetch 0, which reads nothing ahead, came {config.readers}. "
            "Set prefetch to 1 or more."
        )
    if config.seed >= 2**63:
        raise ValueError(f"seed: expected less than 2**63, came {config.seed}")
    if rank >= world_size:
        raise ValueError(f"rank: expected less than world_size = {world_size}, came {rank}")
    if config.base_batch is not None:
        _check_base_batch(config.base_batch, config, world_size)


def check_open_ids(open_ids: Collection[str], schema: Schema) -> None:
    """Raise ValueError for a name that is no feature of the data."""
    known = [key for key, _ in schema.id_features()]
    for name in open_ids:
        if name not in known:
            raise ValueError(f"open_ids: expected features of {known}, came {name!r}")


def _check_base_batch(base: int, config: LoaderConfig, world_size: int) -> None:
    """Shares of whole base batches, at least two of them, and ranks of whole shards: else nothing could be evened."""
    size, shards = config.global_batch_size, config.logical_shards
    if size % shards or size // shards % base or size // shards < 2 * base:
        raise ValueError(
            f"base_batch: {base} with global_batch_size {size} and logical_shards {shards}: expected a shard's share "
            f"(global_batch_size / logical_shards) of two or more whole base batches, came {size / shards:g} rows"
        )
    if shards % world_size:
        raise ValueError(
            f"base_batch: expected logical_shards to be a multiple of world_size {world_size}, so that a rank's rows "
            f"are whole shares, came {shards}"
        )


def _label_problems(schema: Schema, rows: Rows, where: Where) -> Iterator[DataError]:
    for task, label in enumerate(schema.labels):
        values = rows.labels[:, task]
        bad = np.flatnonzero((values != 0) & (values != 1))
        if bad.size:
            row = int(bad[0])
            yield _row_error(rows, where, f"label.{label.name}", row, "0 or 1", f"{values[row]}")
        values = rows.weights[:, task]
        bad = np.flatnonzero(~((values >= 0) & (values < np.inf)))
        if bad.size:
            row = int(bad[0])
            yield _row_error(rows, where, f"weight.{label.name}", row, "a finite number >= 0", f"{values[row]}")


def _id_problem(
    column: str,
    ids: Int64,
    offsets: Int64 | None,
    table: TableInfo,
    rows: Rows,
    where: Where,
) -> Iterator[DataError]:
    if ids.size and int(ids.view(np.uint64).max()) >= table.rows:
        place = int(np.argmax(ids.view(np.uint64) >= table.rows))
        row, text = _element(offsets, place)
        yield _row_error(
            rows,
            where,
            column,
            row,
            f"an id with 0 <= id < {table.rows} (table {table.name})",
            f"id {int(ids[place])}{text}",
        )


def _action_problem(stream: StreamInfo, events: Events, rows: Rows, where: Where) -> Iterator[DataError]:
    actions = events.columns[-2]
    limit = 1 << stream.action_bits
    if actions.size and int(actions.view(np.uint64).max()) >= limit:
        place = int(np.argmax(actions.view(np.uint64) >= limit))
        row, text = _element(events.offsets, place)
        expected = f"a bit mask of {stream.action_bits} bits (0 to {limit - 1})"
        yield _row_error(rows, where, f"stream.{stream.name}.action", row, expected, f"{int(actions[place])}{text}")


def _time_problem(stream: StreamInfo, events: Events, rows: Rows, where: Where) -> Iterator[DataError]:
    times, offsets = events.columns[-1], events.offsets
    column = f"stream.{stream.name}.time"
    if not times.size:
        return
    falls = times[1:] < times[:-1]
    # A fall from the last event of one row to the first of the next is no fall.
    first = offsets[1:-1]
    falls[first[(first > 0) & (first < times.size)] - 1] = False
    if falls.any():
        place = int(np.argmax(falls)) + 1
        row, text = _element(offsets, place)
        came = f"{int(times[place])} after {int(times[place - 1])}{text}"
        yield _row_error(rows, where, column, row, "times that do not decrease (oldest event first)", came)
        return
    owners = np.flatnonzero(offsets[1:] > offsets[:-1])
    last = times[offsets[owners + 1] - 1]
    late = np.flatnonzero(last >= rows.keys[2, owners])
    if late.size:
        row = int(owners[late[0]])
        stamp = int(rows.keys[2, row])
        expected = f"events strictly before the row's timestamp {stamp}"
        yield _row_error(rows, where, column, row, expected, f"an event at {int(last[late[0]])}")


def _element(offsets: Int64 | None, place: int) -> tuple[int, str]:
    """Row of the flat index `place`, and how to say which element of the row it is."""
    if offsets is None:
        return place, ""
    row = int(np.searchsorted(offsets, place, side="right")) - 1
    return row, f" (element {place - int(offsets[row])} of {int(offsets[row + 1] - offsets[row])})"


def _row_error(rows: Rows, where: Where, column: str, row: int, expected: str, came: str) -> DataError:
    return where.error(
        column=column, row=row, sample_id=int(rows.keys[0, row]), expected=expected, came=came, todo=_FIX
    )
