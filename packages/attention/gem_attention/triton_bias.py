"""The additive bias in the Triton kernels: what a tile of scores starts from or is added to.

By position. A tile's bias depends on j - i alone. Once a call the table is written out as rows of `expanded`, row r
holding the table moved r places to the right: a tile is then a plain rectangle of it, read with wide loads or by the
copy engine and pipelined like a tile of K (8191 positions in bfloat16: 1 MB, which stays in the L2 cache). The table
keeps its dtype, so nothing is rounded. For scores formed transposed the same is done with the table turned round.

By time. A tile of histories spans few buckets: the least and greatest |dt| of a tile follow from the ends of its rows'
and columns' times, the bucket of the least one is found once for the tile, and each boundary up to the greatest costs
one comparison and one selection a pair. The ends are found ahead, by `time_sides_kernel`, for a tile that begins at
any token, so the loop holds no reduction. At logarithmic buckets of step 0.3 and sorted times, tiles next to the
diagonal span about 15 buckets, others 1 to 4; unsorted times cost more and stay right.

The gradients of the tables are in `triton_tables`.

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
from triton.tools.tensor_descriptor import TensorDescriptor

from gem_attention.interface import TimeBuckets
from gem_attention.masks import time_boundaries
from gem_attention.triton_common import dot
from gem_attention.triton_config import KernelSpec

PAD = 128  # rows and columns that tiles reach past a sequence's end: at most one tile
_PAST_LAST = 1  # words after the last boundary and weight, so that the next one may always be read
_MAX_INT32 = 2**31 - 1


class Tables(NamedTuple):
    """What the kernels read of the tables (None: there is none).

    rows: (Hb * R, width), row r of a head the position table moved r places; None where it travels as a descriptor.
    center: the column of row 0 for j = i. time: (Hb, K + 1) float32. times: (6, span) int32 a token: row time, least
    and greatest row time of the tile that begins here, and the same three for columns. *_group: query heads that
    share a row.
    """

    rows: Any
    time: Any
    times: Any
    position_group: Any
    time_group: Any
    width: Any
    center: Any
    span: Any


# ------------------------------------------------------------------------------------------------ kernels


class Side(NamedTuple):
    """The rows or the columns of a tile: first position, int32 times, and the least and the greatest of those."""

    first: tl.tensor
    time: tl.tensor
    least: tl.tensor
    greatest: tl.tensor


@triton.jit(do_not_specialize=["span"])
def time_sides_kernel(times, low_words, tiles, span, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Write `Tables.times` for one tile of tokens; a row's time is that of what follows it. Grid: (tiles,)."""
    at = tiles + 8 * tl.program_id(0).to(tl.int64)
    if tl.load(at) < 0:
        return
    e = tl.load(at + 1) + tl.arange(0, BLOCK)
    start = tl.load(at + 4).to(tl.int64)
    length = tl.load(at + 5)
    source = low_words + 2 * start
    zero = tl.load(source)
    last = length - 1
    own = tl.load(source + 2 * tl.minimum(e, last)) - zero
    next_one = tl.load(source + 2 * tl.minimum(e + 1, last)) - zero
    at_rows = tl.minimum(e[:, None] + (1 + tl.arange(0, ROWS))[None, :], last)
    ahead = tl.load(source + 2 * at_rows) - zero
    row_least, row_greatest = tl.min(ahead, 1), tl.max(ahead, 1)
    at_columns = tl.minimum(e[:, None] + tl.arange(0, COLUMNS)[None, :], last)
    ahead = tl.load(source + 2 * at_columns) - zero
    least, greatest = tl.min(ahead, 1), tl.max(ahead, 1)
    to = times + start + e
    inside = e < length
    span = span.to(tl.int64)
    tl.store(to, next_one, mask=inside)
    tl.store(to + span, row_least, mask=inside)
    tl.store(to + 2 * span, row_greatest, mask=inside)
    tl.store(to + 3 * span, own, mask=inside)
    tl.store(to + 4 * span, least, mask=inside)
    tl.store(to + 5 * span, greatest, mask=inside)


@triton.jit
def _side(first, k_start, tables, SIZE: tl.constexpr, WHICH: tl.constexpr, C: tl.constexpr):
    """The SIZE positions from `first`; past the sequence's end there are times of no meaning."""
    if C.time_bias != "":
        span = tables.span.to(tl.int64)
        at = tables.times + 3 * WHICH * span + (k_start + first)
        side = Side(first, tl.load(at + tl.arange(0, SIZE)), tl.load(at + span), tl.load(at + 2 * span))
    else:
        side = Side(first, 0, 0, 0)
    return side


@triton.jit
def row_side(p0, k_start, tables, C: tl.constexpr):
    return _side(p0, k_start, tables, C.block_m, 0, C)


