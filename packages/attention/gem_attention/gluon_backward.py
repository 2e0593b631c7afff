"""The backward kernels for Hopper, written in Gluon: dq over tiles of queries, dk and dv over tiles of keys.

The same shape as the forward (gluon_forward): one producer warp, two consumer warpgroups of 64 rows that share what is
streamed, persistent programs, no atomics. As in triton_backward the scores are formed twice, 7 products in all: each of
them then has its first operand in registers or resident in shared memory, and nothing goes through float32 scratch.

dq:       S = Q K_j^T and dP = dO V_j^T start behind dQ += dS_{j-1} K_{j-1}; wait; dS_j = f'(S) dP
dk, dv:   S^T = K Q_i^T and dP^T = V dO_i^T start; P_i while dP^T runs; dV += P_i^T dO_i starts; dS_i while it runs;
          dK += dS_i^T Q_i

While one warpgroup works out its activation, the other's products run.

Registers of a dk/dv consumer at D = 128: dK and dV 128, S^T and dP^T 64, so tiles of queries have 64 rows, and P^T and
dS^T (32) may not live beside the next S^T and dP^T: their products are waited for before the next block starts. Letters
as in triton_common; W is a warpgroup's rows, 64.
"""

# ruff: noqa: RUF005, B007  (kernel code: no starred lists, tuples unpacked whole, loops that only count)

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

from gem_attention.gluon_forward import (
    W,
    Work,
    block_at,
    block_in,
    copy_rows,
    flat,
    own_blocks,
    portion,
    ring,
    settle_store,
)
from gem_attention.triton_common import activate_and_slope, key_range, pair_mask, read_tile, row_range, sample_rules


