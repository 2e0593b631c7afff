"""The additive bias in the Triton kernels: looked up without search, its gradients summed without atomics.

By position. The table arrives as float32, padded by `PAD` zeros on either side, so a pair's place is j - i plus a
constant, never clamped; neighbouring threads read neighbouring words. Gradient: row i of a tile of dS is turned by i
(one gather through the columns), after which every diagonal of the tile is a column; two column sums (three where the
tile is higher than wide) are all that leaves it.

By time. A tile of histories spans few buckets: the least and greatest |dt| of a tile follow from the ends of its rows'
and columns' times, the bucket of the least one is found once for the tile, and each boundary up to the greatest costs
one comparison and one selection a pair. Gradient: the same walk with a masked row sum in the place of the selection.
Cost: 2 instructions a pair and boundary inside the tile, forward; 3, gradient. At logarithmic buckets of step 0.3 and
sorted times, tiles next to the diagonal span about 15 buckets, others 1 to 4; unsorted times cost more and stay right.

A program owns a buffer for each table and adds its sums to it with plain loads and stores; the host sums the buffers.
The order of all sums is fixed by the layout, so gradients repeat bit for bit. For this dq_kernel runs as a fixed number
of programs that take tiles in turn, and a program keeps to one head.

Times are the low 32 bits of the int64 seconds, relative to the sequence's first: exact while a sample's times span less
than 2^31 - 1 s (68 years), which `make_layout` checks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_attention.interface import TimeBuckets
from gem_attention.masks import time_boundaries
from gem_attention.triton_common import dot

PAD = 128  # rows and columns that tiles reach past a sequence's end: at most one tile
_MAX_INT32 = 2**31 - 1


class Tables(NamedTuple):
    """position: (Hb, width) float32, padded; time: (Hb, K) float32; *_part: float32 sums of dS, (programs, width) and
    (programs, K, block_m); *_group: query heads that share a row; center: the place of j = i."""

    position: Tensor | None
    time: Tensor | None
    position_part: Tensor | None
    time_part: Tensor | None
    position_group: int
    time_group: int
    width: int
    center: int


# ------------------------------------------------------------------------------------------------ kernels


class Side(NamedTuple):
    """The rows or the columns of a tile: first position, int32 times, and the least and the greatest of those."""

    first: tl.tensor
    time: tl.tensor
    least: tl.tensor
    greatest: tl.tensor


@triton.jit
def _side(first, ahead, k_start, rules, batch, SIZE: tl.constexpr, C: tl.constexpr):
    """Positions first .. first + SIZE with the times of those `ahead` further on, inside the sequence."""
    if C.time_bias != "":
        last = tl.maximum(rules.length - 1, 0)
        zero = tl.load(batch.timestamps + 2 * k_start.to(tl.int64))
        at = first + ahead + tl.arange(0, SIZE)
        at = (k_start + tl.minimum(tl.maximum(at, 0), last)).to(tl.int64)
        t = tl.load(batch.timestamps + 2 * at) - zero
        side = Side(first, t, tl.min(t, 0), tl.max(t, 0))
    else:
        side = Side(first, 0, 0, 0)
    return side


@triton.jit
def row_side(p0, k_start, rules, batch, C: tl.constexpr):
    """Rows use the time of what follows them."""
    return _side(p0, 1, k_start, rules, batch, C.block_m, C)


@triton.jit
def column_side(n0, k_start, rules, batch, C: tl.constexpr):
    return _side(n0, 0, k_start, rules, batch, C.block_n, C)


@triton.jit
def time_bucket(dt, bounds, step, C: tl.constexpr):
    """The exact bucket of dt >= 0 (int32): a float estimate, corrected by the integer boundaries next to it."""
    last: tl.constexpr = C.time_count - 1
    y = tl.maximum(dt, 1).to(tl.float32)
    if C.time_bias == "log":
        y = tl.log(y)
    else:
        y = tl.sqrt(y)
    estimate = tl.minimum(tl.maximum((y / step).to(tl.int32), 0), last)
    # bounds[b] is the least dt of bucket b; bounds[0] = 0 and bounds[count] is out of reach
    up = (dt >= tl.load(bounds + estimate + 1)).to(tl.int32)
    down = (dt < tl.load(bounds + estimate)).to(tl.int32)
    return estimate + up - down


@triton.jit
def _gaps(rows, columns, batch, numbers, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """(|dt| of a tile's pairs, the greatest, the bucket of the least)."""
    if TRANSPOSED:
        gap = tl.abs(rows.time[None, :] - columns.time[:, None])
    else:
        gap = tl.abs(rows.time[:, None] - columns.time[None, :])
    farthest = tl.maximum(rows.greatest - columns.least, columns.greatest - rows.least)
    nearest = tl.maximum(tl.maximum(rows.least - columns.greatest, columns.least - rows.greatest), 0)
    return gap, farthest, time_bucket(nearest, batch.time_bounds, numbers.time_step, C)


@triton.jit
def _walk(by_time, gap, farthest, bucket, weights, batch):
    """From boundary to boundary, up to the greatest |dt|: what lies past one takes the next bucket's weight."""
    bound = tl.load(batch.time_bounds + bucket + 1)
    while bound <= farthest:
        bucket += 1
        by_time = tl.where(gap >= bound, tl.load(weights + bucket), by_time)
        bound = tl.load(batch.time_bounds + bucket + 1)
    return by_time


@triton.jit
def bias_of(rows, columns, head, batch, numbers, tables, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """The bias of a tile, (M, N), or (N, M) if TRANSPOSED."""
    # j - i = (first column - first row) + (known at compile time), so that only one address is worked out
    if TRANSPOSED:
        step = tl.arange(0, C.block_n)[:, None] - tl.arange(0, C.block_m)[None, :]
    else:
        step = tl.arange(0, C.block_n)[None, :] - tl.arange(0, C.block_m)[:, None]
    bias = 0.0
    if C.position_bias:
        start = head // tables.position_group * tables.width + tables.center + columns.first - rows.first
        bias = tl.load(tables.position + start + step)
    if C.time_bias != "":
        gap, farthest, bucket = _gaps(rows, columns, batch, numbers, TRANSPOSED, C)
        weights = tables.time + head // tables.time_group * C.time_count
        by_time = tl.zeros_like(step).to(tl.float32) + tl.load(weights + bucket)
        if C.stages > 1:
            # Triton pipelines a loop that holds a loop only where that is inside a branch; the branch costs registers
            if tl.load(batch.time_bounds + bucket + 1) <= farthest:
                by_time = _walk(by_time, gap, farthest, bucket, weights, batch)
        else:
            by_time = _walk(by_time, gap, farthest, bucket, weights, batch)
        bias += by_time
    return bias


@triton.jit
def biased_scores(a, b, rows, columns, head, batch, numbers, tables, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """(x, scale) with scale * x the scores of the tile a b: a bias inside the scale is what the product starts from."""
    scale = numbers.scale
    if C.biased:
        # before the product: no other tile of scores is in registers then
        bias = bias_of(rows, columns, head, batch, numbers, tables, TRANSPOSED, C)
        if C.bias_inside:
            x = dot(a, b, bias, C=C)
        else:
            x = dot(a, b, C=C) * scale + bias
            scale = 1.0
    else:
        x = dot(a, b, C=C)
    return x, scale


@triton.jit
def _add(at, value):
    tl.store(at, tl.load(at) + value)


@triton.jit
def add_table_gradients(ds_MN, rows, columns, batch, numbers, tables, C: tl.constexpr):
    """Add a tile of dS, zero where no pair is, to this program's buffers."""
    program = tl.program_id(0).to(tl.int64)
    if C.position_bias:
        e_N = tl.arange(0, C.block_n)
        turned = tl.arange(0, C.block_m)[:, None] + e_N[None, :]
        turned_MN = tl.gather(ds_MN, turned % C.block_n, 1)
        at = tables.position_part + program * tables.width + (tables.center + columns.first - rows.first) + e_N
        for wrap in tl.static_range((C.block_m + C.block_n - 2) // C.block_n + 1):
            part_N = tl.sum(tl.where(turned // C.block_n == wrap, turned_MN, 0.0), 0)
            _add(at - wrap * C.block_n, part_N)
    if C.time_bias != "":
        gap, farthest, bucket = _gaps(rows, columns, batch, numbers, False, C)
        at = tables.time_part + (program * C.time_count + bucket) * C.block_m + tl.arange(0, C.block_m)
        above_M = tl.sum(ds_MN, 1)
        bound = tl.load(batch.time_bounds + bucket + 1)
        while bound <= farthest:
            next_M = tl.sum(tl.where(gap >= bound, ds_MN, 0.0), 1)
            _add(at, above_M - next_M)
            above_M = next_M
            bucket += 1
            at += C.block_m
            bound = tl.load(batch.time_bounds + bucket + 1)
        _add(at, above_M)
    # the next tile's sums may go to the same words, by other threads
    tl.debug_barrier()


# ------------------------------------------------------------------------------------------------ host


@lru_cache(maxsize=64)
def time_bounds(buckets: TimeBuckets, device: torch.device) -> Tensor:
    """(count + 1,) int32: least dt of each bucket, then a bound nothing reaches (as are those past 32 bits)."""
    bounds = [0, *(min(b, _MAX_INT32) for b in time_boundaries(buckets)), _MAX_INT32]
    return torch.tensor(bounds, dtype=torch.int32, device=device)


def low_words(timestamps: Tensor) -> Tensor:
    """int64 seconds as pairs of int32, the low word first."""
    return timestamps.contiguous().view(torch.int32)


def tables_of(position_table: Tensor | None, time_table: Tensor | None, heads: int, **parts: Any) -> Tables:
    """The tables as the kernels read them; parts: position_part and time_part, for the kernel that sums gradients."""
    position = time = None
    if position_table is not None:
        position = torch.nn.functional.pad(position_table.float(), (PAD, PAD))
    if time_table is not None:
        time = time_table.float().contiguous()
    width = 0 if position is None else position.shape[1]
    return Tables(
        position=position,
        time=time,
        position_part=parts.get("position_part"),
        time_part=parts.get("time_part"),
        position_group=1 if position is None else heads // position.shape[0],
        time_group=1 if time is None else heads // time.shape[0],
        width=width,
        center=width // 2,
    )


def programs_a_head(tiles: int, heads: int, device: torch.device) -> int:
    """How many programs share the tiles of one head: two a multiprocessor in all; two in the interpreter."""
    if device.type != "cuda":
        return min(tiles, 2)
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(tiles, wanted // heads))


def empty_parts(tables: Tables, programs: int, time_count: int, block_m: int, device: torch.device) -> Tables:
    """The tables with zeroed buffers for `programs` programs."""
    position = time = None
    if tables.position is not None:
        position = torch.zeros(programs, tables.width, dtype=torch.float32, device=device)
    if tables.time is not None:
        time = torch.zeros(programs, time_count, block_m, dtype=torch.float32, device=device)
    return tables._replace(position_part=position, time_part=time)


def summed_parts(tables: Tables, heads: int, factor: float) -> tuple[Tensor | None, Tensor | None]:
    """Gradients (Hb, P) and (Hb, K) float32; program p worked for head p % heads."""
    position = time = None
    if tables.position is not None and tables.position_part is not None:
        by_head = tables.position_part.view(-1, heads, tables.width).sum(0)[:, PAD : tables.width - PAD]
        position = by_head.view(tables.position.shape[0], -1, by_head.shape[1]).sum(1) * factor
    if tables.time is not None and tables.time_part is not None:
        by_head = tables.time_part.view(-1, heads, *tables.time_part.shape[1:]).sum((0, 3))
        time = by_head.view(tables.time.shape[0], -1, by_head.shape[1]).sum(1) * factor
    return position, time
