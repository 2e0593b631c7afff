"""What the model's maths sees: plain tensors, no batch class, no mesh."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StreamInput:
    """One event stream, packed: row b owns events offsets[b]:offsets[b+1], oldest first.

    offsets (B + 1,) int64; actions (N,) int64 bit masks; times (N,) int64 seconds; max_len: longest row, a host int.
    """

    offsets: Tensor
    actions: Tensor
    times: Tensor
    max_len: int


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """Embedded features of B rows.

    embeddings  feature key -> (B, dim) for scalars and pooled lists, (N, dim) packed for stream fields
                ("<stream>.<field>")
    dense       (B, F) float32
    timestamps  (B,) int64 seconds
    streams     stream name -> StreamInput
    """

    embeddings: dict[str, Tensor]
    dense: Tensor
    timestamps: Tensor
    streams: dict[str, StreamInput]
