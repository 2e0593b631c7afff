"""The gradient of eager attention, written out: what the operator behind torch.compile runs, since autograd cannot
record inside of an operator. Scores are made again, group by group, so nothing of the size of the pairs is kept
between forward and backward. Each formula is the derivative of a line of `eager._attend`:

    dV = W^T dO,  dW = dO V^T,  dS = dW f'(S) M  (softmax: W (dW - sum_j dW W)),  dQ = dS K,  dK = dS^T Q
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from gem_attention.eager import biases, group_scores, padded, padded_q, padded_rows, weights_of
from gem_attention.grouping import Group, Plan, group_masks, group_time_buckets, plan_for
from gem_attention.interface import AttentionSpec, Layout
from gem_attention.sharing import without_kv_index

_aten = torch.ops.aten


def _gelu_poly_backward(grad: Tensor, x: Tensor) -> Tensor:
    x2 = x.square()
    return grad * (0.5 + x * (2 * 0.3989423 + x2 * (4 * -0.0664904 + x2 * (6 * 0.0099736))))


# gradient of f(x) for an upstream gradient; masked scores are 0 and their gradient is dropped by the caller
POINTWISE_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": _aten.silu_backward,
    "gelu": lambda grad, x: _aten.gelu_backward(grad, x),
    "gelu_tanh": lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
    "gelu_poly": _gelu_poly_backward,
    "relu": lambda grad, x: grad * (x > 0),
    "relu2": lambda grad, x: grad * (2 * x.clamp(min=0)),
    "identity": lambda grad, x: grad,
}


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: AttentionSpec,
    layout: Layout,
    position_table: Tensor | None = None,
    time_table: Tensor | None = None,
    divisor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, position_table, time_table for the output's gradient; shapes and dtypes of the inputs."""
    own = without_kv_index(layout)
    plan = plan_for(own)
    scaled = q * spec.scale
    qs, ks, vs = padded_q(scaled, plan, spec), padded(k, plan, "k"), padded(v, plan, "k")
    outer = _undivide(grad, spec, divisor)
    dos = _padded_grad(outer, plan, spec, layout, own)
    masks = group_masks(plan, spec, own)
    added = biases(spec, plan, own, position_table, time_table, q)
    tables = _TableGradients(spec, plan, own, position_table, time_table)
    dqs, dks, dvs = [], [], []
    for i, group in enumerate(plan.groups):
        dq, dk, dv, ds = _group_backward(dos[i], qs[i], ks[i], vs[i], masks[i], added[i], spec=spec, group=group)
        tables.add(i, ds)
        dqs.append(dq.sum(0) if spec.query == "broadcast" else dq)
        dks.append(dk)
        dvs.append(dv)
    if spec.query == "broadcast":
        d_scaled = torch.stack(dqs).sum(0).transpose(0, 1) if dqs else torch.zeros_like(q)
    else:
        d_scaled = _packed(dqs, plan, "q", q)
    dq = (d_scaled * spec.scale).contiguous()
    return dq, _packed(dks, plan, "k", k), _packed(dvs, plan, "k", v), *tables.results(position_table, time_table)


def _undivide(grad: Tensor, spec: AttentionSpec, divisor: Tensor | None) -> Tensor:
    if divisor is not None:
        return grad / divisor.to(grad.dtype).view(*grad.shape[:-2], 1, 1)
    return grad if spec.divisor == "per_token" or spec.divisor == 1 else grad / spec.divisor


def _padded_grad(grad: Tensor, plan: Plan, spec: AttentionSpec, layout: Layout, own: Layout) -> list[Tensor]:
    """Per group (G, H, N, E), zeros at padding."""
    if spec.query != "broadcast":
        return padded(grad, plan, "q")
    if layout.kv_index is not None:  # samples of one kv row: their gradients add up
        grad = grad.new_zeros(own.batch_size, *grad.shape[1:]).index_add_(0, layout.kv_index, grad)
    rows = [group.size for group in plan.groups]
    pad, _ = plan.gather("q", 1)
    return list(torch.split(pad(grad.transpose(1, 2).contiguous()), rows)) if rows else []


def _packed(parts: list[Tensor], plan: Plan, side: Literal["q", "k"], like: Tensor) -> Tensor:
    """Per group (G, heads, rows, dim) -> (T, heads, dim), zeros for rows in no group."""
    if not parts:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    return padded_rows(parts, plan, side, like.shape[1], like.shape[2])


