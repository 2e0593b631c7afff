"""The forward kernel for Hopper, written in Gluon: one producer warp, two consumer warpgroups, persistent programs.

What Triton's own scheduling cannot do, and this does: the producer runs ahead of the matrix products across tiles, so
the first loads of a tile are hidden behind the tile before; two warpgroups of 64 query rows share every K and V tile,
which halves what is read from the L2 cache (7.6 TB/s at 500 TFLOP/s with 64-row tiles); and inside a warpgroup the
products of one step run while the activation of the next is worked out:

    S = Q K_j^T starts; O += P V_{j-1} starts; wait for S; P = f(S); wait for O

Q sits in registers (32 of them at D = 128), so shared memory feeds only the second operand. Rows past a sequence's end
are clipped by the copy engine, on loads and on stores. Work is dealt in turns, forwards and backwards alternately, from
the list of `triton_tiles`; under a causal mask an entry and its partner are taken together, so portions are equal.

Registers: 240 a consumer thread, 24 a producer thread. Letters as in triton_common; W is a warpgroup's rows, 64.
"""

# ruff: noqa: RUF005, B007  (kernel code: no starred lists, tuples unpacked whole, loops that only count)

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.tools.ragged_tma import to_ragged_indices

from gem_attention.triton_common import activate, key_range, pair_mask, read_tile, sample_rules

W = gl.constexpr(64)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7


class Work(NamedTuple):
    """How entries are dealt: `items` portions (of `unit` entries, for one head), in `rounds` turns."""

    items: tl.tensor
    rounds: tl.tensor


@gluon.jit
def portion(turn, work, HEADS: gl.constexpr, UNIT: gl.constexpr):
    """(entry, head, exists) of this program's turn."""
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    r = turn // UNIT
    item = r * programs + gl.where(r % 2 == 0, pid, programs - 1 - pid)
    exists = item < work.items
    item = gl.minimum(item, work.items - 1)
    return item // HEADS * UNIT + turn % UNIT, item % HEADS, exists


@gluon.jit
def copy_rows(desc, start, length, row, head, barrier, buffer):
    """Start the copy of a tile of rows; zero past the sequence's end."""
    far, end, at = to_ragged_indices(start, length, row)
    tma.async_copy_global_to_shared(desc, [far, end, at, head, 0], barrier, buffer)


@gluon.jit
def settle_store():
    """Wait until the last store of this partition has read its shared memory. Only the thread that started the store
    waits for it, so the others must meet it at a barrier before they write there again."""
    tma.store_wait(0)
    barrier()


