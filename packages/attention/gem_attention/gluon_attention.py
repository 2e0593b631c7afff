"""impl="gluon": the pointwise members of the family on Hopper GPUs, at the speed the chip has.

What it covers is listed by `why_not`; everything else is refused with the reason, and impl="triton" covers it. Its
backward for samples of at most 64 queries without mask is impl="triton"'s kernel for that case, which is bound by
memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_attention.fused_ops import call
from gem_attention.gluon_launch import DIMS
from gem_attention.interface import AttentionSpec, Layout
from gem_attention.triton_attention import why_not as why_not_triton
from gem_attention.triton_launch import tma_fits


def why_not(q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, layout: Layout) -> str | None:
    """Why the kernels cannot run this call here, or None."""
    if q.device.type != "cuda":
        return f"tensors are on {q.device}: the kernels are Hopper machine code and have no interpreter"
    if torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"the GPU has compute capability {torch.cuda.get_device_capability(q.device)}, the kernels need (9, 0)"
    return why_not_triton(q, k, v, spec=spec, layout=layout) or _why_not_spec(q, k, v, spec, layout)


def _why_not_spec(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, layout: Layout) -> str | None:
    if spec.activation == "softmax":
        return "softmax is not among its activations"
    if spec.bias is not None:
        return "it has no bias"
    if spec.query == "broadcast" or layout.kv_index is not None:
        return "it has no broadcast queries and no shared kv rows"
    if spec.divisor == "per_token":
        return "the divisor must be a number"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype}: bfloat16 or float16"
    if not (q.shape[2] == v.shape[2] and q.shape[2] in DIMS):
        return f"head dims {q.shape[2]} and {v.shape[2]}: both must be {' or '.join(map(str, DIMS))}"
    if q.numel() and k.numel() and not tma_fits(q, k, v):
        return "q, k, v need a last stride of 1, other strides and addresses that are multiples of 16 bytes"
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    layout: Layout,
    position_table: Tensor | None = None,
    time_table: Tensor | None = None,
    divisor: Tensor | None = None,
) -> Tensor:
    """See interface.Attention."""
    return call(
        "gluon",
        q,
        k,
        v,
        spec=spec,
        layout=layout,
        position_table=position_table,
        time_table=time_table,
        divisor=divisor,
    )
