"""From a batch and its embedded ids to what the model's maths sees."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from gem_data.interface import Batch, Schema
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from gem_pipelines.model.inputs import ModelInput, Requests, StreamInput


def to_model_input(
    batch: Batch,
    embeddings: dict[str, Tensor],
    *,
    schema: Schema,
    policies: Mapping[str, str] | None = None,
    on_host: Batch | None = None,
) -> ModelInput:
    """Name, pool and shape; no learned number is involved.

    Lists whose table is also used by scalars or events come as single vectors and are averaged here (an empty list
    gives 0); the others come averaged from the tables. An id that the policy "drop" took out has a vector of zeros and
    does not count in the average, as in the tables. One number per stream, the longest row (of requests also the most
    impressions), is read from `on_host`, the same batch on the CPU; None: from `batch`, which waits for its device.

    Of requests, what stands once in a request has one vector a request.

    Example: lists ids.tags of [[3, 5], []] over a shared table: vectors e3, e5 become rows (e3 + e5) / 2 and 0.
    """
    requests = batch.requests
    once = set(schema.request_keys())
    used_once = set(_tables_of_single_ids(schema))
    vectors = dict(embeddings)
    for feature in schema.lists:
        if feature.table in used_once:
            jagged, limit = batch.ids[feature.name], None
            lengths = jagged.lengths()
            if requests is not None and feature.name in once:
                lengths = lengths[requests[:-1]]  # the rows of the other impressions have none
            if (policies or {}).get(feature.name) == "drop":
                limit = schema.table_rows()[feature.table]
            vectors[feature.name] = mean_of_rows(vectors[feature.name], lengths, _counting(jagged, limit))
        elif requests is not None and feature.name in once:
            vectors[feature.name] = vectors[feature.name][requests[:-1]]
    streams = {}
    host = batch if on_host is None else on_host
    for name, stream in batch.streams.items():
        lengths = host.streams[name].offsets.diff()
        streams[name] = StreamInput(
            offsets=stream.offsets,
            actions=stream.actions,
            times=stream.times,
            max_len=int(lengths.max()) if lengths.numel() else 0,
        )
    return ModelInput(
        embeddings=vectors,
        dense=batch.dense,
        timestamps=batch.timestamps,
        streams=streams,
        requests=None if requests is None else _requests(schema, batch, host),
    )


def _requests(schema: Schema, batch: Batch, host: Batch) -> Requests:
    offsets = batch.requests
    assert offsets is not None
    assert host.requests is not None
    owner = torch.repeat_interleave(offsets.diff(), output_size=batch.sample_ids.shape[0])
    counts = host.requests.diff()
    return Requests(
        offsets=offsets,
        owner=owner,
        most=int(counts.max()) if counts.numel() else 0,
        features=frozenset(schema.request_keys()),
    )


def _tables_of_single_ids(schema: Schema) -> list[str]:
    events = [field.table for stream in schema.streams for field in stream.fields]
    return [feature.table for feature in schema.scalars] + events


def _counting(jagged: JaggedTensor, limit: int | None) -> Tensor | None:
    """(N,) which ids are inside a table of `limit` rows; None: all."""
    return None if limit is None else (jagged.values() >= 0) & (jagged.values() < limit)


def mean_of_rows(vectors_ND: Tensor, lengths_B: Tensor, counting_N: Tensor | None = None) -> Tensor:
    """(B, D) means of consecutive vectors: lengths [2, 0, 1] average rows 0-1, nothing (0), and row 2.

    counting_N: which vectors count in the number that is divided by; the others must be zeros.
    """
    row_N = torch.repeat_interleave(lengths_B, output_size=vectors_ND.shape[0])
    sums_BD = vectors_ND.new_zeros(lengths_B.shape[0], vectors_ND.shape[1]).index_add(0, row_N, vectors_ND)
    counts_B = lengths_B
    if counting_N is not None:
        counts_B = torch.zeros_like(lengths_B).index_add(0, row_N, counting_N.to(lengths_B.dtype))
    return sums_BD / counts_B.clamp(min=1).to(sums_BD.dtype)[:, None]
