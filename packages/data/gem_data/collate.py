"""Rows -> Batch: gathers the rows of a batch straight into the buffers of its tensors.

A batch takes rows from one or more decoded windows (`Part`: rows and which of them). For every jagged group, a list or
a whole stream, the places of its rows are worked out once, and each parallel column is gathered with them, a row at a
time (gather.py): no Python object per row or event. Cutting to `max_length` is part of the same arithmetic: an event
list that is too long starts later.

The KeyedJaggedTensor is built directly from its values and lengths, key by key: scalars have length 1 everywhere, the
fields of a stream repeat its lengths. It is given its host-side totals too, so that nobody has to add them up again.

    two rows, keys [user, views.item], user ids (3, 5), histories ([7, 8], [])
    values [3, 5, 7, 8], lengths [1, 1, 2, 0], stride 2

numpy rather than torch does the gathering: this runs on the reading thread, and torch's intra-op threads would compete
with the step's.

Shapes: B rows, T tasks, F dense features, K keys, N events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_data.gather import Chosen, choose, gather
from gem_data.interface import Batch, EventStream, Schema
from gem_data.rows import Int64, Rows


@dataclass(frozen=True, kw_only=True)
class Part:
    """`take` (n,) int64: which rows of `rows`, in batch order.

    drawn: for each stream, (R,) most events of every row of `rows` (lengths.py); None: no such limits.
    """

    rows: Rows
    take: Int64
    drawn: tuple[Int64, ...] | None = None

    def limit(self, stream: int, limit: int) -> int | Int64:
        """Most events of each taken row of a stream."""
        return limit if self.drawn is None else np.minimum(self.drawn[stream][self.take], limit)


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
    count = sum(len(part.take) for part in parts)
    keys = _gather_columns([part.rows.keys for part in parts], parts, 3)
    ids, streams = _jagged_parts(schema, parts, count, max_length)
    return Batch(
        sample_ids=torch.from_numpy(keys[0]),
        user_ids=torch.from_numpy(keys[1]),
        timestamps=torch.from_numpy(keys[2]),
        labels=torch.from_numpy(_gather_rows([part.rows.labels for part in parts], parts, len(schema.labels))),
        weights=torch.from_numpy(_gather_rows([part.rows.weights for part in parts], parts, len(schema.labels))),
        dense=torch.from_numpy(_gather_rows([part.rows.dense for part in parts], parts, len(schema.dense))),
        ids=ids,
        streams=streams,
        row_index=torch.from_numpy(_gather_rows([part.rows.origin for part in parts], parts, 3, np.int64)),
        global_rows=count if global_rows is None else global_rows,
        step=step,
    )


def _jagged_parts(
    schema: Schema, parts: Sequence[Part], count: int, max_length: int | None
) -> tuple[KeyedJaggedTensor, dict[str, EventStream]]:
    """The KeyedJaggedTensor over all id features, and the streams' offsets, actions and times."""
    lists = [
        [choose(part.rows.lists[index].offsets, part.take, None) for part in parts]
        for index in range(len(schema.lists))
    ]
    limits = [
        stream.max_length if max_length is None else min(max_length, stream.max_length) for stream in schema.streams
    ]
    events = [
        [choose(part.rows.streams[index].offsets, part.take, part.limit(index, limit)) for part in parts]
        for index, limit in enumerate(limits)
    ]
    keys = [key for key, _ in schema.id_features()]
    key_totals = [count] * len(schema.scalars) + [_total(found) for found in lists]
    for stream, found in zip(schema.streams, events, strict=True):
        key_totals += [_total(found)] * len(stream.fields)
    values = np.empty(sum(key_totals), np.int64)
    lengths_KB = np.empty((len(keys), count), np.int64)

    scalars = len(schema.scalars)
    lengths_KB[:scalars] = 1
    _gather_columns([part.rows.scalars for part in parts], parts, scalars, out=values[: scalars * count])
    key, end = scalars, scalars * count
    for index, found in enumerate(lists):
        lengths_KB[key] = _lengths(found, count)
        end = _gather_flat([part.rows.lists[index].values for part in parts], found, values, end)
        key += 1
    streams = {}
    for index, (stream, found) in enumerate(zip(schema.streams, events, strict=True)):
        lengths = _lengths(found, count)
        for column in range(len(stream.fields)):
            lengths_KB[key] = lengths
            end = _gather_flat([part.rows.streams[index].columns[column] for part in parts], found, values, end)
            key += 1
        streams[stream.name] = _stream(parts, index, found, lengths)
    assert end == len(values)
    ids = KeyedJaggedTensor(
        keys=keys,
        values=torch.from_numpy(values),
        lengths=torch.from_numpy(lengths_KB.reshape(-1)),
        stride=count,
        length_per_key=key_totals,
        offset_per_key=np.cumsum([0, *key_totals]).tolist(),
    )
    return ids, streams


def _stream(parts: Sequence[Part], index: int, found: Sequence[Chosen], lengths: Int64) -> EventStream:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    actions, times = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
    _gather_flat([part.rows.streams[index].columns[-2] for part in parts], found, actions, 0)
    _gather_flat([part.rows.streams[index].columns[-1] for part in parts], found, times, 0)
    return EventStream(
        offsets=torch.from_numpy(offsets), actions=torch.from_numpy(actions), times=torch.from_numpy(times)
    )


def _total(found: Sequence[Chosen]) -> int:
    return sum(chosen.total for chosen in found)


def _lengths(found: Sequence[Chosen], count: int) -> Int64:
    return np.concatenate([chosen.lengths for chosen in found]) if found else np.zeros(count, np.int64)


def _gather_flat(sources: Sequence[Int64], found: Sequence[Chosen], out: Int64, start: int) -> int:
    """Gather every part's events into `out` from `start` on; returns where it ended."""
    for source, chosen in zip(sources, found, strict=True):
        gather(source, chosen, out[start : start + chosen.total])
        start += chosen.total
    return start


def _gather_columns(sources: Sequence[Int64], parts: Sequence[Part], columns: int, out: Int64 | None = None) -> Int64:
    """(columns, R) matrices -> (columns, B); into the flat `out` where given."""
    count = sum(len(part.take) for part in parts)
    result = (np.empty(columns * count, np.int64) if out is None else out).reshape(columns, count)
    start = 0
    for source, part in zip(sources, parts, strict=True):
        stop = start + len(part.take)
        result[:, start:stop] = source[:, part.take]
        start = stop
    return result


def _gather_rows(
    sources: Sequence[npt.NDArray[Any]], parts: Sequence[Part], columns: int, dtype: type = np.float32
) -> npt.NDArray[Any]:
    """(R, columns) matrices -> (B, columns)."""
    if not parts:
        return np.empty((0, columns), dtype)
    taken = [source[part.take] for source, part in zip(sources, parts, strict=True)]
    return taken[0] if len(taken) == 1 else np.concatenate(taken)
