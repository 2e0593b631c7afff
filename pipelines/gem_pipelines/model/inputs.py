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
class Requests:
    """Rows are requests: request r has the impressions offsets[r]:offsets[r+1], at least one.

    offsets (R + 1,) int64; owner (B,) int64: the request of each impression; most: impressions of one, a host int;
    features: keys of scalars and pooled lists whose vectors have R rows. Offsets [0, 2, 3]: owner [0, 0, 1], most 2.
    """

    offsets: Tensor
    owner: Tensor
    most: int
    features: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class ModelInput:
    """Embedded features of B rows, or impressions; R = B where `requests` is None.

    embeddings  feature key -> (B, dim) for scalars and pooled lists, (R, dim) for those that stand once in a request,
                (N, dim) packed for stream fields ("<stream>.<field>")
    dense       (B, F) float32
    timestamps  (B,) int64 seconds
    streams     stream name -> StreamInput of R rows
    requests    whose impressions are whose, where rows are requests
    """

    embeddings: dict[str, Tensor]
    dense: Tensor
    timestamps: Tensor
    streams: dict[str, StreamInput]
    requests: Requests | None = None
