"""The user's part of a request, repeated for its impressions (requests.py says what is shared, and why it may be).

Legend: R requests, B impressions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_pipelines.model.inputs import ModelInput, Requests


class _Repeat(torch.autograd.Function):
    """x[owner]; its gradient adds up runs of rows, in their order: the same bits on every run, on CUDA too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, owner: Tensor) -> Tensor:
        ctx.save_for_backward(offsets)
        return x.index_select(0, owner)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (offsets,) = ctx.saved_tensors
        wide = grad.reshape(grad.shape[0], -1).to(torch.promote_types(grad.dtype, torch.float32))
        rows = offsets.shape[0] - 1
        if not wide.numel():
            return grad.new_zeros(rows, *grad.shape[1:]), None, None
        summed = torch.segment_reduce(wide.contiguous(), "sum", offsets=offsets, axis=0, unsafe=True)
        return summed.to(grad.dtype).reshape(rows, *grad.shape[1:]), None, None


def repeat(x_R: Tensor, requests: Requests) -> Tensor:
    """(R, ...) -> (B, ...): row r for every impression of request r. Offsets [0, 2, 3]: rows 0, 0, 1."""
    return _Repeat.apply(x_R, requests.offsets, requests.owner)  # type: ignore[no-untyped-call, no-any-return]


def of_impressions(inputs: ModelInput, key: str) -> Tensor:
    """(B, dim) vectors of a scalar or pooled feature, repeated where they stand once in a request."""
    vectors = inputs.embeddings[key]
    if inputs.requests is None or key not in inputs.requests.features:
        return vectors
    return repeat(vectors, inputs.requests)


def stream_timestamps(inputs: ModelInput) -> Tensor:
    """(R,) seconds of the rows of streams."""
    return inputs.timestamps if inputs.requests is None else inputs.timestamps[inputs.requests.offsets[:-1]]
