"""Attention in batched PyTorch: for CPUs, and the plain implementation whose rounding errors set the tolerances.

Jagged rows are gathered into a few padded groups (see grouping), each group is two batched matmuls with an activation
between, and the results are gathered back. Padding cannot leak: padded rows of q, k and v are zeros, every activation
but softmax maps score 0 to 0 weight-times-value, softmax gets an additive mask, and the gradient of a gather is again
a gather that fills zeros. So a sample's result does not depend on its neighbours, up to the rounding of a matmul of
another shape. Computes in the dtype it is given. Scores of all groups are kept for backward: memory grows with the
number of pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_attention.activations import POINTWISE
from gem_attention.grouping import Group, Plan, RowGather, group_masks, group_time_buckets, plan_for
from gem_attention.interface import AttentionSpec, Layout
from gem_attention.sharing import repeat_rows, without_kv_index


def why_not(q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, layout: Layout) -> str | None:
    """Why eager cannot run: it groups samples by the values of the offsets, which meta tensors do not have."""
    return "a meta tensor has no offsets to group by" if q.device.type == "meta" else None


class _Gather(torch.autograd.Function):
    """x[forward]; its gradient is grad[backward]: a gather both ways, since no row is used twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: RowGather, backward: RowGather) -> Tensor:
        ctx.gathers = forward, backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        forward, backward = ctx.gathers
        return _Gather.apply(grad, backward, forward), None, None  # type: ignore[no-untyped-call]


def _gather(x: Tensor, forward: RowGather, backward: RowGather) -> Tensor:
    return _Gather.apply(x, forward, backward)  # type: ignore[no-untyped-call, no-any-return]


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
    own = without_kv_index(layout)
    plan = plan_for(own)
    scaled_q = q * spec.scale
    qs = _padded_q(scaled_q, plan, spec)
    ks = _padded(k, plan, keys=True)
    vs = _padded(v, plan, keys=True)
    masks = group_masks(plan, spec, own)
    biases = _biases(spec, plan, own, position_table, time_table, q)
    outputs = [
        _attend(q_g, k_g, v_g, mask, bias, spec, group)
        for q_g, k_g, v_g, mask, bias, group in zip(qs, ks, vs, masks, biases, plan.groups, strict=True)
    ]
    nothing = q[:0].sum() + k[:0].sum() + v[:0].sum()  # 0, and a path for gradients when no group is left
    if spec.query == "broadcast":
        out = _unpad_broadcast(outputs, plan, own, q, v) + nothing
        out = repeat_rows(out, layout.kv_index)
        return out / divisor.view(*out.shape[:2], 1, 1).to(out.dtype) if divisor is not None else out
    rows = [out.flatten(0, 1) for out in outputs]
    packed = torch.cat(rows) if rows else q.new_zeros(0, q.shape[1], v.shape[2]) + nothing
    out = _gather(packed, plan.q_unpad, plan.q_pad)
    return out / divisor[:, None, None].to(out.dtype) if divisor is not None else out


def _padded(x: Tensor, plan: Plan, *, keys: bool) -> list[Tensor]:
    """Per group (G, rows, heads, dim)."""
    pad, unpad = (plan.k_pad, plan.k_unpad) if keys else (plan.q_pad, plan.q_unpad)
    lengths = [group.keys if keys else group.queries for group in plan.groups]
    rows = [group.size * length for group, length in zip(plan.groups, lengths, strict=True)]
    parts = torch.split(_gather(x, pad, unpad), rows) if rows else ()
    return [part.unflatten(0, (-1, length)) for part, length in zip(parts, lengths, strict=True)]


def _padded_q(q: Tensor, plan: Plan, spec: AttentionSpec) -> list[Tensor]:
    if spec.query == "broadcast":
        return [q.expand(group.size, *q.shape) for group in plan.groups]
    return _padded(q, plan, keys=False)


