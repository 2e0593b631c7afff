"""Windows: decoded rows that batches are taken from. Events stay where they were decoded, and are copied once.

A window has the rows of several row groups. What is one number a row is joined (a few bytes a row); events are not:
each row of each jagged column is a *view*, 16 bytes that say in which buffer its events lie, where, and how many. That
is Arrow's binary view layout, so that Arrow's cast from views to plain binary writes the events of any rows of all
columns, from all buffers, into one new buffer, in one call: the only copy between the decoder and a batch.

    groups [[7, 8], [9]] and [[4, 5]] of one column, in buffers 0 and 1
    views  (buffer 0, byte 0, 16 bytes)  (9, 8 bytes)  (buffer 1, byte 0, 16 bytes)
    rows 2, 1  ->  4 5 9

Arrow's rule is that a view of at most 12 bytes holds them itself; so single events lie in their views, and scalar ids
too. Cutting to `max_length` happens when views are made: a list that is too long starts later.

Why not otherwise: joining the events of the groups first is one more copy of everything, into fresh memory, whose
first touch costs several times the copy; an index per event is as long as the data it moves; slices of numpy arrays
cost a Python object a row and column.

Cost: 16 bytes a row and column. No values are checked: offsets come from `Rows`. Runs on the calling thread, without
Python's lock while it copies.

Shapes: R rows, B chosen rows, C columns: K keys of the batch, then actions and times of every stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gem_data.interface import Schema
from gem_data.rows import MOST_EVENTS, Float32, Int64, Rows, join_offsets
from gem_data.schema import impression_part, request_part

Limits = Sequence[int | Int64]
"""Most events that rows of a group keep, for each stream: one number, or one for each row."""

SIZE, FIRST, BUFFER, START = range(4)
"""The four int32 of a view; where it holds its value itself, that is FIRST and BUFFER."""

_REACH = 1 << 30
"""A view reaches 2 GiB: a longer buffer is entered at several places, so many bytes apart."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """R rows. keys (3, R), labels, weights, dense, origin: as in `Rows`; views (C, R, 4) int32 into `buffers`.

    inner, bounds  of requests, as in `Rows`: the window of their impressions, and whose are whose
    """

    keys: Int64
    labels: Float32
    weights: Float32
    dense: Float32
    origin: Int64
    views: npt.NDArray[np.int32]
    buffers: tuple[pa.Buffer, ...]
    inner: Window | None = None
    bounds: Int64 | None = None

    def __len__(self) -> int:
        return int(self.keys.shape[1])


def limits_of(schema: Schema, max_length: int | None) -> list[int]:
    """Most events of each stream's rows."""
    return [s.max_length if max_length is None else min(max_length, s.max_length) for s in schema.streams]


def join(schema: Schema, groups: Sequence[Rows], limits: Sequence[Limits]) -> Window:
    """The window of the rows of all `groups` (at least one), one group behind the other, cut to limits[group]."""
    if schema.impression:
        own = [group.inner for group in groups if group.inner is not None]
        bounds = [group.bounds for group in groups if group.bounds is not None]
        users, inner = join(request_part(schema), groups, limits), join(impression_part(schema), own, [[]] * len(own))
        return replace(users, inner=inner, bounds=join_offsets(bounds))
    rows = sum(map(len, groups))
    columns = len(schema.id_features()) + 2 * len(schema.streams)
    views = np.zeros((columns, rows, 4), np.int32)
    buffers: list[pa.Buffer] = []
    start = 0
    for group, most in zip(groups, limits, strict=True):
        _add_views(schema, group, most, views[:, start : start + len(group)], buffers)
        start += len(group)
    return Window(
        keys=_joined([group.keys for group in groups], axis=1),
        labels=_joined([group.labels for group in groups]),
        weights=_joined([group.weights for group in groups]),
        dense=_joined([group.dense for group in groups]),
        origin=_joined([group.origin for group in groups]),
        views=views,
        buffers=tuple(buffers),
    )


