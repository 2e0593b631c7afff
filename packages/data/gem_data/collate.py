"""Rows -> Batch: the values of a batch's rows are written into one buffer, and its tensors are parts of it.

A batch takes rows from one or more windows. window.py copies the values of all id columns, actions and times of these
rows, column by column, so that the first part of the buffer is the KeyedJaggedTensor's values and the rest belongs to
the streams: no Python object per row or event, and no copy behind that one.

The KeyedJaggedTensor is built directly from its values and lengths, key by key: scalars have length 1 everywhere, the
fields of a stream repeat its lengths. It is given its host-side totals too, so that nobody has to add them up again.

    two rows, keys [user, views.item], user ids (3, 5), histories ([7, 8], [])
    values [3, 5, 7, 8], lengths [1, 1, 2, 0], stride 2

numpy and Arrow rather than torch do the gathering: this runs on the reading thread, and torch's intra-op threads would
compete with the step's.

Shapes: B rows, T tasks, F dense features, K keys, N events, C columns (K, then actions and times of every stream).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_data.interface import Batch, EventStream, Schema
from gem_data.requests import inner_rows, merge_batch
from gem_data.rows import Int64, Rows
from gem_data.schema import impression_part, request_part
from gem_data.window import Window, gather, join, limits_of


@dataclass(frozen=True, kw_only=True)
class Part:
    """`take` (n,) int64: which rows of `rows`, in batch order."""

    rows: Rows
    take: Int64


def collate(
    schema: Schema,
    parts: Sequence[Part],
    *,
    max_length: int | None = None,
    global_rows: int | None = None,
    step: int = 0,
) -> Batch:
    """The Batch of the rows of all `parts`, one after the other. `parts` may be empty (B = 0).

    max_length   keep the latest events of each stream (None, or more than it: the schema's limit)
    global_rows  rows of the whole global batch; None = these rows
    """
    limits = limits_of(schema, max_length)
    windows = [join(schema, [part.rows], [limits]) for part in parts]
    return take_batch(schema, windows, [part.take for part in parts], global_rows=global_rows, step=step)


def take_batch(
    schema: Schema, windows: Sequence[Window], takes: Sequence[Int64], *, global_rows: int | None = None, step: int = 0
) -> Batch:
    """The Batch of rows takes[0] of windows[0], then takes[1] of windows[1], and so on; see `collate`."""
    if schema.impression:
        return _take_requests(schema, windows, takes, global_rows=global_rows, step=step)
    count = sum(map(len, takes))
    if not count:
        return _empty(schema, global_rows=global_rows or 0, step=step)

    def chosen(name: str) -> npt.NDArray[Any]:
        found = [getattr(window, name).take(take, axis=0) for window, take in zip(windows, takes, strict=True)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    values, lengths_CB = gather(windows, takes)
    keys = np.concatenate([window.keys.take(take, axis=1) for window, take in zip(windows, takes, strict=True)], axis=1)
    return _build(
        schema,
        keys=keys,
        floats={name: chosen(name) for name in ("labels", "weights", "dense")},
        origin=chosen("origin"),
        values=values,
        lengths_CB=lengths_CB,
        global_rows=count if global_rows is None else global_rows,
        step=step,
    )


def _take_requests(
    schema: Schema, windows: Sequence[Window], takes: Sequence[Int64], *, global_rows: int | None, step: int
) -> Batch:
    """Users' parts and impressions are taken as the plain rows they are, then laid into one batch."""
    inner, inner_takes, counts = [], [], [np.zeros(1, np.int64)]
    for window, take in zip(windows, takes, strict=True):
        assert window.inner is not None
        assert window.bounds is not None
        inner.append(window.inner)
        inner_takes.append(inner_rows(window.bounds, take))
        counts.append(np.diff(window.bounds)[take])
    users = take_batch(request_part(schema), windows, takes, global_rows=global_rows, step=step)
    impressions = take_batch(impression_part(schema), inner, inner_takes)
    return merge_batch(schema, users, impressions, np.cumsum(np.concatenate(counts)))


def whole_batch(schema: Schema, parts: Sequence[Rows], *, global_rows: int, step: int) -> Batch:
    """The Batch of all rows of all `parts`, one after the other, not cut: their columns are joined as they are."""
    parts = [part for part in parts if len(part)]
    if schema.impression:
        inner = [part.inner for part in parts if part.inner is not None]
        counts = [np.diff(part.bounds) for part in parts if part.bounds is not None]
        users = whole_batch(request_part(schema), parts, global_rows=global_rows, step=step)
        impressions = whole_batch(impression_part(schema), inner, global_rows=0, step=step)
        return merge_batch(schema, users, impressions, np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts])))
    if not parts:
        return _empty(schema, global_rows=global_rows, step=step)
    columns: list[list[Int64]] = [[part.scalars[key] for part in parts] for key in range(len(schema.scalars))]
    lengths = [[np.ones(len(part), np.int64) for part in parts]] * len(schema.scalars)
    for index in range(len(schema.lists)):
        columns.append([part.lists[index].values for part in parts])
        lengths.append([np.diff(part.lists[index].offsets) for part in parts])
    behind: list[tuple[list[Int64], list[Int64]]] = []
    for index, stream in enumerate(schema.streams):
        own = [np.diff(part.streams[index].offsets) for part in parts]
        for column in range(len(stream.fields) + 2):
            found = [part.streams[index].columns[column] for part in parts]
            if column < len(stream.fields):
                columns.append(found)
                lengths.append(own)
            else:
                behind.append((found, own))
    columns += [found for found, _ in behind]
    lengths += [own for _, own in behind]
    return _build(
        schema,
        keys=np.concatenate([part.keys for part in parts], axis=1),
        floats={
            name: np.concatenate([getattr(part, name) for part in parts]) for name in ("labels", "weights", "dense")
        },
        origin=np.concatenate([part.origin for part in parts]),
        values=np.concatenate([piece for column in columns for piece in column] or [np.empty(0, np.int64)]),
        lengths_CB=np.array([np.concatenate(own) for own in lengths], np.int64).reshape(
            len(lengths), sum(map(len, parts))
        ),
        global_rows=global_rows,
        step=step,
    )


