"""FLOPs and bytes of a call, counted from lengths and mask, never from padding.

Pairs are the (query, key) pairs a mask lets meet, per head, summed over the batch. FLOPs count the matmuls over those
pairs, a multiply-add as two, and in backward the recomputation of the scores (five matmuls, as the papers on flash
attention, HSTU and GDPA count); activations, norms and biases are not counted. Bytes are what must cross the memory
bus if every tensor is read once and written once: a floor, not a measurement. Everything is exact in Python integers
and needs lengths only, so a plan for a cluster or a meta tensor is counted like a real batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_attention.interface import AttentionSpec, Layout, MaskSpec

Lengths = Sequence[int] | Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionCount:
    """pairs: visible (query, key) pairs of one head; FLOPs and bytes of the whole call."""

    pairs: int
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int


def _int64(values: Lengths | None, count: int) -> Tensor:
    if values is None:
        return torch.zeros(count, dtype=torch.int64)
    return torch.as_tensor(values, dtype=torch.int64).cpu()


def count_attention(
    spec: AttentionSpec,
    *,
    q_lengths: Lengths,
    k_lengths: Lengths | None = None,
    num_targets: Lengths | None = None,
    num_context: Lengths | None = None,
    kv_index: Lengths | None = None,
    heads: int,
    kv_heads: int | None = None,
    qk_dim: int,
    v_dim: int | None = None,
    element_bytes: int = 2,
) -> AttentionCount:
    """Count one call. k_lengths defaults to q_lengths (self); for broadcast queries every q length is S.

    FLOPs of P pairs: forward 2 H (D + E) P, backward 2 H (3 D + 2 E) P. Bytes: forward reads q, k, v and writes the
    output; backward reads q, k, v and the output's gradient and writes three gradients; softmax also reads the output
    and 4 bytes of log-sum-exp per row and head, which forward wrote. Dense seeds count once, whatever the batch.

    Example: one sequence of 3, causal, 1 head, D = E = 2: 6 pairs, forward 2 * 4 * 6 = 48 FLOPs, backward 2 * 10 * 6 =
    120; with 2-byte elements forward moves 4 tensors of 6 elements = 48 bytes, backward 7 of them = 84.
    """
    samples = len(q_lengths)
    queries, kv_lengths = _int64(q_lengths, samples), _int64(q_lengths if k_lengths is None else k_lengths, samples)
    keys = kv_lengths if kv_index is None else kv_lengths[_int64(kv_index, samples)]
    targets, context = _int64(num_targets, samples), _int64(num_context, samples)
    if not samples == len(keys) == len(targets) == len(context):
        raise ValueError(
            f"one number a sample: got {samples} q lengths, {len(keys)} keys, {len(targets)} targets, "
            f"{len(context)} contexts"
        )
    pairs = count_pairs(spec, queries, keys, targets, context)
    v_dim = qk_dim if v_dim is None else v_dim
    kv_heads = heads if kv_heads is None else kv_heads
    out_rows = int(queries.sum())
    q_rows = (int(queries[0]) if samples else 0) if spec.query == "broadcast" else out_rows
    q_elements, out_elements = q_rows * heads * qk_dim, out_rows * heads * v_dim
    kv_elements = int(kv_lengths.sum()) * kv_heads * (qk_dim + v_dim)
    inputs = (q_elements + kv_elements) * element_bytes
    output = out_elements * element_bytes
    lse = 4 * out_rows * heads if spec.activation == "softmax" else 0
    saved = output + lse if lse else 0
    return AttentionCount(
        pairs=pairs,
        forward_flops=2 * heads * (qk_dim + v_dim) * pairs,
        backward_flops=2 * heads * (3 * qk_dim + 2 * v_dim) * pairs,
        forward_bytes=inputs + output + lse,
        backward_bytes=2 * inputs + output + saved,
    )


def count_call(
    q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec, layout: Layout, lengths: Lengths | None = None
) -> AttentionCount:
    """Count the call that attention(q, k, v, spec=spec, layout=layout) makes; reads the layout's offsets.

    q, k, v may be meta tensors: only shapes and dtype are used.
    """
    samples = layout.batch_size
    q_lengths = [q.shape[0]] * samples if layout.q_offsets is None else layout.q_offsets.diff()
    return count_attention(
        spec,
        q_lengths=q_lengths,
        k_lengths=layout.k_offsets.diff(),
        num_targets=layout.num_targets if spec.mask.targets else None,
        num_context=layout.num_context if spec.mask.context else None,
        kv_index=layout.kv_index,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        qk_dim=q.shape[2],
        v_dim=v.shape[2],
        element_bytes=q.element_size(),
    )


# ------------------------------------------------------------------------------------------------ pairs


def count_pairs(spec: AttentionSpec, queries: Tensor, keys: Tensor, targets: Tensor, context: Tensor) -> int:
    """Visible pairs of one head, all samples together; each argument (B,) int64. One pass over the query rows."""
    if spec.query in ("cross", "broadcast"):
        return int((queries * keys).sum())
    mask = spec.mask
    sample = torch.repeat_interleave(torch.arange(len(queries)), queries)
    start = queries.cumsum(0) - queries
    row = torch.arange(len(sample)) + (keys - queries - start)[sample]  # position in the key sequence
    keys, targets, context = keys[sample], targets[sample], context[sample]
    if mask.block:
        begin = row // mask.block * mask.block
        return int((torch.minimum(begin + mask.block, keys) - begin).sum())
    return int(_row_pairs(mask, row, keys, targets, context).sum())


def _row_pairs(mask: MaskSpec, row: Tensor, keys: Tensor, targets: Tensor, context: Tensor) -> Tensor:
    """How many columns each row sees, by region of columns: ranks are constant in the context, rise by 1 after it."""
    has_context = (context > 0).long()
    history = keys - targets - context
    target_rank = history + has_context
    rank = (row - context + has_context).clamp(min=0)
    target = row - (keys - targets)  # index of the target, negative for other rows
    if mask.semantics != "nvidia":
        rank = torch.minimum(rank, target_rank)
    lifted = rank >= target_rank - mask.min_full_rows if mask.min_full_rows else torch.zeros_like(row, dtype=torch.bool)
    reach = torch.where(lifted, keys, mask.window) if mask.window else keys
    is_context = row < context
    seen_context = torch.where(rank <= reach, context, 0)
    low = torch.maximum(rank - reach, has_context)  # history has ranks has_context .. target_rank - 1, own included
    high = torch.minimum(rank if mask.causal else rank + reach, target_rank - 1)
    seen_history = torch.where(is_context, history, (high - low + 1).clamp(min=0))
    if mask.causal:
        other_targets = torch.zeros_like(row)
    else:
        other_targets = torch.where(target_rank - rank <= reach, targets, 0)
    # Of the targets a target sees itself and, in its group, those shortly before it.
    own_group = 1 + torch.minimum(target % mask.target_group_size, reach)
    return seen_context + seen_history + torch.where(target >= 0, own_group, other_targets)
