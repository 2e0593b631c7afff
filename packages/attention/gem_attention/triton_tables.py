"""The gradients of the bias tables: a Triton kernel of its own that walks down the diagonals of tiles.

Tiles (r, c), (r + 1, c + 1), ... of one sample have the same j - i at the same place. A program takes such a run, works
out S and dP of each tile again (two products), and adds dS up elementwise in registers; only at the run's end are the
diagonals of the one sum taken and added to a buffer. Inside dq, where each step of a program has another offset, that
turn of a tile (a gather and dependent reads and writes of memory) came once a tile: 14.5 ms instead of 1.7 on an H200.
The position bias of a run is read once.

Time buckets: the tiles of a run have different ones, so each tile adds its masked row sums, one bucket after the other,
as in `triton_bias`. The sums leave as reductions in memory that nothing waits for. Every word of a buffer belongs to
one thread of one program, and a thread's own additions to a word keep their order: gradients repeat bit for bit.

A run that begins at row tile r (column 0) or column tile c (row 0) is one record of the lists that the other kernels
use; a column tile is written as a negative row. Programs are as many as fit on the card and take the runs of one head
in turn, long sequences first; each has buffers of its own, which the host sums.

Cost: 2 of the 7 products of the other two kernels again, Q, dO, K and V read once a tile (from the L2 cache).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_attention.triton_backward import chain, row_numbers
from gem_attention.triton_bias import add_time_bias, column_side, gaps, position_bias, row_side, time_bucket
from gem_attention.triton_common import dot, key_range, load_rows, pair_mask, read_tile, sample_rules
from gem_attention.triton_config import KernelSpec


class Sums(NamedTuple):
    """What the programs write. position: (programs, width); time: (programs, K, block_m), float32, zero before.

    center: the column of `position` for j = i.
    """

    position: Any
    time: Any
    width: Any
    center: Any


@triton.jit
def _visible_steps(m_start, n_start, steps, rules, C: tl.constexpr):
    """The steps of a run that hold its visible tiles: first..last."""
    first = 0
    last = steps
    if C.window or C.context or C.block > 0:
        first = steps
        last = 0
        for s in range(0, steps):
            p0 = m_start + s * C.block_m + rules.first_position
            lo, _, _, hi = key_range(p0, tl.minimum(p0 + C.block_m, rules.length), rules, C)
            n0 = n_start + s * C.block_n
            if (lo <= n0) & (n0 < hi):
                first = tl.minimum(first, s)
                last = s + 1
    elif C.causal:
        last = tl.where(n_start < m_start + C.block_m + rules.first_position, steps, 0)
    return first, last


@triton.jit
def _add_time(ds_MN, rows, columns, batch, numbers, tables, sums, C: tl.constexpr):
    gap, farthest, bucket = gaps(rows, columns, batch, numbers, False, C)
    last = time_bucket(farthest, batch.time_bounds, numbers.time_step, C)
    program = tl.program_id(0).to(tl.int64)
    at = sums.time + (program * C.time_count + bucket) * C.block_m + tl.arange(0, C.block_m)
    # Triton pipelines a loop that holds a loop only where that is inside a branch
    if bucket <= last:
        above_M = tl.sum(ds_MN, 1)
        # one place that adds, so that a word always has the same thread
        for b in range(bucket, last + 1):
            next_M = tl.sum(tl.where(gap >= tl.load(batch.time_bounds + b + 1), ds_MN, 0.0), 1)
            tl.atomic_add(at, above_M - next_M, sem="relaxed")
            above_M = next_M
            at += C.block_m


@triton.jit
def _add_positions(ds_MN, offset, sums, C: tl.constexpr):
    """Row i turned by i (one gather through the columns) makes every diagonal a column."""
    e_N = tl.arange(0, C.block_n)
    turned = tl.arange(0, C.block_m)[:, None] + e_N[None, :]
    turned_MN = tl.gather(ds_MN, turned % C.block_n, 1)
    at = sums.position + tl.program_id(0).to(tl.int64) * sums.width + (sums.center + offset) + e_N
    # the last run's sums may have gone to the same words, by other threads
    tl.debug_barrier()
    for wrap in tl.static_range((C.block_m + C.block_n - 2) // C.block_n + 1):
        part_N = tl.sum(tl.where(turned // C.block_n == wrap, turned_MN, 0.0), 0)
        to = at - wrap * C.block_n
        tl.store(to, tl.load(to) + part_N)


@triton.jit
def _step(sum_MN, bias_MN, m0, n0, at, head, q, k, v, do, lse, delta, strides, rules, batch, numbers, tables, sums,
          C: tl.constexpr):  # fmt: skip
    kv_head = head // C.group
    q_MD = load_rows(q, strides.q, at.q_start, at.q_length, m0, head, C.block_m, C.block_d, C.dim, C.tma)
    k_ND = load_rows(k, strides.k, at.k_start, at.k_length, n0, kv_head, C.block_n, C.block_d, C.dim, C.tma)
    do_ME = load_rows(do, strides.do, at.out_start, at.q_length, m0, head, C.block_m, C.block_e, C.v_dim, C.tma)
    v_NE = load_rows(v, strides.v, at.k_start, at.k_length, n0, kv_head, C.block_n, C.block_e, C.v_dim, C.tma)
    p0 = m0 + rules.first_position
    rows = row_side(p0, at.k_start, tables, C)
    columns = column_side(n0, at.k_start, tables, C)
    x_MN = dot(q_MD, tl.trans(k_ND), C=C)
    dp_MN = dot(do_ME, tl.trans(v_NE), C=C)
    scale = numbers.scale
    if not C.bias_inside:
        x_MN = x_MN * scale
        scale = 1.0
    if C.time_bias != "":
        x_MN = add_time_bias(x_MN, rows, columns, head, batch, numbers, tables, False, C)
    if C.position_bias:
        x_MN += bias_MN.to(tl.float32)
    row_M = m0 + tl.arange(0, C.block_m)
    inside = row_M < at.q_length
    lse_M, delta_M, inverse_M = row_numbers(lse, delta, head, at.out_start + row_M, inside, batch, numbers, C)
    if C.softmax:
        lse_M, delta_M = lse_M[:, None], delta_M[:, None]
    elif C.per_token:
        inverse_M = inverse_M[:, None]
    _, ds_MN = chain(x_MN, scale, dp_MN, lse_M, delta_M, inverse_M, True, False, C)
    # pairs past the ends are zero here without a mask: their dP is (softmax: the mask is needed for the columns)
    if C.masked:
        _, mid, top, _ = key_range(p0, tl.minimum(m0 + C.block_m, at.q_length) + rules.first_position, rules, C)
        if (n0 < mid) | (n0 >= top):
            i = (p0 + tl.arange(0, C.block_m))[:, None]
            j = (n0 + tl.arange(0, C.block_n))[None, :]
            ds_MN = tl.where(pair_mask(i, j, rules, C), ds_MN, 0.0)
    if C.time_bias != "":
        _add_time(ds_MN, rows, columns, batch, numbers, tables, sums, C)
    if C.position_bias:
        sum_MN += ds_MN
    return sum_MN


@triton.jit
def _run(entry, head, q, k, v, do, lse, delta, strides, batch, numbers, position, tables, sums, C: tl.constexpr):
    b, start, at = read_tile(batch.tiles, entry, batch, C)
    if b >= 0:
        rules = sample_rules(at.q_length, at.k_length, at.targets, at.context, numbers, C)
        m_start = tl.maximum(start, 0)
        n_start = tl.maximum(-start, 0)
        steps = tl.minimum(tl.cdiv(at.q_length - m_start, C.block_m), tl.cdiv(at.k_length - n_start, C.block_n))
        first, last = _visible_steps(m_start, n_start, tl.maximum(steps, 0), rules, C)
        if first < last:
            offset = n_start - m_start - rules.first_position
            bias_MN = 0.0
            if C.position_bias:
                bias_MN = position_bias(-offset, 0, head, position, tables, False, C)
            sum_MN = tl.full([C.block_m, C.block_n], 0.0, tl.float32)
            for s in tl.range(first, last, num_stages=C.stages):
                sum_MN = _step(sum_MN, bias_MN, m_start + s * C.block_m, n_start + s * C.block_n, at, head, q, k, v,
                               do, lse, delta, strides, rules, batch, numbers, tables, sums, C)  # fmt: skip
            if C.position_bias:
                _add_positions(sum_MN, offset, sums, C)


@triton.jit(do_not_specialize=["entries"])
def table_kernel(q, k, v, do, lse, delta, strides, batch, numbers, position, tables, sums, entries, C: tl.constexpr):
    """Add this program's part of the tables' gradients to its buffers. Grid: (any multiple of heads,), heads fastest.

    batch.tiles: `entries` records of runs. For softmax it runs after dq_kernel, which writes delta. Programs take
    entries forwards and backwards alternately.
    """
    tl.static_assert(C.block_m == C.block_n)
    head = tl.program_id(0) % C.heads
    program = tl.program_id(0) // C.heads
    programs = tl.num_programs(0) // C.heads
    for turn in range(0, tl.cdiv(entries, programs)):
        taken = turn * programs + tl.where(turn % 2 == 0, program, programs - 1 - program)
        if taken < entries:
            _run(taken, head, q, k, v, do, lse, delta, strides, batch, numbers, position, tables, sums, C)


# ------------------------------------------------------------------------------------------------ host


def runs(query_tiles: Tensor, key_tiles: Tensor | None) -> Tensor:
    """Records of runs: those that begin at column 0, then those that begin at row 0 and a later column."""
    if key_tiles is None:
        return query_tiles
    later = key_tiles.clone()
    later[:, 0].masked_fill_(key_tiles[:, 1] == 0, -1)
    later[:, 1].neg_()
    return torch.cat([query_tiles, later])


def programs_a_head(entries: int, heads: int, device: torch.device, *, per_multiprocessor: int = 1) -> int:
    """How many programs share the runs of one head: `per_multiprocessor` in all; two in the interpreter."""
    if device.type != "cuda":
        return min(entries, 2)
    fit = torch.cuda.get_device_properties(device).multi_processor_count * per_multiprocessor
    return max(1, min(entries, fit // heads))


def empty_sums(position_table: Tensor | None, time_table: Tensor | None, programs: int, c: KernelSpec) -> Sums:
    """Zeroed buffers for `programs` programs."""
    position = time = None
    width = center = 0
    if position_table is not None:
        places = position_table.shape[1]
        # a tile reaches block_m - 1 places past either end of the table
        width, center = places + 2 * c.block_m, places // 2 + c.block_m
        position = torch.zeros(programs, width, dtype=torch.float32, device=position_table.device)
    if time_table is not None:
        time = torch.zeros(programs, c.time_count, c.block_m, dtype=torch.float32, device=time_table.device)
    return Sums(position, time, width, center)


def summed(
    sums: Sums, position_table: Tensor | None, time_table: Tensor | None, heads: int, factor: float
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients (Hb, P) and (Hb, K) float32; program p worked for head p % heads."""
    position = time = None
    if position_table is not None:
        first = sums.center - position_table.shape[1] // 2
        by_head = sums.position.view(-1, heads, sums.width).sum(0)[:, first : first + position_table.shape[1]]
        position = by_head.reshape(position_table.shape[0], -1, by_head.shape[1]).sum(1) * factor
    if time_table is not None:
        by_head = sums.time.view(-1, heads, *sums.time.shape[1:]).sum((0, 3))
        time = by_head.view(time_table.shape[0], -1, by_head.shape[1]).sum(1) * factor
    return position, time
