"""Rows of a batch as bytes, to be sent to another rank, and back: what a balancer across ranks needs.

This package knows no processes; it says how many bytes each row takes (`row_bytes`, so that receivers know sizes from
lengths that are exchanged anyway), packs chosen rows into one flat buffer (`pack_rows`) and makes a batch of buffers
(`unpack_rows`). Only numbers travel, never pickles.

A buffer of n rows, everything int64 but the floats, which are padded to whole 8 bytes a row so that every part stays
aligned wherever the buffer lies:

    sample_id user_id timestamp    3 x n
    origin                         n x 3
    scalars                        K x n
    lengths                        one n per list, one n per stream
    floats                         n x (labels T, weights T, dense F, padding) float32
    values                         of every list, then of every stream: its fields, actions, times

Requests are [impressions of each | the users' parts | their impressions], the latter two as plain rows.

Cost: one gather of the rows sent, and one copy of the rows received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gem_data.collate import Part, collate, whole_batch
from gem_data.interface import Batch, Schema
from gem_data.requests import inner_rows, split_batch
from gem_data.rows import Events, Int64, Jagged, Rows
from gem_data.schema import impression_part, request_part


def rows_of_batch(schema: Schema, batch: Batch) -> Rows:
    """The rows of a batch on the CPU as `Rows`; its tensors are not copied, but for the keys (of requests: copied)."""
    if batch.requests is not None:
        users, impressions = split_batch(schema, batch)
        inner = rows_of_batch(impression_part(schema), impressions)
        return replace(rows_of_batch(request_part(schema), users), inner=inner, bounds=batch.requests.numpy())
    count = batch.sample_ids.shape[0]
    values, lengths_KB = batch.ids.values().numpy(), batch.ids.lengths().numpy().reshape(len(batch.ids.keys()), count)
    key_ends = np.concatenate([[0], np.cumsum(lengths_KB.sum(axis=1, dtype=np.int64))])
    scalars, lists = len(schema.scalars), len(schema.lists)
    jagged = tuple(
        Jagged(values=values[key_ends[key] : key_ends[key + 1]], offsets=_offsets(lengths_KB[key]))
        for key in range(scalars, scalars + lists)
    )
    streams, key = [], scalars + lists
    for stream in schema.streams:
        held = batch.streams[stream.name]
        fields = [values[key_ends[k] : key_ends[k + 1]] for k in range(key, key + len(stream.fields))]
        key += len(stream.fields)
        columns = (*fields, held.actions.numpy(), held.times.numpy())
        streams.append(Events(columns=columns, offsets=held.offsets.numpy()))
    return Rows(
        keys=np.stack([batch.sample_ids.numpy(), batch.user_ids.numpy(), batch.timestamps.numpy()]),
        labels=batch.labels.numpy(),
        weights=batch.weights.numpy(),
        dense=batch.dense.numpy(),
        scalars=values[: key_ends[scalars]].reshape(scalars, count),
        lists=jagged,
        streams=tuple(streams),
        origin=batch.row_index.numpy(),
    )


def row_bytes(schema: Schema, batch: Batch) -> Int64:
    """(R,) bytes of every row in a packed buffer."""
    if batch.requests is not None:
        users, impressions = split_batch(schema, batch)
        own = np.concatenate([[0], np.cumsum(row_bytes(impression_part(schema), impressions))])
        return 8 + row_bytes(request_part(schema), users) + np.diff(own[batch.requests.numpy()])
    count = batch.sample_ids.shape[0]
    words = np.full(count, _fixed_words(schema), np.int64)
    lengths_KB = batch.ids.lengths().numpy().reshape(len(batch.ids.keys()), count)
    first = len(schema.scalars)
    words += lengths_KB[first : first + len(schema.lists)].sum(axis=0, dtype=np.int64)
    for stream in schema.streams:
        words += (len(stream.fields) + 2) * np.diff(batch.streams[stream.name].offsets.numpy())
    return 8 * words


def pack_rows(schema: Schema, rows: Rows, take: Int64) -> Tensor:
    """Rows `take` of `rows` as a flat uint8 tensor of the sum of their row_bytes."""
    if rows.inner is not None and rows.bounds is not None:
        counts = torch.from_numpy(np.diff(rows.bounds)[take].view(np.uint8))
        users = pack_rows(request_part(schema), replace(rows, inner=None, bounds=None), take)
        inner = pack_rows(impression_part(schema), rows.inner, inner_rows(rows.bounds, take))
        return torch.cat([counts, users, inner])
    groups = [*rows.lists, *rows.streams]
    bounds = [group.offsets for group in groups]
    lengths = [offsets[take + 1] - offsets[take] for offsets in bounds]
    indices = [_flat(offsets[take], length) for offsets, length in zip(bounds, lengths, strict=True)]
    floats = np.zeros((len(take), 2 * _float_words(schema)), np.float32)
    tasks = len(schema.labels)
    floats[:, :tasks] = rows.labels[take]
    floats[:, tasks : 2 * tasks] = rows.weights[take]
    floats[:, 2 * tasks : 2 * tasks + len(schema.dense)] = rows.dense[take]
    parts = [rows.keys[:, take], rows.origin[take], rows.scalars[:, take], *lengths, floats.view(np.int64)]
    parts += [jagged.values[index] for jagged, index in zip(rows.lists, indices, strict=False)]
    for events, index in zip(rows.streams, indices[len(rows.lists) :], strict=True):
        parts += [column[index] for column in events.columns]
    flat = np.concatenate([part.reshape(-1) for part in parts]) if len(take) else np.empty(0, np.int64)
    return torch.from_numpy(flat.view(np.uint8))


def unpack_rows(
    schema: Schema, chunks: Sequence[Tensor], counts: Sequence[int], *, global_rows: int, step: int
) -> Batch:
    """The batch of all rows of all buffers, one after the other; counts[i] rows are in chunks[i]."""
    parts = [
        _unpack_all(schema, chunk.view(torch.int64).numpy(), count)
        for chunk, count in zip(chunks, counts, strict=True)
        if count
    ]
    return whole_batch(schema, parts, global_rows=global_rows, step=step)


def take_rows(schema: Schema, batch: Batch, take: Int64) -> Batch:
    """The batch of rows `take` of `batch`, which is on the CPU; global_rows and step stay."""
    parts = [Part(rows=rows_of_batch(schema, batch), take=take)] if len(take) else []
    return collate(schema, parts, global_rows=batch.global_rows, step=batch.step)


def _unpack_all(schema: Schema, words: Int64, count: int) -> Rows:
    if not schema.impression:
        rows, rest = _unpack(schema, words, count)
    else:
        bounds = _offsets(words[:count])
        rows, rest = _unpack(request_part(schema), words[count:], count)
        inner, rest = _unpack(impression_part(schema), rest, int(bounds[-1]))
        rows = replace(rows, inner=inner, bounds=bounds)
    assert not len(rest), "a packed buffer is as long as its rows say"
    return rows


def _unpack(schema: Schema, words: Int64, count: int) -> tuple[Rows, Int64]:
    """`count` plain rows from the start of `words`, and the words behind them."""
    place = 0

    def next_words(size: int) -> Int64:
        nonlocal place
        place += size
        return words[place - size : place]

    keys = next_words(3 * count).reshape(3, count)
    origin = next_words(3 * count).reshape(count, 3)
    scalars = next_words(len(schema.scalars) * count).reshape(-1, count)
    offsets = [_offsets(next_words(count)) for _ in range(len(schema.lists) + len(schema.streams))]
    floats = next_words(_float_words(schema) * count).view(np.float32).reshape(count, -1)
    tasks = len(schema.labels)
    lists = tuple(Jagged(values=next_words(int(ends[-1])), offsets=ends) for ends in offsets[: len(schema.lists)])
    streams = tuple(
        Events(columns=tuple(next_words(int(ends[-1])) for _ in range(len(stream.fields) + 2)), offsets=ends)
        for stream, ends in zip(schema.streams, offsets[len(schema.lists) :], strict=True)
    )
    rows = Rows(
        keys=keys,
        labels=floats[:, :tasks],
        weights=floats[:, tasks : 2 * tasks],
        dense=floats[:, 2 * tasks : 2 * tasks + len(schema.dense)],
        scalars=scalars,
        lists=lists,
        streams=streams,
        origin=origin,
    )
    return rows, words[place:]


def _float_words(schema: Schema) -> int:
    return (2 * len(schema.labels) + len(schema.dense) + 1) // 2


def _fixed_words(schema: Schema) -> int:
    return 6 + len(schema.scalars) + len(schema.lists) + len(schema.streams) + _float_words(schema)


def _offsets(lengths: Int64) -> Int64:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _flat(starts: Int64, lengths: Int64) -> Int64:
    """Indices of consecutive events: starts [3, 0], lengths [2, 1] -> [3, 4, 0]."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)
