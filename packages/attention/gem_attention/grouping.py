"""How the eager implementation turns jagged rows into a few dense blocks.

Samples are sorted by length and cut into groups of similar length; each group is padded to its longest member. One
group costs its kernels' start-up (about half a millisecond forward and backward on a CPU core), padding costs score
elements, so a group takes shorter samples until the padding it adds outweighs a start-up. Groups are also cut at a
size whose scores stay in cache. The plan is made once per Layout and kept as long as the Layout lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gem_attention.interface import AttentionSpec, Layout, MaskSpec, TimeBuckets
from gem_attention.masks import time_boundaries

PADDING_PAIRS = 40_000  # padded (query, key) pairs that cost as much as starting another group
GROUP_PAIRS = 250_000  # pairs of one group: 4 heads of float32 scores are 4 MB


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGather:
    """Rows to take from a packed tensor; where `empty` says so, a row of zeros. Letters: S source rows, R result rows.

    index (R,) int64, 0 at the empty rows; empty (E,) int64 positions in the result; inverse: the gather of gradients
    """

    index: Tensor
    empty: Tensor

    @staticmethod
    def of(index: Tensor) -> RowGather:
        """From an index with -1 for the empty rows."""
        return RowGather(index=index.clamp(min=0), empty=(index < 0).nonzero().flatten())

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return x.new_zeros(self.index.shape[0], *x.shape[1:])
        return x.index_select(0, self.index).index_fill_(0, self.empty, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """G samples, padded to N queries and M keys. samples and lengths are (G,) int64 on the layout's device."""

    samples: Tensor
    queries: int
    keys: int
    q_lengths: Tensor
    k_lengths: Tensor

    @property
    def size(self) -> int:
        return self.samples.shape[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Groups, and which packed row stands where: q_rows and k_rows hold per group (G, N) and (G, M), -1 for padding."""

    groups: tuple[Group, ...]
    q_rows: tuple[Tensor, ...]
    k_rows: tuple[Tensor, ...]
    total_q: int
    total_k: int
    gathers: dict[tuple[str, int], tuple[RowGather, RowGather]] = field(default_factory=dict)
    masks: dict[MaskSpec, list[Tensor | None]] = field(default_factory=dict)

    def gather(self, side: Literal["q", "k"], heads: int) -> tuple[RowGather, RowGather]:
        """From (T * heads) packed rows to padded ones, group by group in the order (G, heads, rows), and back.

        Moving heads in front of rows here saves the copies that batched matmuls would make. Every packed row stands in
        at most one padded row, so the way back is a gather too.
        """
        found = self.gathers.get((side, heads))
        if found is None:
            rows = self.q_rows if side == "q" else self.k_rows
            total = self.total_q if side == "q" else self.total_k
            found = self.gathers[side, heads] = _both_ways(rows, heads, total * heads)
        return found


_plans: WeakKeyDictionary[Layout, Plan] = WeakKeyDictionary()


def plan_for(layout: Layout) -> Plan:
    """The plan of a layout without kv_index; reads the offsets on the host the first time."""
    plan = _plans.get(layout)
    if plan is None:
        plan = _plans[layout] = make_plan(layout)
    return plan


def make_plan(layout: Layout) -> Plan:
    device = layout.k_offsets.device
    k_offsets = layout.k_offsets.cpu()
    k_lengths = k_offsets.diff()
    # Broadcast queries are not gathered; one query row a sample stands for them in the cost.
    q_offsets = torch.arange(layout.batch_size + 1) if layout.q_offsets is None else layout.q_offsets.cpu()
    q_lengths = q_offsets.diff()
    groups, q_rows, k_rows = [], [], []
    for members in _cut(q_lengths.tolist(), k_lengths.tolist()):
        samples = torch.tensor(members)
        group = Group(
            samples=samples.to(device),
            queries=int(q_lengths[samples].max()),
            keys=int(k_lengths[samples].max()),
            q_lengths=q_lengths[samples].to(device),
            k_lengths=k_lengths[samples].to(device),
        )
        groups.append(group)
        q_rows.append(_padded_rows(q_offsets[samples], q_lengths[samples], group.queries).to(device))
        k_rows.append(_padded_rows(k_offsets[samples], k_lengths[samples], group.keys).to(device))
    return Plan(
        groups=tuple(groups),
        q_rows=tuple(q_rows),
        k_rows=tuple(k_rows),
        total_q=int(q_offsets[-1]),
        total_k=layout.total_k,
    )


def _cut(q_lengths: list[int], k_lengths: list[int]) -> list[list[int]]:
    """Samples of each group, longest first; those without queries or keys have nothing to compute."""
    order = [b for b in range(len(k_lengths)) if q_lengths[b] > 0 and k_lengths[b] > 0]
    order.sort(key=lambda b: (k_lengths[b], q_lengths[b]), reverse=True)
    groups: list[list[int]] = []
    queries = keys = pairs = 0
    for b in order:
        n, m = q_lengths[b], k_lengths[b]
        if groups:
            grown = max(queries, n)
            size = len(groups[-1]) + 1
            padding = size * grown * keys - pairs - n * m
            if padding <= PADDING_PAIRS and size * grown * keys <= GROUP_PAIRS:
                groups[-1].append(b)
                queries, pairs = grown, pairs + n * m
                continue
        groups.append([b])
        queries, keys, pairs = n, m, n * m
    return groups


def _padded_rows(starts: Tensor, lengths: Tensor, width: int) -> Tensor:
    """(G, width) packed row of each padded row, -1 where there is none."""
    column = torch.arange(width)
    return (starts[:, None] + column).where(column < lengths[:, None], -1)


def _both_ways(rows: tuple[Tensor, ...], heads: int, total: int) -> tuple[RowGather, RowGather]:
    if not rows:
        nothing = torch.empty(0, dtype=torch.int64)
        return RowGather.of(nothing), RowGather.of(nothing.new_full((total,), -1))
    head = torch.arange(heads, device=rows[0].device)[:, None]
    by_head = [(row[:, None] * heads + head).where(row[:, None] >= 0, -1).flatten() for row in rows]
    pad = torch.cat(by_head)
    filled = (pad >= 0).nonzero().flatten()
    unpad = pad.new_full((total,), -1)
    unpad[pad[filled]] = filled
    return RowGather.of(pad), RowGather.of(unpad)


# ------------------------------------------------------------------------------------------------ masks and buckets


def group_masks(plan: Plan, spec: AttentionSpec, layout: Layout) -> list[Tensor | None]:
    """Per group (1 or G, N, M) bool, True where a row may see a column; None where padding is all there is to hide.

    Rows and columns that are padding are left as they fall: the caller's padded q, k, v rows are zeros.
    """
    found = plan.masks.get(spec.mask)
    if found is None:
        found = plan.masks[spec.mask] = [_group_mask(group, spec.mask, layout) for group in plan.groups]
    return found


def _group_mask(group: Group, mask: MaskSpec, layout: Layout) -> Tensor | None:
    if mask == MaskSpec():
        return None
    device = group.k_lengths.device
    column = torch.arange(group.keys, device=device)[None, :]
    shift = group.k_lengths - group.q_lengths if layout.tail else group.k_lengths.new_zeros(1)
    row = torch.arange(group.queries, device=device)[None, :] + shift[:, None]
    if mask.block:
        return (row // mask.block)[:, :, None] == (column // mask.block)[:, None, :]
    zero = group.k_lengths.new_zeros(1)
    targets = layout.num_targets[group.samples] if mask.targets and layout.num_targets is not None else zero
    context = layout.num_context[group.samples] if mask.context and layout.num_context is not None else zero
    plain = not mask.targets and not mask.context
    length = group.k_lengths if not plain or mask.min_full_rows else zero + group.keys
    first_target = length - targets - context + (context > 0).long()
    rank_i = _ranks(row, mask, context, first_target)[:, :, None]
    rank_j = _ranks(column, mask, context, first_target)[:, None, :]
    distance = rank_i - rank_j if mask.causal else (rank_i - rank_j).abs()
    diagonal = row[:, :, None] == column[:, None, :]
    sees = diagonal | (distance > 0)
    if mask.targets:
        start = length - targets
        group_i = (row - start[:, None]).div(mask.target_group_size, rounding_mode="floor")[:, :, None]
        group_j = (column - start[:, None]).div(mask.target_group_size, rounding_mode="floor")[:, None, :]
        sees = sees & ((group_i < 0) | (group_j < 0) | (group_i == group_j))
    if mask.window:
        near = distance <= mask.window
        if mask.min_full_rows:
            near = near | (rank_i >= (first_target - mask.min_full_rows)[:, None, None])
        sees = sees & near
    if mask.context:
        sees = sees | ((rank_i == 0) & (rank_j < first_target[:, None, None]) & (context > 0)[:, None, None])
    return sees


def _ranks(position: Tensor, mask: MaskSpec, context: Tensor, first_target: Tensor) -> Tensor:
    has_context = (context > 0).long()
    rank = (position - (context - has_context)[:, None]).clamp(min=0)
    if mask.semantics != "nvidia":
        rank = torch.minimum(rank, first_target[:, None])
    return rank


def group_time_buckets(plan: Plan, buckets: TimeBuckets, layout: Layout) -> list[Tensor]:
    """Per group (G, N, M) int64 bucket of each pair."""
    times = layout.timestamps
    assert times is not None
    edges = torch.tensor(time_boundaries(buckets), dtype=torch.int64, device=times.device)
    following = torch.cat([times[1:], times[-1:]])
    last = layout.k_offsets[1:][layout.k_offsets.diff() > 0] - 1
    following[last] = times[last]
    result = []
    for group, rows in zip(plan.groups, plan.k_rows, strict=True):
        t, then = times[rows], following[rows]  # padding takes the last row: any value does
        if layout.tail:
            row = torch.arange(group.queries, device=t.device) + (group.k_lengths - group.q_lengths)[:, None]
            then = then.gather(1, row.clamp(max=group.keys - 1))
        gap = (then[:, :, None] - t[:, None, :]).abs()
        result.append(torch.bucketize(gap, edges, right=True))
    return result