def _attend(
    q_GNHD: Tensor,
    k_GMJD: Tensor,
    v_GMJE: Tensor,
    mask_GNM: Tensor | None,
    bias_GHNM: Tensor | None,
    spec: AttentionSpec,
    group: Group,
) -> Tensor:
    """One group -> (G, N, H, E). J kv heads; the H / J query heads of one kv head are stacked as more rows."""
    size, queries, heads, dim = q_GNHD.shape
    kv_heads = k_GMJD.shape[2]
    q_GJRD = q_GNHD.transpose(1, 2).reshape(size, kv_heads, -1, dim)
    scores = (q_GJRD @ k_GMJD.permute(0, 2, 3, 1)).view(size, heads, queries, -1)
    if bias_GHNM is not None:
        scores = scores + bias_GHNM
    if spec.activation == "softmax":
        hidden = _softmax_hidden(mask_GNM, group, scores)
        weights = (scores if hidden is None else scores + hidden).softmax(dim=-1)
    else:
        # Zeroing scores hides a pair, as each f(0) is 0. mul_ by bool: masked_fill is 20 times slower on a CPU.
        weights = POINTWISE[spec.activation](scores if mask_GNM is None else scores.mul_(mask_GNM[:, None]))
    out_GJRE = weights.view(size, kv_heads, -1, weights.shape[-1]) @ v_GMJE.transpose(1, 2)
    if spec.divisor != "per_token" and spec.divisor != 1:
        out_GJRE = out_GJRE / spec.divisor
    return out_GJRE.view(size, heads, queries, -1).transpose(1, 2)


def _softmax_hidden(mask_GNM: Tensor | None, group: Group, scores: Tensor) -> Tensor | None:
    """Additive mask (., 1, N, M): 0 or a huge finite number, so that an all-hidden padded row stays finite."""
    column = torch.arange(group.keys, device=scores.device)
    padding_G1M = (column >= group.k_lengths[:, None])[:, None, :]
    hidden = padding_G1M if mask_GNM is None else padding_G1M | ~mask_GNM
    huge = torch.finfo(scores.dtype).min / 2
    return torch.zeros_like(hidden, dtype=scores.dtype).masked_fill_(hidden, huge)[:, None]


def _unpad_broadcast(outputs: list[Tensor], plan: Plan, layout: Layout, q: Tensor, v: Tensor) -> Tensor:
    """(B, S, H, E), zeros for samples without keys."""
    shape = (layout.batch_size, q.shape[0], q.shape[1], v.shape[2])
    if not outputs:
        return q.new_zeros(shape)
    # q_pad has one row a sample here, so its inverse orders the samples.
    return _gather(torch.cat(outputs), plan.q_unpad, plan.q_pad)


# ------------------------------------------------------------------------------------------------ bias


def _biases(
    spec: AttentionSpec,
    plan: Plan,
    layout: Layout,
    position_table: Tensor | None,
    time_table: Tensor | None,
    q: Tensor,
) -> list[Tensor | None]:
    """Per group (1 or G, H, N, M) in q's dtype, scaled where the spec says so."""
    if spec.bias is None:
        return [None] * len(plan.groups)
    factor = spec.scale if spec.bias.where == "inside_scale" else 1.0
    totals: list[Tensor | None] = [None] * len(plan.groups)
    if position_table is not None:
        table = _per_head(position_table * factor, q)
        totals = [_position_bias(table, group, spec, layout) for group in plan.groups]
    if time_table is not None and spec.bias.time is not None:
        table = _per_head(time_table * factor, q).t().contiguous()
        for i, index in enumerate(group_time_buckets(plan, spec.bias.time, layout)):
            by_time = F.embedding(index, table).permute(0, 3, 1, 2)
            before = totals[i]
            totals[i] = by_time if before is None else before + by_time
    return totals


def _per_head(table: Tensor, q: Tensor) -> Tensor:
    return table.to(q.dtype).repeat_interleave(q.shape[1] // table.shape[0], dim=0)


def _position_bias(table_HP: Tensor, group: Group, spec: AttentionSpec, layout: Layout) -> Tensor:
    assert spec.bias is not None
    center = spec.bias.max_positions - 1  # column of distance 0
    if not layout.tail:
        # Row i of the bias is the table from column center - i on: windows of the table, in reverse.
        windows = table_HP[:, center - group.queries + 1 : center + group.keys].unfold(1, group.keys, 1)
        return windows.flip(1)[None]
    row = torch.arange(group.queries, device=table_HP.device) + (group.k_lengths - group.q_lengths)[:, None]
    distance = torch.arange(group.keys, device=table_HP.device) - row[:, :, None]
    return F.embedding((distance + center).clamp(min=0), table_HP.t()).permute(0, 3, 1, 2)
