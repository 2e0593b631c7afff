"""impl="triton": the whole family on a GPU, or anywhere in Triton's interpreter (for tests)."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_attention.fused_ops import call
from gem_attention.interface import AttentionSpec, Layout
from gem_attention.triton_config import MAX_DIM
from gem_attention.triton_launch import interpreted

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def why_not(q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, layout: Layout) -> str | None:
    """Why the kernels cannot run this call here, or None."""
    del k
    if q.dtype not in _DTYPES:
        return f"dtype {q.dtype} is not among {', '.join(map(str, _DTYPES))}"
    if max(q.shape[2], v.shape[2]) > MAX_DIM:
        return f"head dims {q.shape[2]} and {v.shape[2]}: at most {MAX_DIM}"
    if q.device.type == "cpu" and not interpreted():
        return "tensors are on the CPU, where kernels run in Triton's interpreter only (TRITON_INTERPRET=1)"
    if q.device.type not in ("cpu", "cuda"):
        return f"no kernels for device {q.device}"
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU has compute capability under 8.0"
    rows = max(layout.total_q, layout.total_k, q.shape[0] * layout.batch_size if spec.query == "broadcast" else 0)
    if rows >= 2**31:
        return f"{rows} packed rows: kernels count rows in 32 bits (elements in 64), so at most {2**31 - 1}"
    programs = (rows // 32 + layout.batch_size + 1) * q.shape[1]
    if programs >= 2**31:
        return f"{rows} rows of {q.shape[1]} heads need {programs} programs, a grid holds {2**31 - 1}"
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
        "triton",
        q,
        k,
        v,
        spec=spec,
        layout=layout,
        position_table=position_table,
        time_table=time_table,
        divisor=divisor,
    )
