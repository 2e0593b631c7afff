"""The operators behind impl="triton" and impl="gluon": `gem_attention::fused_forward` and
`gem_attention::fused_backward`.

They hold the launches, so that torch.compile traces through without a break and torch.library.opcheck can examine them.
Operators take no objects: the spec travels as text, the layout as its tensors. They take no length of a batch either,
so nothing recompiles with it, and nothing waits for the device. `lists` is the number of the layout's tile lists.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gem_attention.interface import AttentionSpec, Layout
from gem_attention.spec_text import spec_from_text
from gem_attention.tile_lists import lists_of, number_of
from gem_attention.triton_launch import SHORT_QUERY_ROWS, Problem


def _launches(impl: str) -> ModuleType:
    """The module whose forward and backward this impl launches."""
    if impl == "gluon":
        from gem_attention import gluon_launch

        return gluon_launch
    from gem_attention import triton_launch

    return triton_launch


def call(
    impl: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    layout: Layout,
    position_table: Tensor | None,
    time_table: Tensor | None,
    divisor: Tensor | None,
) -> Tensor:
    """An Attention call through the operators."""
    longest_q = q.shape[0] if spec.query == "broadcast" else layout.max_q_len
    run = fused_forward if torch.compiler.is_compiling() else _Eager.apply
    out, _ = run(
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
        spec.to_text(),
        layout.batch_size,
        next((rows for rows in SHORT_QUERY_ROWS if longest_q <= rows), 0),
        number_of(layout),
        impl,
    )
    if spec.query == "broadcast":
        return out.view(layout.batch_size, q.shape[0], q.shape[1], v.shape[2])
    return out


@torch.library.custom_op("gem_attention::fused_forward", mutates_args=())
def fused_forward(
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
    short_queries: int,
    lists: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """(out (rows, H, E), lse); see triton_launch.forward."""
    del short_queries  # the backward's
    return _launches(impl).forward(
        Problem(
            q=q,
            k=k,
            v=v,
            spec=spec_from_text(spec),
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
            lists=lists,
        )
    )


@torch.library.custom_op("gem_attention::fused_backward", mutates_args=())
def fused_backward(
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
    short_queries: int,
    lists: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, gradient of position_table, of time_table); the last two empty where there is no table."""
    grads = _launches(impl).backward(
        Problem(
            q=q,
            k=k,
            v=v,
            spec=spec_from_text(spec),
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
            lists=lists,
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


@fused_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    spec, batch_size = spec_from_text(rest[-5]), rest[-4]
    rows = batch_size * q.shape[0] if spec.query == "broadcast" else q.shape[0]
    padded = (rows + 15) // 16 * 16
    lse_shape = (q.shape[1], padded) if spec.activation == "softmax" else (0,)
    return q.new_empty(rows, q.shape[1], v.shape[2]), q.new_empty(lse_shape, dtype=torch.float32)


@fused_backward.register_fake
def _(
    do: Tensor, out: Tensor | None, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tables = [q.new_empty(0) if t is None else t.new_empty(t.shape) for t in rest[:2]]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), tables[0], tables[1]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, lse = output
    softmax = spec_from_text(inputs[-5]).activation == "softmax"
    ctx.save_for_backward(*inputs[:12], out if softmax else None, lse)
    ctx.rest = inputs[12:]
    ctx.lists = lists_of(inputs[-2])  # the layout may be gone by the time of the backward
    ctx.set_materialize_grads(True)


def _backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Any, ...]:
    *inputs, out, lse = ctx.saved_tensors
    dq, dk, dv, position, time = fused_backward(do, out, lse, *inputs, *ctx.rest)
    position_table, time_table = inputs[3:5]
    return (
        dq,
        dk,
        dv,
        None if position_table is None else position,
        None if time_table is None else time,
        *[None] * 12,
    )


fused_forward.register_autograd(_backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The operators with their gradient, outside of torch.compile.

    The autograd that torch.library puts around an operator reads the whole schema once an argument: with 18 of them
    that is 0.2 to 0.4 ms of host time a call, more than all the launches.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = fused_forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)
