"""Attention in batched PyTorch: for CPUs, and the plain implementation whose rounding errors set the tolerances.

Jagged rows are gathered into a few padded groups (see grouping), each group is two batched matmuls with an activation
between, and the results are gathered back. Padding cannot leak: padded rows of q, k and v are zeros, every activation
but softmax maps score 0 to 0 weight-times-value, softmax gets an additive mask, and the gradient of a gather is again
a gather that fills zeros. So a sample's result does not depend on its neighbours, up to the rounding of a matmul of
another shape. Computes in the dtype it is given. Scores of all groups are kept for backward: memory grows with the
number of pairs.
"""

from __future__ import annotations

from typing import Any, Literal

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
    qs = padded_q(q * spec.scale, plan, spec)
    ks = padded(k, plan, "k")
    vs = padded(v, plan, "k")
    masks = group_masks(plan, spec, own)
    added = biases(spec, plan, own, position_table, time_table, q)
    outputs = [
        _attend(q_g, k_g, v_g, mask, bias, spec=spec, group=group)
        for q_g, k_g, v_g, mask, bias, group in zip(qs, ks, vs, masks, added, plan.groups, strict=True)
    ]
    if spec.query == "broadcast":
        out = repeat_rows(_unpad_broadcast(outputs, plan, own, q, v), layout.kv_index)
    else:
        out = _unpad(outputs, plan, q, v)
    if not outputs:  # zeros, but with a path for gradients
        out = out + (q[:0].sum() + k[:0].sum() + v[:0].sum())
    if divisor is not None:
        return out / divisor.to(out.dtype).view(*out.shape[:-2], 1, 1)
    return out if spec.divisor == "per_token" or spec.divisor == 1 else out / spec.divisor


def padded(x: Tensor, plan: Plan, side: Literal["q", "k"]) -> list[Tensor]:
    """Per group (G, heads, rows, dim), contiguous."""
    heads, dim = x.shape[1:]
    lengths = [group.keys if side == "k" else group.queries for group in plan.groups]
    rows = [group.size * heads * length for group, length in zip(plan.groups, lengths, strict=True)]
    parts = torch.split(_gather(x.reshape(-1, dim), *plan.gather(side, heads)), rows) if rows else ()
    return [part.view(-1, heads, length, dim) for part, length in zip(parts, lengths, strict=True)]


def padded_q(q: Tensor, plan: Plan, spec: AttentionSpec) -> list[Tensor]:
    if spec.query == "broadcast":
        q_HSD = q.transpose(0, 1).contiguous()
        return [q_HSD.expand(group.size, *q_HSD.shape) for group in plan.groups]
    return padded(q, plan, "q")


def _attend(
    q_GHND: Tensor,
    k_GJMD: Tensor,
    v_GJME: Tensor,
    mask_GNM: Tensor | None,
    bias_GHNM: Tensor | None,
    *,
    spec: AttentionSpec,
    group: Group,
) -> Tensor:
    """One group -> (G, H, N, E). J kv heads; the H / J query heads of one kv head are stacked as more rows."""
    _, weights = weights_of(group_scores(q_GHND, k_GJMD, bias_GHNM), mask_GNM, spec, group)
    kv_heads = v_GJME.shape[1]
    if kv_heads == q_GHND.shape[1]:
        return weights @ v_GJME
    rows = weights.view(group.size, kv_heads, -1, group.keys)
    return (rows @ v_GJME).view(*q_GHND.shape[:3], -1)


def group_scores(q_GHND: Tensor, k_GJMD: Tensor, bias_GHNM: Tensor | None) -> Tensor:
    """(G, H, N, M)."""
    size, heads, queries, dim = q_GHND.shape
    kv_heads = k_GJMD.shape[1]
    if kv_heads == heads:
        scores = q_GHND @ k_GJMD.transpose(2, 3)
    else:
        q_GJRD = q_GHND.reshape(size, kv_heads, -1, dim)
        scores = (q_GJRD @ k_GJMD.transpose(2, 3)).view(size, heads, queries, -1)
    return scores if bias_GHNM is None else scores + bias_GHNM