@triton.jit
def column_side(n0, k_start, tables, C: tl.constexpr):
    return _side(n0, k_start, tables, C.block_n, 1, C)


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
def gaps(rows, columns, batch, numbers, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """(|dt| of a tile's pairs, the greatest, the bucket of the least)."""
    if TRANSPOSED:
        gap = tl.abs(rows.time[None, :] - columns.time[:, None])
    else:
        gap = tl.abs(rows.time[:, None] - columns.time[None, :])
    farthest = tl.maximum(rows.greatest - columns.least, columns.greatest - rows.least)
    nearest = tl.maximum(tl.maximum(rows.least - columns.greatest, columns.least - rows.greatest), 0)
    return gap, farthest, time_bucket(nearest, batch.time_bounds, numbers.time_step, C)


@triton.jit
def position_bias(first_row, first_column, head, position, tables, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """The position bias of a tile, (M, N), or (N, M) if TRANSPOSED, in the table's dtype."""
    ROWS: tl.constexpr = C.block_n if TRANSPOSED else C.block_m
    COLUMNS: tl.constexpr = C.block_m if TRANSPOSED else C.block_n
    if TRANSPOSED:
        at = tables.center + first_row - first_column
    else:
        at = tables.center + first_column - first_row
    row = head // tables.position_group * ROWS
    if C.query == "self":
        at = tl.multiple_of(at, 16)  # the center and all tiles' sides are
    if C.tma and C.query == "self":  # else the column is a multiple of nothing
        bias = position.load([row, at])
    else:
        r = row + tl.arange(0, ROWS)
        bias = tl.load(tables.rows + r[:, None] * tables.width + (at + tl.arange(0, COLUMNS))[None, :])
    return bias


@triton.jit
def add_time_bias(x, rows, columns, head, batch, numbers, tables, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """x plus the time bias of its tile, (M, N), or (N, M) if TRANSPOSED.

    The walk adds the weights' differences to x itself: a tile of its own would get another layout than a product has,
    and change it in shared memory each time.
    """
    gap, farthest, bucket = gaps(rows, columns, batch, numbers, TRANSPOSED, C)
    last = time_bucket(farthest, batch.time_bounds, numbers.time_step, C)
    weights = tables.time + head // tables.time_group * (C.time_count + 1)
    # the first boundary without asking whether it is in reach: most tiles have one
    weight = tl.load(weights + bucket)
    next_weight = tl.load(weights + bucket + 1)
    x += tl.where(gap >= tl.load(batch.time_bounds + bucket + 1), next_weight, weight)
    # Triton pipelines a loop that holds a loop only where that is inside a branch
    if bucket + 1 < last:
        for b in range(bucket + 2, last + 1):
            weight = next_weight
            next_weight = tl.load(weights + b)
            x += tl.where(gap >= tl.load(batch.time_bounds + b), next_weight - weight, 0.0)
    return x


@triton.jit
def biased_scores(a, b, rows, columns, head, batch, numbers, position, tables, TRANSPOSED: tl.constexpr,
                  C: tl.constexpr):  # fmt: skip
    """(x, scale) with scale * x the scores of the tile a b. The bias is worked out after the product is issued."""
    scale = numbers.scale
    x = dot(a, b, C=C)
    if C.biased:
        if not C.bias_inside:
            x = x * scale
            scale = 1.0
        if C.time_bias != "":
            x = add_time_bias(x, rows, columns, head, batch, numbers, tables, TRANSPOSED, C)
        if C.position_bias:
            x += position_bias(rows.first, columns.first, head, position, tables, TRANSPOSED, C).to(tl.float32)
    return x, scale


# ------------------------------------------------------------------------------------------------ host


@lru_cache(maxsize=64)
def time_bounds(buckets: TimeBuckets, device: torch.device) -> Tensor:
    """(count + 1,) int32: least dt of each bucket, then a bound nothing reaches (as are those past 32 bits)."""
    bounds = [0, *(min(b, _MAX_INT32) for b in time_boundaries(buckets)), _MAX_INT32]
    return torch.tensor(bounds, dtype=torch.int32, device=device)


def expanded(position_table: Tensor, rows: int, *, transposed: bool = False) -> tuple[Tensor, int]:
    """((Hb * rows, width), center): row r holds the table moved r places to the right, zeros around it.

    transposed: the table is turned round first. Example: table (1, 3) = a b c and rows 2: with the zeros left out, the
    rows are "a b c 0" and "0 a b c", and center is the column of b in the first one.
    """
    table = position_table.flip(1) if transposed else position_table
    pad = PAD + -(table.shape[1] // 2 + PAD) % 16  # center a multiple of 16
    width = -(-(table.shape[1] + 2 * pad) // 16) * 16
    padded = torch.nn.functional.pad(table, (pad + rows - 1, width - table.shape[1] - pad))
    moved = padded.unfold(1, width, 1).flip(1).contiguous()
    return moved.view(-1, width), table.shape[1] // 2 + pad


def time_sides(timestamps: Tensor, tiles: Tensor, c: KernelSpec, block: int) -> Tensor:
    """`Tables.times` for the tiles of kernel c; tiles: records of all rows of k in tiles of `block`."""
    span = -(-(timestamps.shape[0] + PAD) // 16) * 16
    times = torch.zeros(6, span, dtype=torch.int32, device=timestamps.device)
    low_words = timestamps.contiguous().view(torch.int32)  # int64 seconds as pairs of int32, the low word first
    time_sides_kernel[(tiles.shape[0],)](
        times, low_words, tiles, span, ROWS=c.block_m, COLUMNS=c.block_n, BLOCK=block, num_warps=4
    )
    return times


def tables_of(
    position_table: Tensor | None,
    time_table: Tensor | None,
    times: Tensor | None,
    c: KernelSpec,
    *,
    transposed: bool = False,
) -> tuple[Any, Tables]:
    """(the descriptor of the position table or None, the tables) as a kernel compiled for c reads them."""
    rows = position = time = None
    width = center = 0
    if position_table is not None:
        sides = (c.block_n, c.block_m) if transposed else (c.block_m, c.block_n)
        rows, center = expanded(position_table, sides[0], transposed=transposed)
        width = rows.shape[1]
        if c.tma and c.query == "self":
            position, rows = TensorDescriptor.from_tensor(rows, list(sides)), None
    if time_table is not None:
        time = torch.nn.functional.pad(time_table.float(), (0, _PAST_LAST))
    return position, Tables(
        rows=rows,
        time=time,
        times=times,
        position_group=1 if position_table is None else c.heads // position_table.shape[0],
        time_group=1 if time_table is None else c.heads // time_table.shape[0],
        width=width,
        center=center,
        span=0 if times is None else times.shape[1],
    )