@gluon.jit
def store_tile(desc, start, length, row, head, tile, buffer, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Write a tile through shared memory; rows past the end are clipped."""
    flat(buffer, ROWS, WIDTH).store(tile.to(buffer.dtype))
    fence_async_shared()
    far, end, at = to_ragged_indices(start, length, row)
    tma.async_copy_shared_to_global(desc, [far, end, at, head, 0], buffer)


# ------------------------------------------------------------------------------------------------ dq


@gluon.jit
def _dq_load(q, do, k, v, q_s, do_s, k_s, v_s, bars, tiles, batch, numbers, work, C: gl.constexpr, UNIT: gl.constexpr,
             STAGES: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    q_full, q_empty, do_full, do_empty, kv_full, kv_empty = bars
    blocks = 0
    done = 0
    for turn in range(work.rounds * UNIT):
        entry, head, exists = portion(turn, work, C.heads, UNIT)
        b, m0, at = read_tile(tiles, entry, batch, C)
        if (b >= 0) & exists:
            rules = sample_rules(at.q_length, at.k_length, at.targets, at.context, numbers, C)
            p0 = m0 + rules.first_position
            p1 = gl.minimum(m0 + C.block_m, at.q_length) + rules.first_position
            lo, mid, top, hi = key_range(p0, p1, rules, C)
            masked = (hi - lo - (top - mid)) // C.block_n
            mbarrier.wait(q_empty, (done & 1) ^ 1)
            mbarrier.expect(q_full, 2 * W * C.block_d * 2)
            copy_rows(q, at.q_start, at.q_length, m0, head, q_full, q_s.index(0))
            copy_rows(q, at.q_start, at.q_length, m0 + W, head, q_full, q_s.index(1))
            slot = done % 2
            mbarrier.wait(do_empty.index(slot), (done // 2 & 1) ^ 1)
            mbarrier.expect(do_full.index(slot), 2 * W * C.block_e * 2)
            copy_rows(do, at.out_start, at.q_length, m0, head, do_full.index(slot), do_s.index(2 * slot))
            copy_rows(do, at.out_start, at.q_length, m0 + W, head, do_full.index(slot), do_s.index(2 * slot + 1))
            done += 1
            for index in range((hi - lo) // C.block_n):
                n0 = block_in(index, lo, mid, top, masked, C.block_n, OWN)
                stage = blocks % STAGES
                full = kv_full.index(stage)
                mbarrier.wait(kv_empty.index(stage), (blocks // STAGES & 1) ^ 1)
                mbarrier.expect(full, C.block_n * (C.block_d + C.block_e) * 2)
                copy_rows(k, at.k_start, at.k_length, n0, head // C.group, full, k_s.index(stage))
                copy_rows(v, at.k_start, at.k_length, n0, head // C.group, full, v_s.index(stage))
                blocks += 1


@gluon.jit
def _dq_scores(q_WD, do_WE, blocks, k_s, v_s, kv_full, C: gl.constexpr, S: gl.constexpr, STAGES: gl.constexpr):
    """Start S and dP of block `blocks`."""
    stage = blocks % STAGES
    zero_WN = gl.full([W, C.block_n], 0.0, gl.float32, layout=S)
    mbarrier.wait(kv_full.index(stage), blocks // STAGES & 1)
    k_ND = flat(k_s.index(stage), C.block_n, C.block_d)
    v_NE = flat(v_s.index(stage), C.block_n, C.block_e)
    s = warpgroup_mma(q_WD, k_ND.permute((1, 0)), zero_WN, use_acc=False, is_async=True)
    dp = warpgroup_mma(do_WE, v_NE.permute((1, 0)), zero_WN, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _dq_slope(s_WN, dp_WN, n0, position_W, rules, numbers, cut, MASK: gl.constexpr, C: gl.constexpr, S: gl.constexpr,
              P: gl.constexpr, dtype: gl.constexpr):  # fmt: skip
    """dS, masked, as the first operand of the next product."""
    _, slope_WN = activate_and_slope(s_WN, numbers.scale, C)
    ds_WN = slope_WN * dp_WN
    if MASK:  # noqa: SIM102
        if cut:
            column_N = n0 + gl.arange(0, C.block_n, layout=gl.SliceLayout(0, S))
            ds_WN = gl.where(pair_mask(position_W[:, None], column_N[None, :], rules, C), ds_WN, 0.0)
    return gl.convert_layout(ds_WN.to(dtype), P)


@gluon.jit
def _dq_step(acc, ds_WN, q_WD, do_WE, blocks, n0, position_W, k_s, v_s, kv_full, kv_empty, rules, numbers,
             cut, MASK: gl.constexpr, C: gl.constexpr, S: gl.constexpr, P: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """Product of the block before, scores of this one behind it, then this block's dS."""
    before = (blocks - 1) % STAGES
    acc = warpgroup_mma(ds_WN, flat(k_s.index(before), C.block_n, C.block_d), acc, is_async=True)
    s, dp = _dq_scores(q_WD, do_WE, blocks, k_s, v_s, kv_full, C, S, STAGES)
    s_WN, dp_WN, acc = warpgroup_mma_wait(0, deps=(s, dp, acc))
    mbarrier.arrive(kv_empty.index(before), count=1)
    return acc, _dq_slope(s_WN, dp_WN, n0, position_W, rules, numbers, cut, MASK, C, S, P, ds_WN.dtype)


@gluon.jit
def _dq_pass_by(blocks, count, kv_full, kv_empty, STAGES: gl.constexpr):
    """Let `count` blocks go that this warpgroup does not need."""
    for index in range(count):
        stage = blocks % STAGES
        mbarrier.wait(kv_full.index(stage), blocks // STAGES & 1)
        mbarrier.arrive(kv_empty.index(stage), count=1)
        blocks += 1
    return blocks


@gluon.jit
def _dq_consume(dq, q_s, do_s, k_s, v_s, dq_s, bars, tiles, batch, numbers, work, PART: gl.constexpr, C: gl.constexpr,
                UNIT: gl.constexpr, STAGES: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    q_full, q_empty, do_full, do_empty, kv_full, kv_empty = bars
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C.block_n, 16])
    D: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C.block_d, 16])
    QL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S, k_width=2)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=D, k_width=2)
    dtype: gl.constexpr = q_s.dtype
    dq_tile = dq_s.index(PART)
    blocks = 0
    done = 0
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
                blocks = _dq_pass_by(blocks, before, kv_full, kv_empty, STAGES)
            position_W = p0 + W * PART + gl.arange(0, W, layout=gl.SliceLayout(1, S))
            slot = done % 2
            mbarrier.wait(q_full, done & 1)
            q_WD = flat(q_s.index(PART), W, C.block_d).load(QL)
            # the registers must hold all of Q before the copy engine may write over it
            fence_async_shared()
            mbarrier.arrive(q_empty, count=1)
            mbarrier.wait(do_full.index(slot), done // 2 & 1)
            do_WE = flat(do_s.index(2 * slot + PART), W, C.block_e)
            done += 1
            acc = gl.full([W, C.block_d], 0.0, gl.float32, layout=D)
            if count > 0:
                n0 = block_in(0, lo, mid, top, masked, C.block_n, OWN)
                s, dp = _dq_scores(q_WD, do_WE, blocks, k_s, v_s, kv_full, C, S, STAGES)
                s_WN, dp_WN = warpgroup_mma_wait(0, deps=(s, dp))
                # the first block is a masked one if there is any; masking a full block changes nothing
                ds_WN = _dq_slope(s_WN, dp_WN, n0, position_W, rules, numbers, True, C.rules, C, S, P, dtype)
                blocks += 1
                if OWN:
                    for index in range(1, count):
                        n0 = lo + index * C.block_n
                        cut = (n0 < mid) | (n0 >= top)
                        acc, ds_WN = _dq_step(acc, ds_WN, q_WD, do_WE, blocks, n0, position_W, k_s, v_s, kv_full,
                                              kv_empty, rules, numbers, cut, C.rules, C, S, P, STAGES)  # fmt: skip
                        blocks += 1
                else:
                    if C.rules:
                        for index in range(1, masked):
                            n0 = block_at(index, lo, mid, top, masked, C.block_n)
                            acc, ds_WN = _dq_step(acc, ds_WN, q_WD, do_WE, blocks, n0, position_W, k_s, v_s, kv_full,
                                                  kv_empty, rules, numbers, True, True, C, S, P, STAGES)  # fmt: skip
                            blocks += 1
                    for index in range(gl.maximum(masked, 1), count):
                        acc, ds_WN = _dq_step(acc, ds_WN, q_WD, do_WE, blocks, 0, position_W, k_s, v_s, kv_full,
                                              kv_empty, rules, numbers, False, False, C, S, P, STAGES)  # fmt: skip
                        blocks += 1
                last = (blocks - 1) % STAGES
                acc = warpgroup_mma(ds_WN, flat(k_s.index(last), C.block_n, C.block_d), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(kv_empty.index(last), count=1)
            if OWN:
                blocks = _dq_pass_by(blocks, after, kv_full, kv_empty, STAGES)
            mbarrier.arrive(do_empty.index(slot), count=1)
            settle_store()
            store_tile(dq, at.q_start, at.q_length, m0 + W * PART, head, acc * numbers.gradient_scale, dq_tile, W,
                       C.block_d)  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _dq_first(dq, q_s, do_s, k_s, v_s, dq_s, bars, tiles, batch, numbers, work, C: gl.constexpr, UNIT: gl.constexpr,
              STAGES: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    _dq_consume(dq, q_s, do_s, k_s, v_s, dq_s, bars, tiles, batch, numbers, work, 0, C, UNIT, STAGES, OWN)


@gluon.jit
def _dq_second(dq, q_s, do_s, k_s, v_s, dq_s, bars, tiles, batch, numbers, work, C: gl.constexpr, UNIT: gl.constexpr,
               STAGES: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    _dq_consume(dq, q_s, do_s, k_s, v_s, dq_s, bars, tiles, batch, numbers, work, 1, C, UNIT, STAGES, OWN)


@gluon.jit(do_not_specialize=["items", "rounds"])
def gluon_dq_kernel(q, do, k, v, dq, tiles, batch, numbers, items, rounds, C: gl.constexpr, UNIT: gl.constexpr,
                    STAGES: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    """dq (Tq, H, D). q, do, dq: descriptors of 64-row tiles; k, v: of block_n-row tiles. Grid: one program an SM."""
    work = Work(items, rounds)
    q_s = gl.allocate_shared_memory(q.dtype, [2] + q.block_shape, q.layout)
    do_s = gl.allocate_shared_memory(do.dtype, [4] + do.block_shape, do.layout)
    k_s = gl.allocate_shared_memory(k.dtype, [STAGES] + k.block_shape, k.layout)
    v_s = gl.allocate_shared_memory(v.dtype, [STAGES] + v.block_shape, v.layout)
    dq_s = gl.allocate_shared_memory(dq.dtype, [2] + dq.block_shape, dq.layout)
    q_full, q_empty = ring(1, 1).index(0), ring(1, 2).index(0)
    do_full, do_empty = ring(2, 1), ring(2, 2)
    kv_full, kv_empty = ring(STAGES, 1), ring(STAGES, 2)
    fence_async_shared()
    bars = (q_full, q_empty, do_full, do_empty, kv_full, kv_empty)
    gl.warp_specialize(
        [
            (_dq_first, (dq, q_s, do_s, k_s, v_s, dq_s, bars, tiles, batch, numbers, work, C, UNIT, STAGES, OWN)),
            (_dq_second, (dq, q_s, do_s, k_s, v_s, dq_s, bars, tiles, batch, numbers, work, C, UNIT, STAGES, OWN)),
            (_dq_load, (q, do, k, v, q_s, do_s, k_s, v_s, bars, tiles, batch, numbers, work, C, UNIT, STAGES, OWN)),
        ],
        [4, 1],
        [240, 24],
    )


# ------------------------------------------------------------------------------------------------ dk, dv


@gluon.jit
def _visits(n0, keys, at, rules, C: gl.constexpr):
    """(first, lo, mid, top, masked, count): which row blocks the keys n0 .. n0 + keys visit; see `_row_at`."""
    if C.rules:
        early, lo, mid, top, hi = row_range(n0, gl.minimum(n0 + keys, at.k_length), rules, C)
    else:
        early = 0
        lo = 0
        mid = 0
        hi = gl.cdiv(at.q_length, C.block_m) * C.block_m
        top = hi
    first = lo - early
    masked = (hi - first - (top - mid)) // C.block_m
    return first, lo, mid, top, masked, (hi - first) // C.block_m


@gluon.jit
def _row_at(index, first, lo, mid, top, masked, BLOCK: gl.constexpr):
    """First row of the index-th visited block: context rows, lo..mid, top.. (masked), then mid..top."""
    t = first + index * BLOCK
    cut = gl.where(t < lo, t - first, gl.where(t < mid, t, t + (top - mid)))
    return gl.where(index < masked, cut, mid + (index - masked) * BLOCK)


@gluon.jit
def _dkv_load(q, do, k, v, q_s, do_s, k_s, v_s, bars, tiles, batch, numbers, work, C: gl.constexpr, UNIT: gl.constexpr,
              STAGES: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    kv_full, kv_empty, full, empty = bars
    blocks = 0
    done = 0
    for turn in range(work.rounds * UNIT):
        entry, kv_head, exists = portion(turn, work, C.kv_heads, UNIT)
        b, n0, at = read_tile(tiles, entry, batch, C)
        if (b >= 0) & exists:
            rules = sample_rules(at.q_length, at.k_length, at.targets, at.context, numbers, C)
            first, lo, mid, top, masked, count = _visits(n0, C.block_n, at, rules, C)
            slot = done % SLOTS
            resident = kv_full.index(slot)
            mbarrier.wait(kv_empty.index(slot), (done // SLOTS & 1) ^ 1)
            mbarrier.expect(resident, 2 * W * (C.block_d + C.block_e) * 2)
            copy_rows(k, at.k_start, at.k_length, n0, kv_head, resident, k_s.index(2 * slot))
            copy_rows(k, at.k_start, at.k_length, n0 + W, kv_head, resident, k_s.index(2 * slot + 1))
            copy_rows(v, at.k_start, at.k_length, n0, kv_head, resident, v_s.index(2 * slot))
            copy_rows(v, at.k_start, at.k_length, n0 + W, kv_head, resident, v_s.index(2 * slot + 1))
            done += 1
            for step in range(count * C.group):
                head = kv_head * C.group + step // gl.maximum(count, 1)
                m0 = _row_at(step % gl.maximum(count, 1), first, lo, mid, top, masked, C.block_m)
                stage = blocks % STAGES
                mbarrier.wait(empty.index(stage), (blocks // STAGES & 1) ^ 1)
                mbarrier.expect(full.index(stage), C.block_m * (C.block_d + C.block_e) * 2)
                copy_rows(q, at.q_start, at.q_length, m0, head, full.index(stage), q_s.index(stage))
                copy_rows(do, at.out_start, at.q_length, m0, head, full.index(stage), do_s.index(stage))
                blocks += 1


@gluon.jit
def _dkv_step(dk, dv, k_WD, v_WE, blocks, m0, cut, position_W, q_s, do_s, bars, rules, numbers, C: gl.constexpr,
              S: gl.constexpr, PK: gl.constexpr, PV: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """S^T and dP^T of one block of queries, P^T and dS^T, and the products with dO and Q. cut: it needs the mask.

    One loop with a branch, unlike in the other kernels: two loops, masked and full, were no faster here, and with
    Triton 3.6 the second read a wrong shared-memory address when the first ran less than twice.
    """
    _, _, full, empty = bars
    dtype: gl.constexpr = q_s.dtype
    stage = blocks % STAGES
    zero_WM = gl.full([W, C.block_m], 0.0, gl.float32, layout=S)
    mbarrier.wait(full.index(stage), blocks // STAGES & 1)
    q_MD = flat(q_s.index(stage), C.block_m, C.block_d)
    s = warpgroup_mma(k_WD, q_MD.permute((1, 0)), zero_WM, use_acc=False, is_async=True)
    do_ME = flat(do_s.index(stage), C.block_m, C.block_e)
    dp = warpgroup_mma(v_WE, do_ME.permute((1, 0)), zero_WM, use_acc=False, is_async=True)
    s_WM = warpgroup_mma_wait(1, deps=(s,))
    p_WM, slope_WM = activate_and_slope(s_WM, numbers.scale, C)
    if C.rules:  # noqa: SIM102
        if cut:
            i = rules.first_position + m0 + gl.arange(0, C.block_m, layout=gl.SliceLayout(0, S))
            seen = pair_mask(i[None, :], position_W[:, None], rules, C)
            p_WM = gl.where(seen, p_WM, 0.0)
            slope_WM = gl.where(seen, slope_WM, 0.0)
    dv = warpgroup_mma(gl.convert_layout(p_WM.to(dtype), PV), do_ME, dv, is_async=True)
    dp_WM = warpgroup_mma_wait(1, deps=(dp,))
    ds_WM = gl.convert_layout((slope_WM * dp_WM).to(dtype), PK)
    dk = warpgroup_mma(ds_WM, q_MD, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
    mbarrier.arrive(empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _dkv_consume(dk_out, dv_out, q_s, do_s, k_s, v_s, bars, tiles, batch, numbers, work, PART: gl.constexpr,
                 C: gl.constexpr, UNIT: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
                 OWN: gl.constexpr):  # fmt: skip
    """Rows 64 PART .. 64 PART + 64 of every tile of keys. The results leave through the tile's own k and v buffers."""
    kv_full, kv_empty, full, empty = bars
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C.block_m, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C.block_d, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C.block_e, 16])
    PK: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=DK, k_width=2)
    PV: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=DV, k_width=2)
    blocks = 0
    done = 0
    for turn in range(work.rounds * UNIT):
        entry, kv_head, exists = portion(turn, work, C.kv_heads, UNIT)
        b, n0, at = read_tile(tiles, entry, batch, C)
        if (b >= 0) & exists:
            rules = sample_rules(at.q_length, at.k_length, at.targets, at.context, numbers, C)
            first, lo, mid, top, masked, count = _visits(n0, C.block_n, at, rules, C)
            if OWN:
                own = n0 + W * PART
                real = own < at.k_length
                own_first, own_lo, own_mid, own_top, _, own_count = _visits(own, W, at, rules, C)
                own_hi = own_first + own_count * C.block_m
            position_W = n0 + W * PART + gl.arange(0, W, layout=gl.SliceLayout(1, S))
            slot = done % SLOTS
            mbarrier.wait(kv_full.index(slot), done // SLOTS & 1)
            k_tile = k_s.index(2 * slot + PART)
            v_tile = v_s.index(2 * slot + PART)
            k_WD = flat(k_tile, W, C.block_d)
            v_WE = flat(v_tile, W, C.block_e)
            dk = gl.full([W, C.block_d], 0.0, gl.float32, layout=DK)
            dv = gl.full([W, C.block_e], 0.0, gl.float32, layout=DV)
            for member in range(C.group):
                for index in range(0, count):
                    m0 = 0
                    if C.rules:
                        m0 = _row_at(index, first, lo, mid, top, masked, C.block_m)
                    cut = index < masked
                    mine = True
                    if OWN:
                        if C.rules:
                            # rows before own_lo - own_first are context rows, which see all history
                            mine = real & ((m0 < own_lo - own_first) | ((m0 >= own_lo) & (m0 < own_hi)))
                            cut = (m0 < own_mid) | (m0 >= own_top)
                        else:
                            mine = real
                    if mine:
                        dk, dv = _dkv_step(dk, dv, k_WD, v_WE, blocks, m0, cut, position_W, q_s, do_s, bars, rules,
                                           numbers, C, S, PK, PV, STAGES)  # fmt: skip
                    else:
                        mbarrier.wait(full.index(blocks % STAGES), blocks // STAGES & 1)
                        mbarrier.arrive(empty.index(blocks % STAGES), count=1)
                    blocks += 1
            store_tile(dv_out, at.k_start, at.k_length, n0 + W * PART, kv_head, dv * numbers.inverse_divisor, v_tile, W,
                       C.block_e)  # fmt: skip
            store_tile(dk_out, at.k_start, at.k_length, n0 + W * PART, kv_head, dk * numbers.gradient_scale, k_tile, W,
                       C.block_d)  # fmt: skip
            settle_store()
            mbarrier.arrive(kv_empty.index(slot), count=1)
            done += 1


@gluon.jit
def _dkv_first(dk, dv, q_s, do_s, k_s, v_s, bars, tiles, batch, numbers, work, C: gl.constexpr, UNIT: gl.constexpr,
               STAGES: gl.constexpr, SLOTS: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    _dkv_consume(dk, dv, q_s, do_s, k_s, v_s, bars, tiles, batch, numbers, work, 0, C, UNIT, STAGES, SLOTS, OWN)


@gluon.jit
def _dkv_second(dk, dv, q_s, do_s, k_s, v_s, bars, tiles, batch, numbers, work, C: gl.constexpr, UNIT: gl.constexpr,
                STAGES: gl.constexpr, SLOTS: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    _dkv_consume(dk, dv, q_s, do_s, k_s, v_s, bars, tiles, batch, numbers, work, 1, C, UNIT, STAGES, SLOTS, OWN)


@gluon.jit(do_not_specialize=["items", "rounds"])
def gluon_dkv_kernel(q, do, k, v, dk, dv, tiles, batch, numbers, items, rounds, C: gl.constexpr, UNIT: gl.constexpr,
                     STAGES: gl.constexpr, SLOTS: gl.constexpr, OWN: gl.constexpr):  # fmt: skip
    """dk (Tk, G, D) and dv (Tk, G, E). q, do: descriptors of block_m-row tiles, the rest of 64-row tiles.

    SLOTS: tiles of k and v in shared memory; 2 lets the next tile's loads run under this one's products.
    """
    work = Work(items, rounds)
    q_s = gl.allocate_shared_memory(q.dtype, [STAGES] + q.block_shape, q.layout)
    do_s = gl.allocate_shared_memory(do.dtype, [STAGES] + do.block_shape, do.layout)
    k_s = gl.allocate_shared_memory(k.dtype, [2 * SLOTS] + k.block_shape, k.layout)
    v_s = gl.allocate_shared_memory(v.dtype, [2 * SLOTS] + v.block_shape, v.layout)
    kv_full, kv_empty = ring(SLOTS, 1), ring(SLOTS, 2)
    full, empty = ring(STAGES, 1), ring(STAGES, 2)
    fence_async_shared()
    bars = (kv_full, kv_empty, full, empty)
    gl.warp_specialize(
        [
            (_dkv_first, (dk, dv, q_s, do_s, k_s, v_s, bars, tiles, batch, numbers, work, C, UNIT, STAGES, SLOTS, OWN)),
            (
                _dkv_second,
                (dk, dv, q_s, do_s, k_s, v_s, bars, tiles, batch, numbers, work, C, UNIT, STAGES, SLOTS, OWN),
            ),
            (_dkv_load, (q, do, k, v, q_s, do_s, k_s, v_s, bars, tiles, batch, numbers, work, C, UNIT, STAGES, SLOTS)),
        ],
        [4, 1],
        [240, 24],
    )
