"""The definition: one sample and one formula at a time, in float32 or float64, differentiable by autograd.

Half-precision input is computed in float32 and rounded once, at the end; float64 input stays float64, and that is the
truth which every implementation's error is measured against. Cost: a Python loop over samples, scores in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_attention.activations import POINTWISE
from gem_attention.interface import AttentionSpec, Layout
from gem_attention.masks import sample_mask, time_buckets


def why_not(q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, layout: Layout) -> str | None:
    """Why the reference cannot run: it loops over the values of the offsets."""
    if torch.compiler.is_compiling():
        return "a compiler cannot trace its loop over samples; use impl='eager'"
    return "a meta tensor has no offsets to loop over" if q.device.type == "meta" else None


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
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return attention_in(
        wide,
        q,
        k,
        v,
        spec=spec,
        layout=layout,
        position_table=position_table,
        time_table=time_table,
        divisor=divisor,
    )


def attention_in(
    dtype: torch.dtype,
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
    """The same, every step in dtype: in q's own dtype this is the plain PyTorch that tolerances are measured by."""
    k_offsets = layout.k_offsets.tolist()
    q_offsets = None if layout.q_offsets is None else layout.q_offsets.tolist()
    kv_rows = range(layout.batch_size) if layout.kv_index is None else layout.kv_index.tolist()
    outputs = []
    for b, row in enumerate(kv_rows):
        keys = slice(k_offsets[row], k_offsets[row + 1])
        queries = slice(None) if q_offsets is None else slice(q_offsets[b], q_offsets[b + 1])
        q_NHD = q[queries].to(dtype)
        scores_HNM = sample_scores(
            q_NHD,
            k[keys].to(dtype),
            spec.scale,
            _sample_bias(spec, layout, keys, position_table, time_table, heads=q.shape[1], dtype=dtype),
            spec,
        )
        visible_NM = _sample_visible(spec, layout, b, q_NHD.shape[0], keys.stop - keys.start).to(q.device)
        out_NHE = _weighted_sum(scores_HNM, visible_NM, v[keys].to(dtype), spec)
        if divisor is not None:
            rows = queries if q_offsets is not None else slice(b * q.shape[0], (b + 1) * q.shape[0])
            out_NHE = out_NHE / divisor[rows].to(dtype)[:, None, None]
        outputs.append(out_NHE)
    if not outputs:  # no samples: no rows, but a path for gradients
        shape = (0, *q.shape[:2]) if spec.query == "broadcast" else q.shape[:2]
        return q.new_zeros(*shape, v.shape[2]) + (q[:0].sum() + k[:0].sum() + v[:0].sum())
    return (torch.stack(outputs) if spec.query == "broadcast" else torch.cat(outputs)).to(q.dtype)


def sample_scores(q_NHD: Tensor, k_MGD: Tensor, scale: float, bias_HNM: Tensor | None, spec: AttentionSpec) -> Tensor:
    """(H, N, M) scores of one sample, before mask and activation."""
    group = q_NHD.shape[1] // k_MGD.shape[1]
    scores_HNM = torch.einsum("nhd,mhd->hnm", q_NHD, k_MGD.repeat_interleave(group, dim=1))
    if bias_HNM is None:
        return scale * scores_HNM
    assert spec.bias is not None
    bias_HNM = bias_HNM[:, bias_HNM.shape[1] - q_NHD.shape[0] :]
    if spec.bias.where == "inside_scale":
        return scale * (scores_HNM + bias_HNM)
    return scale * scores_HNM + bias_HNM


def _sample_visible(spec: AttentionSpec, layout: Layout, b: int, queries: int, keys: int) -> Tensor:
    """(N, M) bool; the rows of a tail are the last ones of the whole mask."""
    if spec.query in ("cross", "broadcast"):
        return torch.ones(queries, keys, dtype=torch.bool)
    targets = int(layout.num_targets[b]) if spec.mask.targets and layout.num_targets is not None else 0
    context = int(layout.num_context[b]) if spec.mask.context and layout.num_context is not None else 0
    return sample_mask(spec.mask, keys, num_targets=targets, num_context=context)[keys - queries :]


def _sample_bias(
    spec: AttentionSpec,
    layout: Layout,
    keys: slice,
    position_table: Tensor | None,
    time_table: Tensor | None,
    *,
    heads: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """(H, M, M): for every pair of key positions, whatever the queries."""
    if spec.bias is None:
        return None
    length = keys.stop - keys.start
    total: Tensor | None = None
    if position_table is not None:
        position = torch.arange(length, device=position_table.device)
        index = position[None, :] - position[:, None] + spec.bias.max_positions - 1
        total = _for_all_heads(position_table.to(dtype)[:, index], heads)
    if time_table is not None and spec.bias.time is not None:
        assert layout.timestamps is not None
        index = time_buckets(spec.bias.time, layout.timestamps[keys])
        by_time = _for_all_heads(time_table.to(dtype)[:, index], heads)
        total = by_time if total is None else total + by_time
    return total


def _for_all_heads(bias: Tensor, heads: int) -> Tensor:
    return bias.repeat_interleave(heads // bias.shape[0], dim=0)


def _weighted_sum(scores_HNM: Tensor, visible_NM: Tensor, v_MGE: Tensor, spec: AttentionSpec) -> Tensor:
    v_MHE = v_MGE.repeat_interleave(scores_HNM.shape[0] // v_MGE.shape[1], dim=1)
    if spec.activation == "softmax":
        if v_MHE.shape[0] == 0:  # a row without keys: softmax would be 0 / 0
            weights_HNM = scores_HNM
        else:
            weights_HNM = scores_HNM.masked_fill(~visible_NM, float("-inf")).softmax(dim=-1)
    else:
        weights_HNM = POINTWISE[spec.activation](scores_HNM).masked_fill(~visible_NM, 0.0)
    out_NHE = torch.einsum("hnm,mhe->nhe", weights_HNM, v_MHE)
    return out_NHE if spec.divisor == "per_token" else out_NHE / spec.divisor
