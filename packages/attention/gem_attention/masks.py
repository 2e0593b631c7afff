"""Which pairs may meet: the definition, one sample at a time, as a boolean matrix one can print.

Nothing here is fast and nothing needs to be: implementations build their masks in their own way and are compared
with these. Sources: the masks of the public HSTU implementations (Meta's generative-recommenders, NVIDIA's
recsys-examples); where these two differ, `MaskSpec.semantics` names whose meaning is used.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from gem_attention.interface import MaskSpec, TimeBuckets


def ranks(mask: MaskSpec, length: int, *, num_targets: int = 0, num_context: int = 0) -> Tensor:
    """(length,) int64 ranks: context 0, history 1, 2, ... (0, 1, ... without context), then the targets.

    Example: length 6, 1 context token, 2 targets: "meta" 0 1 2 3 4 4, "nvidia" 0 1 2 3 4 5.
    """
    if num_targets + num_context > length:
        raise ValueError(f"{num_context} context tokens and {num_targets} targets do not fit into {length} tokens")
    position = torch.arange(length)
    rank = position if num_context == 0 else (position - num_context + 1).clamp(min=0)
    if mask.semantics != "nvidia":
        rank = rank.clamp(max=first_target_rank(length, num_targets, num_context))
    return rank


def first_target_rank(length: int, num_targets: int, num_context: int) -> int:
    """R: the rank of the first target, or the one that a target would have."""
    history = length - num_targets - num_context
    return history + 1 if num_context > 0 else history


def sample_mask(mask: MaskSpec, length: int, *, num_targets: int = 0, num_context: int = 0) -> Tensor:
    """(length, length) bool: row i may see column j.

    Example: causal with 2 targets, length 4, gives rows 1000, 1100, 1110, 1101: the last target skips the first.
    """
    position = torch.arange(length)
    if mask.block:
        return position[:, None] // mask.block == position[None, :] // mask.block
    rank = ranks(mask, length, num_targets=num_targets, num_context=num_context)
    target_rank = first_target_rank(length, num_targets, num_context)
    distance = rank[:, None] - rank[None, :]
    same = position[:, None] == position[None, :]
    if not mask.causal:
        distance = distance.abs()
    sees = same | (distance > 0)
    if num_targets:
        sees &= _target_pairs(mask, length, num_targets)
    if mask.window:
        lifted = (rank >= target_rank - mask.min_full_rows)[:, None] if mask.min_full_rows else torch.tensor(False)
        sees &= (distance <= mask.window) | lifted
    if num_context:
        sees |= (rank == 0)[:, None] & (rank < target_rank)[None, :]
    return sees


def _target_pairs(mask: MaskSpec, length: int, num_targets: int) -> Tensor:
    """False where two different targets of different groups would meet; a group of one is a target on its own."""
    index = torch.arange(length) - (length - num_targets)
    group = index.div(mask.target_group_size, rounding_mode="floor")
    is_target = index >= 0
    both = is_target[:, None] & is_target[None, :]
    return ~both | (group[:, None] == group[None, :])


@lru_cache(maxsize=64)
def time_boundaries(buckets: TimeBuckets) -> tuple[int, ...]:
    """count - 1 whole seconds, non-decreasing: bucket(dt) = how many of them are <= |dt|.

    Example: TimeBuckets(function="log", step=0.301, count=8) -> (2, 2, 3, 4, 5, 7, 9).
    """
    return tuple(_first_dt(buckets, b) for b in range(1, buckets.count))


def _first_dt(buckets: TimeBuckets, bucket: int) -> int:
    def value(dt: int) -> float:
        x = max(dt, 1)
        return (math.log(x) if buckets.function == "log" else math.sqrt(x)) / buckets.step

    limit = 2**62
    if math.floor(value(limit)) < bucket:
        return limit
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        if math.floor(value(middle)) >= bucket:
            high = middle
        else:
            low = middle + 1
    return low


def time_buckets(buckets: TimeBuckets, timestamps: Tensor) -> Tensor:
    """Bucket of every pair of one sample: timestamps (n,) int64 seconds -> (n, n) int64 in 0 .. count - 1.

    Row i uses t_{i+1} (the time at which what follows i happens; the last row its own time), column j uses t_j.
    """
    following = torch.cat([timestamps[1:], timestamps[-1:]])
    gap = (following[:, None] - timestamps[None, :]).abs()
    edges = torch.tensor(time_boundaries(buckets), dtype=torch.int64, device=timestamps.device)
    return torch.bucketize(gap, edges, right=True)