def gather(windows: Sequence[Window], takes: Sequence[Int64]) -> tuple[Int64, Int64]:
    """Values of the chosen rows, column by column, in one new array; and their lengths (C, B)."""
    parts, buffers = [], []
    for window, take in zip(windows, takes, strict=True):
        chosen = window.views.take(take, axis=1)
        if buffers:
            chosen[..., BUFFER] += np.where(chosen[..., SIZE] > 8, np.int32(len(buffers)), np.int32(0))
        parts.append(chosen)
        buffers += window.buffers
    views = _joined(parts, axis=1)
    lengths_CB = (views[..., SIZE] >> 3).astype(np.int64)
    total = int(lengths_CB.sum())
    if not total:
        return np.empty(0, np.int64), lengths_CB
    rows = pa.Array.from_buffers(pa.binary_view(), lengths_CB.size, [None, pa.py_buffer(views), *buffers])
    return _as_array(pc.cast(rows, pa.large_binary()).buffers()[2], total), lengths_CB


def _add_views(
    schema: Schema, group: Rows, limits: Limits, views: npt.NDArray[np.int32], buffers: list[pa.Buffer]
) -> None:
    """Fill the views (C, rows of the group, 4), and append the buffers that they point into."""
    scalars = len(schema.scalars)
    if scalars:
        views[:scalars, :, SIZE] = 8
        views[:scalars, :, FIRST : BUFFER + 1] = _halves(group.scalars)
    column = scalars
    for jagged in group.lists:
        starts = jagged.offsets[:-1]
        _add_column(views[column], jagged.values, starts, jagged.offsets[1:] - starts, buffers)
        column += 1
    extra = len(schema.id_features())
    for events, limit in zip(group.streams, limits, strict=True):
        lengths = np.minimum(np.diff(events.offsets), limit)
        starts = events.offsets[1:] - lengths
        fields = len(events.columns) - 2
        places = [*range(column, column + fields), extra, extra + 1]
        for place, values in zip(places, events.columns, strict=True):
            _add_column(views[place], values, starts, lengths, buffers)
        column, extra = column + fields, extra + 2


def _add_column(
    view: npt.NDArray[np.int32], values: Int64, starts: Int64, lengths: Int64, buffers: list[pa.Buffer]
) -> None:
    """One column's views (R, 4) of the rows at `starts` in `values`."""
    assert not lengths.size or int(lengths.max()) <= MOST_EVENTS, "decode refuses longer rows"
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    places = starts * 8
    view[:, SIZE] = lengths * 8
    view[:, BUFFER] = len(buffers)
    if buffer.size <= _REACH:
        view[:, START] = places
        buffers.append(buffer)
    else:
        view[:, BUFFER] += (places // _REACH).astype(np.int32)
        view[:, START] = places % _REACH
        buffers += [buffer.slice(place) for place in range(0, buffer.size, _REACH)]
    single = np.flatnonzero(lengths == 1)
    if single.size:
        view[single, FIRST : BUFFER + 1] = _halves(values[starts[single]])


def _halves(values: Int64) -> npt.NDArray[np.int32]:
    """(...,) int64 -> (..., 2) int32, the same bytes."""
    return np.ascontiguousarray(values).view(np.int32).reshape(*values.shape, 2)


def _joined(parts: Sequence[npt.NDArray[Any]], axis: int = 0) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)


class _Whole:
    """numpy's way to a buffer that nobody else holds, so that the array may be written to."""

    def __init__(self, buffer: pa.Buffer, count: int) -> None:
        self.buffer = buffer
        self.__array_interface__ = {"version": 3, "shape": (count,), "typestr": "<i8", "data": (buffer.address, False)}


def _as_array(buffer: pa.Buffer, count: int) -> Int64:
    return np.asarray(_Whole(buffer, count))