@gluon.jit
def flat(buffer, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """A (1, 1, ROWS, 1, WIDTH) tile of shared memory as (ROWS, WIDTH)."""
    return buffer.reshape([ROWS, WIDTH])


@gluon.jit
def block_at(index, lo, mid, top, masked, BLOCK: gl.constexpr):
    """First column of the index-th visited block: the masked ones (lo..mid, top..), then the full ones (mid..top)."""
    cut = lo + index * BLOCK
    cut = gl.where(cut < mid, cut, cut + (top - mid))
    return gl.where(index < masked, cut, mid + (index - masked) * BLOCK)


@gluon.jit
def block_in(index, lo, mid, top, masked, BLOCK: gl.constexpr, OWN: gl.constexpr):
    """`block_at`, or ascending, so that the blocks of one warpgroup stand together (OWN)."""
    if OWN:
        n0 = lo + index * BLOCK
    else:
        n0 = block_at(index, lo, mid, top, masked, BLOCK)
    return n0


@gluon.jit
def own_blocks(part, m0, lo, hi, at, rules, C: gl.constexpr):
    """Of the columns lo..hi of a tile, those of its 64 rows number `part`: (lo, mid, top, before, count, after).

    before, count, after: blocks ahead of theirs, theirs, behind theirs. Rows that do not exist visit nothing.
    """
    first = m0 + W * part
    end = gl.minimum(first + W, at.q_length)
    own_lo, own_mid, own_top, own_hi = key_range(first + rules.first_position, end + rules.first_position, rules, C)
    own_lo = gl.where(first < at.q_length, own_lo, hi)
    own_hi = gl.where(first < at.q_length, own_hi, hi)
    before = (own_lo - lo) // C.block_n
    count = (own_hi - own_lo) // C.block_n
    return own_lo, own_mid, own_top, before, count, (hi - own_hi) // C.block_n


@gluon.jit
def _load(q, k, v, q_s, k_s, v_s, bars, tiles, batch, numbers, work, C: gl.constexpr, UNIT: gl.constexpr,
          STAGES: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    blocks = 0
    tiles_done = 0
    for turn in range(work.rounds * UNIT):
        entry, head, exists = portion(turn, work, C.heads, UNIT)
        b, m0, at = read_tile(tiles, entry, batch, C)
        if (b >= 0) & exists:
            rules = sample_rules(at.q_length, at.k_length, at.targets, at.context, numbers, C)
            p0 = m0 + rules.first_position
            p1 = gl.minimum(m0 + C.block_m, at.q_length) + rules.first_position
            lo, mid, top, hi = key_range(p0, p1, rules, C)
            masked = (hi - lo - (top - mid)) // C.block_n
            mbarrier.wait(q_empty, (tiles_done & 1) ^ 1)
            mbarrier.expect(q_full, 2 * W * C.block_d * 2)
            copy_rows(q, at.q_start, at.q_length, m0, head, q_full, q_s.index(0))
            copy_rows(q, at.q_start, at.q_length, m0 + W, head, q_full, q_s.index(1))
            tiles_done += 1
            for index in range((hi - lo) // C.block_n):
                n0 = block_in(index, lo, mid, top, masked, C.block_n, OWN)
                stage = blocks % STAGES
                phase = (blocks // STAGES & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), C.block_n * C.block_d * 2)
                copy_rows(k, at.k_start, at.k_length, n0, head // C.group, k_full.index(stage), k_s.index(stage))
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), C.block_n * C.block_e * 2)
                copy_rows(v, at.k_start, at.k_length, n0, head // C.group, v_full.index(stage), v_s.index(stage))
                blocks += 1


@gluon.jit
def _activated(s_WN, position_W, n0, rules, numbers, cut, MASK: gl.constexpr, C: gl.constexpr, S: gl.constexpr,
               P: gl.constexpr, dtype: gl.constexpr):  # fmt: skip
    """f of the scores, masked (if MASK, where cut), as the first operand of the next product."""
    p_WN = activate(s_WN, numbers.scale, C)
    if MASK:  # noqa: SIM102
        if cut:
            column_N = n0 + gl.arange(0, C.block_n, layout=gl.SliceLayout(0, S))
            p_WN = gl.where(pair_mask(position_W[:, None], column_N[None, :], rules, C), p_WN, 0.0)
    return gl.convert_layout(p_WN.to(dtype), P)


@gluon.jit
def _advance(acc, p_WN, q_WD, blocks, n0, position_W, k_s, v_s, bars, rules, numbers, cut, MASK: gl.constexpr,
             C: gl.constexpr, S: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """One step: start the scores of block `blocks` and the product of the block before, and activate the scores."""
    _, _, k_full, k_empty, v_full, v_empty = bars
    stage = blocks % STAGES
    before = (blocks - 1) % STAGES
    mbarrier.wait(k_full.index(stage), blocks // STAGES & 1)
    k_ND = flat(k_s.index(stage), C.block_n, C.block_d)
    zero_WN = gl.full([W, C.block_n], 0.0, gl.float32, layout=S)
    s = warpgroup_mma(q_WD, k_ND.permute((1, 0)), zero_WN, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), (blocks - 1) // STAGES & 1)
    acc = warpgroup_mma(p_WN, flat(v_s.index(before), C.block_n, C.block_e), acc, is_async=True)
    s_WN = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    next_WN = _activated(s_WN, position_W, n0, rules, numbers, cut, MASK, C, S, P, p_WN.dtype)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(before), count=1)
    return acc, next_WN


@gluon.jit
def _pass_by(blocks, count, bars, STAGES: gl.constexpr):
    """Let `count` blocks go that this warpgroup does not need. Waiting for each keeps the barriers' turns in step."""
    _, _, k_full, k_empty, v_full, v_empty = bars
    for index in range(count):
        stage = blocks % STAGES
        mbarrier.wait(k_full.index(stage), blocks // STAGES & 1)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), blocks // STAGES & 1)
        mbarrier.arrive(v_empty.index(stage), count=1)
        blocks += 1
    return blocks


@gluon.jit
def _consume(out, q_s, k_s, v_s, out_s, bars, tiles, batch, numbers, work, PART: gl.constexpr, C: gl.constexpr,
             UNIT: gl.constexpr, STAGES: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    """Rows 64 PART .. 64 PART + 64 of every tile. OWN: of the blocks, only those these rows visit; else the tile's."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C.block_n, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C.block_e, 16])
    QL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S, k_width=2)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    dtype: gl.constexpr = q_s.dtype
    out_tile = out_s.index(PART)
    blocks = 0
    tiles_done = 0
    for turn in range(work.rounds * UNIT):
        entry, head, exists = portion(turn, work, C.heads, UNIT)
        b, m0, at = read_tile(tiles, entry, batch, C)
        if (b >= 0) & exists:
            rules = sample_rules(at.q_length, at.k_length, at.targets, at.context, numbers, C)
            p0 = m0 + rules.first_position
            p1 = gl.minimum(m0 + C.block_m, at.q_length) + rules.first_position
            lo, mid, top, hi = key_range(p0, p1, rules, C)
            masked = (hi - lo - (top - mid)) // C.block_n
            count = (hi - lo) // C.block_n
            after = 0
            if OWN:
                lo, mid, top, before, count, after = own_blocks(PART, m0, lo, hi, at, rules, C)
                blocks = _pass_by(blocks, before, bars, STAGES)
            position_W = p0 + W * PART + gl.arange(0, W, layout=gl.SliceLayout(1, S))
            mbarrier.wait(q_full, tiles_done & 1)
            q_WD = flat(q_s.index(PART), W, C.block_d).load(QL)
            # the registers must hold all of Q before the copy engine may write over it
            fence_async_shared()
            mbarrier.arrive(q_empty, count=1)
            tiles_done += 1
            acc = gl.full([W, C.block_e], 0.0, gl.float32, layout=OL)
            if count > 0:
                stage = blocks % STAGES
                mbarrier.wait(k_full.index(stage), blocks // STAGES & 1)
                k_ND = flat(k_s.index(stage), C.block_n, C.block_d)
                zero_WN = gl.full([W, C.block_n], 0.0, gl.float32, layout=S)
                s = warpgroup_mma(q_WD, k_ND.permute((1, 0)), zero_WN, use_acc=False, is_async=True)
                s_WN = warpgroup_mma_wait(0, deps=(s,))
                mbarrier.arrive(k_empty.index(stage), count=1)
                n0 = block_in(0, lo, mid, top, masked, C.block_n, OWN)
                # the first block of a tile is masked if any is; masking a full block changes nothing
                p_WN = _activated(s_WN, position_W, n0, rules, numbers, True, C.rules, C, S, P, dtype)
                blocks += 1
                if OWN:
                    for index in range(1, count):
                        n0 = lo + index * C.block_n
                        cut = (n0 < mid) | (n0 >= top)
                        acc, p_WN = _advance(acc, p_WN, q_WD, blocks, n0, position_W, k_s, v_s, bars, rules, numbers,
                                             cut, C.rules, C, S, P, STAGES)  # fmt: skip
                        blocks += 1
                else:
                    if C.rules:
                        for index in range(1, masked):
                            n0 = block_at(index, lo, mid, top, masked, C.block_n)
                            acc, p_WN = _advance(acc, p_WN, q_WD, blocks, n0, position_W, k_s, v_s, bars, rules,
                                                 numbers, True, True, C, S, P, STAGES)  # fmt: skip
                            blocks += 1
                    for index in range(gl.maximum(masked, 1), count):
                        acc, p_WN = _advance(acc, p_WN, q_WD, blocks, 0, position_W, k_s, v_s, bars, rules, numbers,
                                             False, False, C, S, P, STAGES)  # fmt: skip
                        blocks += 1
                last = (blocks - 1) % STAGES
                mbarrier.wait(v_full.index(last), (blocks - 1) // STAGES & 1)
                acc = warpgroup_mma(p_WN, flat(v_s.index(last), C.block_n, C.block_e), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(last), count=1)
            if OWN:
                blocks = _pass_by(blocks, after, bars, STAGES)
            settle_store()
            flat(out_tile, W, C.block_e).store((acc * numbers.inverse_divisor).to(dtype))
            fence_async_shared()
            far, end, row = to_ragged_indices(at.out_start, at.q_length, m0 + W * PART)
            tma.async_copy_shared_to_global(out, [far, end, row, head, 0], out_tile)
    tma.store_wait(0)


@gluon.jit
def _consume_first(out, q_s, k_s, v_s, out_s, bars, tiles, batch, numbers, work, C: gl.constexpr, UNIT: gl.constexpr,
                   STAGES: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    _consume(out, q_s, k_s, v_s, out_s, bars, tiles, batch, numbers, work, 0, C, UNIT, STAGES, OWN)


@gluon.jit
def _consume_second(out, q_s, k_s, v_s, out_s, bars, tiles, batch, numbers, work, C: gl.constexpr, UNIT: gl.constexpr,
                    STAGES: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    _consume(out, q_s, k_s, v_s, out_s, bars, tiles, batch, numbers, work, 1, C, UNIT, STAGES, OWN)


@gluon.jit
def ring(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers in shared memory."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["items", "rounds"])
def gluon_forward_kernel(q, k, v, out, tiles, batch, numbers, items, rounds, C: gl.constexpr, UNIT: gl.constexpr,
                         STAGES: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    """out (rows, H, E). q, out: descriptors of 64-row tiles, k, v: of block_n-row tiles. Grid: one program an SM."""
    work = Work(items, rounds)
    q_s = gl.allocate_shared_memory(q.dtype, [2] + q.block_shape, q.layout)
    k_s = gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_shape, k.layout)
    v_s = gl.allocate_shared_memory(v.dtype, [STAGES] + v.block_shape, v.layout)
    out_s = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
    q_bars = ring(2, 1)
    q_full = q_bars.index(0)
    q_empty = ring(1, 2).index(0)
    k_full, k_empty = ring(STAGES, 1), ring(STAGES, 2)
    v_full, v_empty = ring(STAGES, 1), ring(STAGES, 2)
    fence_async_shared()
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    gl.warp_specialize(
        [
            (_consume_first, (out, q_s, k_s, v_s, out_s, bars, tiles, batch, numbers, work, C, UNIT, STAGES, OWN)),
            (_consume_second, (out, q_s, k_s, v_s, out_s, bars, tiles, batch, numbers, work, C, UNIT, STAGES, OWN)),
            (_load, (q, k, v, q_s, k_s, v_s, bars, tiles, batch, numbers, work, C, UNIT, STAGES, OWN)),
        ],
        [4, 1],
        [240, 24],
    )
