"""Eager attention as an operator, for torch.compile: a compiler sees one node and breaks no graph.

Eager loops over the values of the offsets, which no compiler can trace. So while a graph is traced, `api.attention`
calls `gem_attention::eager` in its stead, and its gradient is `gem_attention::eager_backward`, written out in the file
of that name.
Cost: scores are computed again in backward, and the grouping plan is made at each call instead of once a layout.
Outside of torch.compile these operators are not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_attention import eager
from gem_attention.eager_backward import backward
from gem_attention.interface import AttentionSpec, Layout
from gem_attention.spec_text import spec_from_text


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
    """As interface.Attention, through the operator."""
    out: Tensor = eager_forward(
        q,
        k,
        v,
        position_table,
        time_table,
        divisor,
        None if layout.q_offsets is layout.k_offsets else layout.q_offsets,
        layout.k_offsets,
        layout.num_targets,
        layout.num_context,
        layout.kv_index,
        layout.timestamps,
        layout.batch_size,
        layout.total_q,
        layout.total_k,
        layout.max_q_len,
        layout.max_k_len,
        spec.to_text(),
    )
    return out


@torch.library.custom_op("gem_attention::eager", mutates_args=())
def eager_forward(
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
    batch_size: int,
    total_q: int,
    total_k: int,
    max_q_len: int,
    max_k_len: int,
    spec: str,
) -> Tensor:
    """q_offsets is None for self attention, where it is k_offsets; the rest as in interface.Layout."""
    meaning = spec_from_text(spec)
    layout = Layout(
        q_offsets=k_offsets if meaning.query == "self" else q_offsets,
        k_offsets=k_offsets,
        batch_size=batch_size,
        total_q=total_q,
        total_k=total_k,
        max_q_len=max_q_len,
        max_k_len=max_k_len,
        tail=meaning.query == "tail",
        num_targets=num_targets,
        num_context=num_context,
        kv_index=kv_index,
        timestamps=timestamps,
    )
    out = eager.attention(
        q,
        k,
        v,
        spec=meaning,
        layout=layout,
        position_table=position_table,
        time_table=time_table,
        divisor=divisor,
    )
    return out


@eager_forward.register_fake
def _(
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
    batch_size: int,
    total_q: int,
    total_k: int,
    max_q_len: int,
    max_k_len: int,
    spec: str,
) -> Tensor:
    shape = (q.shape[0], q.shape[1], v.shape[2])
    return q.new_empty((batch_size, *shape) if spec_from_text(spec).query == "broadcast" else shape)


@torch.library.custom_op("gem_attention::eager_backward", mutates_args=())
def eager_backward(
    grad: Tensor,
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
    batch_size: int,
    total_q: int,
    total_k: int,
    max_q_len: int,
    max_k_len: int,
    spec: str,
) -> list[Tensor]:
    """Gradients of q, k, v and of each table that is given, in this order."""
    meaning = spec_from_text(spec)
    layout = Layout(
        q_offsets=k_offsets if meaning.query == "self" else q_offsets,
        k_offsets=k_offsets,
        batch_size=batch_size,
        total_q=total_q,
        total_k=total_k,
        max_q_len=max_q_len,
        max_k_len=max_k_len,
        tail=meaning.query == "tail",
        num_targets=num_targets,
        num_context=num_context,
        kv_index=kv_index,
        timestamps=timestamps,
    )
    grads = backward(
        grad,
        q,
        k,
        v,
        spec=meaning,
        layout=layout,
        position_table=position_table,
        time_table=time_table,
        divisor=divisor,
    )
    return [x for x in grads if x is not None]


@eager_backward.register_fake
def _(
    grad: Tensor,
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
    batch_size: int,
    total_q: int,
    total_k: int,
    max_q_len: int,
    max_k_len: int,
    spec: str,
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (q, k, v, position_table, time_table) if x is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:12])
    ctx.rest = inputs[12:]


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    position_table, time_table = ctx.saved_tensors[3:5]
    found = iter(eager_backward(grad, *ctx.saved_tensors, *ctx.rest))
    dq, dk, dv = next(found), next(found), next(found)
    d_position = None if position_table is None else next(found)
    d_time = None if time_table is None else next(found)
    return dq, dk, dv, d_position, d_time, *[None] * 13


eager_forward.register_autograd(_gradient, setup_context=_setup)