def _build(
    schema: Schema,
    *,
    keys: Int64,
    floats: dict[str, npt.NDArray[Any]],
    origin: Int64,
    values: Int64,
    lengths_CB: Int64,
    global_rows: int,
    step: int,
) -> Batch:
    """The Batch of values that lie column by column: K keys, then actions and times of every stream."""
    names = [key for key, _ in schema.id_features()]
    count = keys.shape[1]
    totals = lengths_CB.sum(axis=1)
    ends = [0, *np.cumsum(totals).tolist()]
    flat = torch.from_numpy(values)
    streams = {}
    for index, stream in enumerate(schema.streams):
        column = len(names) + 2 * index
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(lengths_CB[column], out=offsets[1:])
        streams[stream.name] = EventStream(
            offsets=torch.from_numpy(offsets),
            actions=flat[ends[column] : ends[column + 1]],
            times=flat[ends[column + 1] : ends[column + 2]],
        )
    ids = KeyedJaggedTensor(
        keys=names,
        values=flat[: ends[len(names)]],
        lengths=torch.from_numpy(lengths_CB[: len(names)].reshape(-1)),
        stride=count,
        length_per_key=totals[: len(names)].tolist(),
        offset_per_key=ends[: len(names) + 1],
    )
    keys_3B = torch.from_numpy(keys)
    return Batch(
        sample_ids=keys_3B[0],
        user_ids=keys_3B[1],
        timestamps=keys_3B[2],
        **{name: torch.from_numpy(found) for name, found in floats.items()},
        ids=ids,
        streams=streams,
        row_index=torch.from_numpy(origin),
        global_rows=global_rows,
        step=step,
    )


def _empty(schema: Schema, *, global_rows: int, step: int) -> Batch:
    tasks, columns = len(schema.labels), len(schema.id_features()) + 2 * len(schema.streams)
    shapes = {"labels": tasks, "weights": tasks, "dense": len(schema.dense)}
    return _build(
        schema,
        keys=np.empty((3, 0), np.int64),
        floats={name: np.empty((0, width), np.float32) for name, width in shapes.items()},
        origin=np.empty((0, 3), np.int64),
        values=np.empty(0, np.int64),
        lengths_CB=np.empty((columns, 0), np.int64),
        global_rows=global_rows,
        step=step,
    )
