"""Batches of requests: one row of the data has the user's part once, and several impressions.

A batch of requests is two batches of plain rows, the users' parts (R rows) and the impressions (B rows), laid into one
(`merge_batch`, and back with `split_batch`), so that everything that gathers, packs or compares plain rows serves both.

Where things lie (interface.Batch says it for readers):

- Ids that stand once in a request are in the one KeyedJaggedTensor in the row of the request's first impression, with
  length 0 in the rows of the others. A KeyedJaggedTensor has one stride, and TorchRec's support for several differs
  between collections and shardings; two of them would be two exchanges a step. Rows without ids cost 8 bytes a key, and
  are what a sharded table meets anyway. So every id travels and is looked up once, pooled tables give the request's bag
  in its first row, a row of the tensor is still an impression with a sample_id to name in an error, and micro-batches
  join as before.
- Streams have R rows: their events are stored once and attended to once.
- user_ids, timestamps, row_index and the dense features of the request are repeated for its impressions: some dozen
  bytes beside histories of kilobytes, and every consumer that pairs them with labels stays as it is.

`expand_batch` gives the same samples as plain rows, every user part copied for each impression: the definition that
training on requests is compared with.

Cost: `merge_batch` copies the ids of a batch once more.
Shapes: R requests, B impressions, K keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_data.interface import Batch, EventStream, Schema
from gem_data.rows import Int64
from gem_data.schema import impression_part, request_part


def inner_rows(bounds: Int64, take: Int64) -> Int64:
    """The impressions of the requests `take`, in order: bounds [0, 2, 3, 6], take [2, 0] -> [3, 4, 5, 0, 1]."""
    counts = bounds[take + 1] - bounds[take]
    ends = np.cumsum(counts)
    return np.repeat(bounds[take] - (ends - counts), counts) + np.arange(int(ends[-1]) if len(ends) else 0)


def expanded_schema(schema: Schema) -> Schema:
    """The schema of the same samples as plain rows; its files are left out."""
    return dataclasses.replace(schema, impression=(), files=())


def merge_batch(schema: Schema, users: Batch, impressions: Batch, requests: Int64 | Tensor) -> Batch:
    """One batch of users' parts (R rows of request_part) and impressions (B rows of impression_part).

    requests  (R + 1,): whose impressions are whose. `impressions` gives sample_ids to row_index; global_rows and step
              are those of `users`.
    """
    offsets = torch.as_tensor(requests)
    first_R, count_B = offsets[:-1], impressions.sample_ids.shape[0]
    once, each = users.ids.keys(), impressions.ids.keys()
    keys = [key for key, _ in schema.id_features()]
    lengths_KB = torch.zeros(len(keys), count_B, dtype=torch.int64)
    totals, values = [], []
    user_values, own_values = _values_by_key(users.ids), _values_by_key(impressions.ids)
    user_lengths = users.ids.lengths().view(len(once), users.ids.stride())
    own_lengths = impressions.ids.lengths().view(len(each), count_B)
    for number, key in enumerate(keys):
        if key in each:
            place = each.index(key)
            lengths_KB[number] = own_lengths[place]
            values.append(own_values[place])
        else:
            place = once.index(key)
            lengths_KB[number, first_R] = user_lengths[place]
            values.append(user_values[place])
        totals.append(values[-1].shape[0])
    return dataclasses.replace(
        impressions,
        dense=_merge_dense(schema, users, impressions, offsets),
        ids=_keyed(keys, _joined(values), lengths_KB, totals),
        streams=users.streams,
        global_rows=users.global_rows,
        step=users.step,
        requests=offsets,
    )


def split_batch(schema: Schema, batch: Batch) -> tuple[Batch, Batch]:
    """(users' parts, impressions) of a batch on the CPU: what `merge_batch` made it of. No event is copied twice."""
    assert batch.requests is not None
    first_R = batch.requests[:-1]
    dense_columns = {name: number for number, name in enumerate(schema.dense)}

    def part(part_schema: Schema, rows: Tensor | None) -> Batch:
        def of(tensor: Tensor) -> Tensor:
            return tensor if rows is None else tensor[rows]

        tasks = len(part_schema.labels)
        return Batch(
            sample_ids=of(batch.sample_ids),
            user_ids=of(batch.user_ids),
            timestamps=of(batch.timestamps),
            labels=of(batch.labels)[:, :tasks],
            weights=of(batch.weights)[:, :tasks],
            dense=of(batch.dense)[:, [dense_columns[name] for name in part_schema.dense]],
            ids=_chosen_keys(batch.ids, [key for key, _ in part_schema.id_features()], rows),
            streams=batch.streams if part_schema.streams else {},
            row_index=of(batch.row_index),
            global_rows=batch.global_rows,
            step=batch.step,
        )

    return part(request_part(schema), first_R), part(impression_part(schema), None)


def expand_batch(schema: Schema, batch: Batch) -> Batch:
    """The same samples as plain rows (of `expanded_schema`), each with a copy of its request's part.

    global_rows becomes the number of these rows: what other ranks hold is not known here. A plain batch comes back.

    Requests of 2 and 1 impressions, users (5, 6): users 5, 5, 6.
    """
    if batch.requests is None:
        return batch
    counts_R = batch.requests.diff()
    owners_B = torch.repeat_interleave(counts_R)
    keys, totals, values = [key for key, _ in schema.id_features()], [], []
    lengths_KB = batch.ids.lengths().view(len(keys), batch.ids.stride()).clone()
    once = set(schema.request_keys())
    for number, (key, own) in enumerate(zip(keys, _values_by_key(batch.ids), strict=True)):
        if key in once:
            lengths_R = lengths_KB[number, batch.requests[:-1]]
            own, lengths_KB[number] = _repeat(own, lengths_R, owners_B), lengths_R[owners_B]
        values.append(own)
        totals.append(own.shape[0])
    streams = {}
    for name, stream in batch.streams.items():
        lengths_R = stream.offsets.diff()
        streams[name] = EventStream(
            offsets=torch.cat([stream.offsets[:1], lengths_R[owners_B].cumsum(0)]),
            actions=_repeat(stream.actions, lengths_R, owners_B),
            times=_repeat(stream.times, lengths_R, owners_B),
        )
    ids = _keyed(keys, _joined(values), lengths_KB, totals)
    return dataclasses.replace(batch, ids=ids, streams=streams, global_rows=batch.sample_ids.shape[0], requests=None)


def _repeat(values: Tensor, lengths_R: Tensor, owners_B: Tensor) -> Tensor:
    """The values of row owners[b], for every b: values [7, 8, 9] of lengths [2, 1], owners [0, 0, 1] -> 7 8 7 8 9."""
    starts_R = lengths_R.cumsum(0) - lengths_R
    lengths_B = lengths_R[owners_B]
    shift_B = starts_R[owners_B] - (lengths_B.cumsum(0) - lengths_B)
    return values[torch.repeat_interleave(shift_B, lengths_B) + torch.arange(int(lengths_B.sum()))]


def _keyed(keys: Sequence[str], values: Tensor, lengths_KB: Tensor, totals: Sequence[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(keys),
        values=values,
        lengths=lengths_KB.reshape(-1),
        stride=lengths_KB.shape[1],
        length_per_key=list(totals),
        offset_per_key=np.cumsum([0, *totals]).tolist(),
    )


def _chosen_keys(ids: KeyedJaggedTensor, wanted: Sequence[str], rows: Tensor | None) -> KeyedJaggedTensor:
    """These keys alone; with `rows`, which hold all their ids, these rows alone."""
    keys, lengths_KB = ids.keys(), ids.lengths().view(len(ids.keys()), ids.stride())
    parts = _values_by_key(ids)
    places = [keys.index(key) for key in wanted]
    chosen = lengths_KB[places] if rows is None else lengths_KB[places][:, rows]
    values = [parts[place] for place in places]
    return _keyed(wanted, _joined(values), chosen, [value.shape[0] for value in values])


def _values_by_key(ids: KeyedJaggedTensor) -> list[Tensor]:
    totals = ids.length_per_key()
    return list(ids.values().split(totals)) if totals else []


def _joined(values: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(values)) if values else torch.empty(0, dtype=torch.int64)


def _merge_dense(schema: Schema, users: Batch, impressions: Batch, offsets: Tensor) -> Tensor:
    of_users, own = request_part(schema).dense, impression_part(schema).dense
    merged = torch.empty(impressions.sample_ids.shape[0], len(schema.dense), dtype=users.dense.dtype)
    columns = {name: number for number, name in enumerate(schema.dense)}
    merged[:, [columns[name] for name in own]] = impressions.dense
    merged[:, [columns[name] for name in of_users]] = torch.repeat_interleave(users.dense, offsets.diff(), dim=0)
    return merged