def _group_backward(
    do_GHNE: Tensor,
    q_GHND: Tensor,
    k_GJMD: Tensor,
    v_GJME: Tensor,
    mask_GNM: Tensor | None,
    bias_GHNM: Tensor | None,
    *,
    spec: AttentionSpec,
    group: Group,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq (G, H, N, D), dk, dv (G, J, M, .), ds (G, H, N, M)."""
    kv_heads = k_GJMD.shape[1]

    def rows(x_GHNX: Tensor) -> Tensor:  # the query heads of a kv head as more rows
        return x_GHNX.reshape(x_GHNX.shape[0], kv_heads, -1, x_GHNX.shape[-1])

    scores = group_scores(q_GHND, k_GJMD, bias_GHNM)
    shown, weights = weights_of(scores, mask_GNM, spec, group)
    do_GJRE = rows(do_GHNE)
    dw = (do_GJRE @ v_GJME.transpose(2, 3)).view_as(weights)
    dv = rows(weights).transpose(2, 3) @ do_GJRE
    if spec.activation == "softmax":
        ds = weights * (dw - (dw * weights).sum(-1, keepdim=True))
    else:
        ds = POINTWISE_BACKWARD[spec.activation](dw, shown)
        if mask_GNM is not None:
            ds = ds * mask_GNM[:, None]
    ds_GJRM = rows(ds)
    dq = (ds_GJRM @ k_GJMD).view(q_GHND.shape)
    return dq, ds_GJRM.transpose(2, 3) @ rows(q_GHND), dv, ds


class _TableGradients:
    """Sums dS into the tables' gradients, in float32 at least."""

    def __init__(
        self, spec: AttentionSpec, plan: Plan, layout: Layout, position_table: Tensor | None, time_table: Tensor | None
    ) -> None:
        self.spec, self.plan, self.layout = spec, plan, layout
        self.by_head: dict[str, list[Tensor]] = {"position": [], "time": []}
        self.wanted = {"position": position_table, "time": time_table}
        time = spec.bias.time if spec.bias is not None and time_table is not None else None
        self.buckets = group_time_buckets(plan, time, layout) if time is not None else []

    def add(self, i: int, ds_GHNM: Tensor) -> None:
        if self.wanted["position"] is None and self.wanted["time"] is None:
            return
        wide = ds_GHNM.to(torch.promote_types(ds_GHNM.dtype, torch.float32))
        position, time = self.wanted["position"], self.wanted["time"]
        if position is not None:
            self.by_head["position"].append(_sum_by_index(wide, self._columns(i), position.shape[1]))
        if time is not None:
            self.by_head["time"].append(_sum_by_index(wide, self.buckets[i], time.shape[1]))

    def _columns(self, i: int) -> Tensor:
        """(G, N, M) column of the position table of each pair; padding clamped, where ds is 0."""
        assert self.spec.bias is not None
        group = self.plan.groups[i]
        shift = group.k_lengths - group.q_lengths if self.layout.tail else torch.zeros_like(group.k_lengths)
        row = torch.arange(group.queries, device=shift.device) + shift[:, None]
        distance = torch.arange(group.keys, device=shift.device) - row[:, :, None]
        return (distance + self.spec.bias.max_positions - 1).clamp(min=0)

    def results(self, position_table: Tensor | None, time_table: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return self._result("position", position_table), self._result("time", time_table)

    def _result(self, name: str, table: Tensor | None) -> Tensor | None:
        if table is None:
            return None
        if not self.by_head[name]:
            return torch.zeros_like(table, memory_format=torch.contiguous_format)
        assert self.spec.bias is not None
        total_HK = torch.stack(self.by_head[name]).sum(0)
        factor = self.spec.scale if self.spec.bias.where == "inside_scale" else 1.0
        return (total_HK.view(table.shape[0], -1, table.shape[1]).sum(1) * factor).to(table.dtype)


def _sum_by_index(ds_GHNM: Tensor, index_GNM: Tensor, columns: int) -> Tensor:
    """(H, columns): within each sample first, then over samples, which rounds less than one long sum."""
    sums = ds_GHNM.new_zeros(*ds_GHNM.shape[:2], columns)
    index = index_GNM.flatten(1)[:, None].expand(-1, ds_GHNM.shape[1], -1)
    return sums.scatter_add_(2, index, ds_GHNM.flatten(2)).sum(0)
