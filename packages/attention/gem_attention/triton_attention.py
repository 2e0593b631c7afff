"""impl="triton": the whole family on a GPU, or anywhere in Triton's interpreter (for tests).

Two operators, `gem_attention::triton_forward` and `gem_attention::triton_backward`, hold the launches, so that
torch.compile traces through without a break and torch.library.opcheck can examine them. They take the spec as text
(operators take no objects), the tensors of the layout, and no length: nothing here waits for the device.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gem_attention.interface import AttentionSpec, BiasSpec, Layout, MaskSpec, TimeBuckets
from gem_attention.triton_config import MAX_DIM
from gem_attention.triton_launch import (
    SHORT_QUERY_ROWS,
    Problem,
    backward,
    forward,
    interpreted,
)

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
    if spec.bias is not None and torch.are_deterministic_algorithms_enabled():
        return "gradients of bias tables are summed with atomics, and deterministic algorithms are on"
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
    longest_q = q.shape[0] if spec.query == "broadcast" else layout.max_q_len
    out, _ = triton_forward(
        q,
        k,
        v,
        position_table,
        time_table,
        divisor,
        layout.q_offsets,
        layout.k_offsets,
        layout.num_targets,
        layout.num_context,
        layout.kv_index,
        layout.timestamps,
        spec_text(spec),
        layout.batch_size,
        longest_q <= SHORT_QUERY_ROWS,
    )
    if spec.query == "broadcast":
        return out.view(layout.batch_size, q.shape[0], q.shape[1], v.shape[2])
    return out


@lru_cache(maxsize=256)
def spec_text(spec: AttentionSpec) -> str:
    """The spec as JSON; `read_spec` is its inverse."""
    return json.dumps(asdict(spec))


@lru_cache(maxsize=256)
def read_spec(text: str) -> AttentionSpec:
    fields = json.loads(text)
    bias = fields.pop("bias")
    if bias is not None:
        time = bias.pop("time")
        bias = BiasSpec(time=None if time is None else TimeBuckets(**time), **bias)
    return AttentionSpec(mask=MaskSpec(**fields.pop("mask")), bias=bias, **fields)


@torch.library.custom_op("gem_attention::triton_forward", mutates_args=())
def triton_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_table: Tensor | None,
    time_table: Tensor | None,
    divisor: Tensor | None,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    num_targets: Tensor | None,
    num_context: Tensor | None,
    kv_index: Tensor | None,
    timestamps: Tensor | None,
    spec: str,
    batch_size: int,
    short_queries: bool,
) -> tuple[Tensor, Tensor]:
    """(out (rows, H, E), lse); see triton_launch.forward."""
    del short_queries  # the backward's
    return forward(
        Problem(
            q=q,
            k=k,
            v=v,
            spec=read_spec(spec),
            batch_size=batch_size,
            k_offsets=k_offsets,
            q_offsets=q_offsets,
            num_targets=num_targets,
            num_context=num_context,
            kv_index=kv_index,
            timestamps=timestamps,
            position_table=position_table,
            time_table=time_table,
            divisor=divisor,
        )
    )


@torch.library.custom_op("gem_attention::triton_backward", mutates_args=())
def triton_backward(
    do: Tensor,
    out: Tensor | None,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_table: Tensor | None,
    time_table: Tensor | None,
    divisor: Tensor | None,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    num_targets: Tensor | None,
    num_context: Tensor | None,
    kv_index: Tensor | None,
    timestamps: Tensor | None,
    spec: str,
    batch_size: int,
    short_queries: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, gradient of position_table, of time_table); the last two empty where there is no table."""
    grads = backward(
        Problem(
            q=q,
            k=k,
            v=v,
            spec=read_spec(spec),
            batch_size=batch_size,
            k_offsets=k_offsets,
            q_offsets=q_offsets,
            num_targets=num_targets,
            num_context=num_context,
            kv_index=kv_index,
            timestamps=timestamps,
            position_table=position_table,
            time_table=time_table,
            divisor=divisor,
        ),
        do,
        out,
        lse,
        short_queries=short_queries,
    )
    none = q.new_empty(0)
    position = none if grads.position is None else grads.position.to(position_table.dtype)  # type: ignore[union-attr]
    time = q.new_empty(0) if grads.time is None else grads.time.to(time_table.dtype)  # type: ignore[union-attr]
    return grads.dq, grads.dk, grads.dv, position, time


@triton_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    spec, batch_size = read_spec(rest[-3]), rest[-2]
    rows = batch_size * q.shape[0] if spec.query == "broadcast" else q.shape[0]
    padded = (rows + 15) // 16 * 16
    lse_shape = (q.shape[1], padded) if spec.activation == "softmax" else (0,)
    return q.new_empty(rows, q.shape[1], v.shape[2]), q.new_empty(lse_shape, dtype=torch.float32)


@triton_backward.register_fake
def _(
    do: Tensor, out: Tensor | None, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tables = [q.new_empty(0) if t is None else t.new_empty(t.shape) for t in rest[:2]]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), tables[0], tables[1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    softmax = read_spec(inputs[-3]).activation == "softmax"
    ctx.save_for_backward(*inputs[:12], out if softmax else None, lse)
    ctx.rest = inputs[12:]
    ctx.set_materialize_grads(True)


def _backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Any, ...]:
    *inputs, out, lse = ctx.saved_tensors
    dq, dk, dv, position, time = triton_backward(do, out, lse, *inputs, *ctx.rest)
    position_table, time_table = inputs[3:5]
    return (
        dq,
        dk,
        dv,
        None if position_table is None else position,
        None if time_table is None else time,
        *[None] * 10,
    )


triton_forward.register_autograd(_backward, setup_context=_setup_context)