def weights_of(scores: Tensor, mask_GNM: Tensor | None, spec: AttentionSpec, group: Group) -> tuple[Tensor, Tensor]:
    """(scores with the hidden ones at 0, or a huge negative for softmax; weights). May overwrite scores."""
    if spec.activation == "softmax":
        hidden = scores + _softmax_hidden(mask_GNM, group, scores)
        return hidden, hidden.softmax(dim=-1)
    if mask_GNM is not None:
        # Zeroing scores hides a pair, as each f(0) is 0. A product by bool, as masked_fill is 20 times slower on a CPU;
        # in place only where scores is no view, since autograd copies the gradient of a view changed in place.
        shown = mask_GNM[:, None]
        scores = scores * shown if scores._is_view() else scores.mul_(shown)
    return scores, POINTWISE[spec.activation](scores)


def _softmax_hidden(mask_GNM: Tensor | None, group: Group, scores: Tensor) -> Tensor:
    """Additive mask (., 1, N, M): 0 or a huge finite number, so that an all-hidden padded row stays finite."""
    column = torch.arange(group.keys, device=scores.device)
    padding_G1M = (column >= group.k_lengths[:, None])[:, None, :]
    hidden = padding_G1M if mask_GNM is None else padding_G1M | ~mask_GNM
    huge = torch.finfo(scores.dtype).min / 2
    return torch.zeros_like(hidden, dtype=scores.dtype).masked_fill_(hidden, huge)[:, None]


def _unpad(outputs: list[Tensor], plan: Plan, q: Tensor, v: Tensor) -> Tensor:
    """(Tq, H, E), zeros for rows without keys."""
    if not outputs:
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    return padded_rows(outputs, plan, "q", q.shape[1], v.shape[2])


def padded_rows(parts: list[Tensor], plan: Plan, side: Literal["q", "k"], heads: int, dim: int) -> Tensor:
    """Per group (G, heads, rows, dim) -> packed (T, heads, dim), the inverse of `padded`."""
    pad, unpad = plan.gather(side, heads)
    return _gather(torch.cat([part.reshape(-1, dim) for part in parts]), unpad, pad).view(-1, heads, dim)


def _unpad_broadcast(outputs: list[Tensor], plan: Plan, layout: Layout, q: Tensor, v: Tensor) -> Tensor:
    """(B, S, H, E), zeros for samples without keys."""
    if not outputs:
        return q.new_zeros(layout.batch_size, q.shape[0], q.shape[1], v.shape[2])
    pad, unpad = plan.gather("q", 1)  # one row a sample here
    return _gather(torch.cat(outputs), unpad, pad).transpose(1, 2).contiguous()


# ------------------------------------------------------------------------------------------------ bias


def biases(
    spec: AttentionSpec,
    plan: Plan,
    layout: Layout,
    position_table: Tensor | None,
    time_table: Tensor | None,
    q: Tensor,
) -> list[Tensor | None]:
    """Per group (1 or G, H, N, M) in q's dtype, scaled where the spec says so.

    Looked up in float32 at least: a table's gradient sums over many pairs, which half precision would lose.
    """
    if spec.bias is None:
        return [None] * len(plan.groups)
    factor = spec.scale if spec.bias.where == "inside_scale" else 1.0
    totals: list[Tensor | None] = [None] * len(plan.groups)
    if position_table is not None:
        table = _per_head(position_table * factor, q)
        totals = [_position_bias(table, group, spec, layout).to(q.dtype) for group in plan.groups]
    if time_table is not None and spec.bias.time is not None:
        table = _per_head(time_table * factor, q)
        for i, index in enumerate(group_time_buckets(plan, spec.bias.time, layout)):
            # One table a sample, so that a gradient sums within each sample before it sums over them: less rounding.
            tables_GHK = table.expand(index.shape[0], *table.shape)
            pairs_GHP = index.flatten(1)[:, None].expand(-1, table.shape[0], -1)
            by_time = tables_GHK.gather(2, pairs_GHP).view(*tables_GHK.shape[:2], *index.shape[1:]).to(q.dtype)
            before = totals[i]
            totals[i] = by_time if before is None else before + by_time
    return totals


def _per_head(table: Tensor, q: Tensor) -> Tensor:
    wide = table.to(torch.promote_types(q.dtype, torch.float32))
    return wide.repeat_interleave(q.shape[1] // table.shape[0], dim=0)


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
