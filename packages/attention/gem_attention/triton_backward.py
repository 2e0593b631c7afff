"""The Triton backward kernels: dq by tiles of queries, dk and dv by tiles of keys; no atomics on dq, dk or dv.

Scores and probabilities are worked out again in both (7 matrix products instead of 5). In return nothing is summed in
memory: the result is the same on every run, there is no float32 copy of dq to clear, add to and convert (0.35 ms of a 4
ms backward at 292,411 tokens, 4 heads of 128), and in each kernel one operand of every product is already in registers:
dS in the first; P^T and dS^T in the second, which therefore forms the scores transposed.

`short_query_kernel` is for at most block_m queries a sample (seed pooling): one program sees all queries of a sample,
so dk and dv of a tile are complete after one step, and the products are 5 again.

The gradients of the bias tables have a kernel of their own, in `triton_tables`. With e =
f'(s) dP (pointwise) or P (dP - delta) (softmax), dq = scale * e K and dk = scale * e^T Q, both over divisor. Letters as
in triton_common.
"""

# ruff: noqa: RUF059  (kernel code: tuples unpacked whole)

import triton
import triton.language as tl

from gem_attention.triton_bias import biased_scores, column_side, row_side
from gem_attention.triton_common import (
    LOG2E,
    activate_and_slope,
    dot,
    key_range,
    load_rows,
    pair_mask,
    read_sample,
    read_tile,
    row_range,
    sample_rules,
    store_rows,
)


@triton.jit
def chain(x, scale, dp, lse, delta, inverse, seen, MASK: tl.constexpr, C: tl.constexpr):
    """(P, dS) of a tile from scores scale * x and dP; lse, delta, inverse broadcast along the columns."""
    if C.softmax:
        p = tl.exp2((x * scale - lse) * LOG2E)
        if MASK:
            p = tl.where(seen, p, 0.0)
        ds = p * (dp - delta)
    else:
        p, slope = activate_and_slope(x, scale, C)
        ds = slope * dp
        if C.per_token:
            p = p * inverse
            ds = ds * inverse
        if MASK:
            p = tl.where(seen, p, 0.0)
            ds = tl.where(seen, ds, 0.0)
    return p, ds


@triton.jit
def row_numbers(lse, delta, head, at, inside, batch, numbers, C: tl.constexpr):
    """lse, delta and 1 / divisor of output rows `at`; rows that do not exist get values that give P = 0."""
    lse_M = 0.0
    delta_M = 0.0
    inverse_M = 0.0
    if C.softmax:
        lse_M = tl.load(lse + head.to(tl.int64) * numbers.rows + at, mask=inside, other=float("inf"))
        delta_M = tl.load(delta + head.to(tl.int64) * numbers.rows + at, mask=inside, other=0.0)
    elif C.per_token:
        inverse_M = 1.0 / tl.load(batch.divisor + at, mask=inside, other=1.0).to(tl.float32)
    return lse_M, delta_M, inverse_M


# ------------------------------------------------------------------------------------------------ dq


@triton.jit
def _dq_step(acc_MD, q_MD, do_ME, per_row, n0, position_M, site, k, v, strides, rules, batch, numbers, position, tables,
             MASK: tl.constexpr, C: tl.constexpr):  # fmt: skip
    k_start, kv_head, head, rows = site
    lse_M, delta_M, inverse_M = per_row
    k_ND = load_rows(k, strides.k, k_start, rules.length, n0, kv_head, C.block_n, C.block_d, C.dim, C.tma)
    v_NE = load_rows(v, strides.v, k_start, rules.length, n0, kv_head, C.block_n, C.block_e, C.v_dim, C.tma)
    i = position_M[:, None]
    column_N = n0 + tl.arange(0, C.block_n)
    j = column_N[None, :]
    columns = column_side(n0, k_start, tables, C)
    x_MN, scale = biased_scores(q_MD, tl.trans(k_ND), rows, columns, head, batch, numbers, position, tables, False, C)
    dp_MN = dot(do_ME, tl.trans(v_NE), C=C)
    if C.softmax:
        lse_M, delta_M = lse_M[:, None], delta_M[:, None]
    elif C.per_token:
        inverse_M = inverse_M[:, None]
    seen = True
    if MASK:
        seen = pair_mask(i, j, rules, C)
    p_MN, ds_MN = chain(x_MN, scale, dp_MN, lse_M, delta_M, inverse_M, seen, MASK, C)
    return dot(ds_MN.to(k_ND.dtype), k_ND, acc_MD, C=C)


@triton.jit
def _dq_sample(
    acc_MD, at, m0, head, q, k, v, out, do, lse, delta, strides, batch, numbers, position, tables, C: tl.constexpr
):
    """Add one sample's part of dq for one tile of its rows, without the factor scale / divisor."""
    out_start, q_length = at.out_start, at.q_length
    rules = sample_rules(q_length, at.k_length, at.targets, at.context, numbers, C)
    q_MD = load_rows(q, strides.q, at.q_start, q_length, m0, head, C.block_m, C.block_d, C.dim, C.tma)
    do_ME = load_rows(do, strides.do, out_start, q_length, m0, head, C.block_m, C.block_e, C.v_dim, C.tma)
    row_M = m0 + tl.arange(0, C.block_m)
    if C.softmax:
        out_ME = load_rows(out, strides.out, out_start, q_length, m0, head, C.block_m, C.block_e, C.v_dim, False)
        delta_M = tl.sum(out_ME.to(tl.float32) * do_ME.to(tl.float32), 1)
        tl.store(delta + head.to(tl.int64) * numbers.rows + out_start + row_M, delta_M, mask=row_M < q_length)
        lse_M = tl.load(
            lse + head.to(tl.int64) * numbers.rows + out_start + row_M, mask=row_M < q_length, other=float("inf")
        )
        per_row = (lse_M, delta_M, 0.0)
    else:
        per_row = row_numbers(lse, delta, head, out_start + row_M, row_M < q_length, batch, numbers, C)
    p0 = m0 + rules.first_position
    p1 = tl.minimum(m0 + C.block_m, q_length) + rules.first_position
    position_M = p0 + tl.arange(0, C.block_m)
    site = (at.k_start, head // C.group, head, row_side(p0, at.k_start, tables, C))
    lo, mid, top, hi = key_range(p0, p1, rules, C)
    if C.masked:
        for t in tl.range(lo, hi - (top - mid), C.block_n, num_stages=C.stages):
            n0 = tl.where(t < mid, t, t + (top - mid))
            acc_MD = _dq_step(acc_MD, q_MD, do_ME, per_row, n0, position_M, site, k, v, strides, rules, batch,
                              numbers, position, tables, True, C)  # fmt: skip
    for n0 in tl.range(mid, top, C.block_n, num_stages=C.stages):
        acc_MD = _dq_step(acc_MD, q_MD, do_ME, per_row, n0, position_M, site, k, v, strides, rules, batch, numbers,
                          position, tables, False, C)  # fmt: skip
    return acc_MD


@triton.jit
def _dq_seeds(
    entry, head, q, k, v, out, do, lse, delta, dq, strides, batch, numbers, position, tables, C: tl.constexpr
):
    acc_MD = tl.full([C.block_m, C.block_d], 0.0, tl.float32)
    rows_tiles = tl.cdiv(batch.seeds, C.block_m)
    chunk = entry // rows_tiles
    m0 = entry % rows_tiles * C.block_m
    for b in range(chunk, batch.size, batch.chunks):
        at = read_sample(b, batch, C)
        acc_MD = _dq_sample(
            acc_MD, at, m0, head, q, k, v, out, do, lse, delta, strides, batch, numbers, position, tables, C
        )
    store_rows(dq, strides.dq, chunk * batch.seeds, batch.seeds, m0, head, acc_MD * numbers.gradient_scale, C.block_m,
               C.block_d, C.dim)  # fmt: skip


@triton.jit
def _dq_tile(entry, head, q, k, v, out, do, lse, delta, dq, strides, batch, numbers, position, tables, C: tl.constexpr):
    b, m0, at = read_tile(batch.tiles, entry, batch, C)
    if b >= 0:
        acc_MD = tl.full([C.block_m, C.block_d], 0.0, tl.float32)
        acc_MD = _dq_sample(
            acc_MD, at, m0, head, q, k, v, out, do, lse, delta, strides, batch, numbers, position, tables, C
        )
        store_rows(dq, strides.dq, at.q_start, at.q_length, m0, head, acc_MD * numbers.gradient_scale, C.block_m,
                   C.block_d, C.dim)  # fmt: skip


@triton.jit
def dq_kernel(q, k, v, out, do, lse, delta, dq, strides, batch, numbers, position, tables, C: tl.constexpr):
    """dq (rows, H, D); for softmax also delta (H, rows) = sum(out * do). Grid: (tiles * heads,), heads fastest.

    Broadcast queries: dq is (chunks, S, H, D) float32, chunk c holding the sum over samples c, c + chunks, ...; the
    grid is (chunks * tiles of S * heads,).
    """
    head = tl.program_id(0) % C.heads
    entry = tl.program_id(0) // C.heads
    if C.query == "broadcast":
        _dq_seeds(entry, head, q, k, v, out, do, lse, delta, dq, strides, batch, numbers, position, tables, C)
    else:
        _dq_tile(entry, head, q, k, v, out, do, lse, delta, dq, strides, batch, numbers, position, tables, C)


# ------------------------------------------------------------------------------------------------ dk, dv


@triton.jit
def _dkv_step(dk_ND, dv_NE, k_ND, v_NE, m0, columns, head, at, q, do, lse, delta, strides, rules, batch, numbers,
              position, tables, MASK: tl.constexpr, C: tl.constexpr):  # fmt: skip
    q_start, out_start, k_start, q_length = at.q_start, at.out_start, at.k_start, at.q_length
    q_MD = load_rows(q, strides.q, q_start, q_length, m0, head, C.block_m, C.block_d, C.dim, C.tma)
    do_ME = load_rows(do, strides.do, out_start, q_length, m0, head, C.block_m, C.block_e, C.v_dim, C.tma)
    row_M = m0 + tl.arange(0, C.block_m)
    position_M = row_M + rules.first_position
    i = position_M[None, :]
    j = (columns.first + tl.arange(0, C.block_n))[:, None]
    rows = row_side(m0 + rules.first_position, k_start, tables, C)
    x_NM, scale = biased_scores(k_ND, tl.trans(q_MD), rows, columns, head, batch, numbers, position, tables, True, C)
    dp_NM = dot(v_NE, tl.trans(do_ME), C=C)
    lse_M, delta_M, inverse_M = row_numbers(lse, delta, head, out_start + row_M, row_M < q_length, batch, numbers, C)
    if C.softmax:
        lse_M, delta_M = lse_M[None, :], delta_M[None, :]
    elif C.per_token:
        inverse_M = inverse_M[None, :]
    seen = True
    if MASK:
        seen = pair_mask(i, j, rules, C)
    p_NM, ds_NM = chain(x_NM, scale, dp_NM, lse_M, delta_M, inverse_M, seen, MASK, C)
    dv_NE = dot(p_NM.to(do_ME.dtype), do_ME, dv_NE, C=C)
    dk_ND = dot(ds_NM.to(q_MD.dtype), q_MD, dk_ND, C=C)
    return dk_ND, dv_NE


@triton.jit
def _dkv_sample(dk_ND, dv_NE, k_ND, v_NE, at, n0, head, q, do, lse, delta, strides, batch, numbers, position, tables,
                C: tl.constexpr):  # fmt: skip
    """Add one sample's and one query head's part of dk and dv for one tile of keys."""
    rules = sample_rules(at.q_length, at.k_length, at.targets, at.context, numbers, C)
    columns = column_side(n0, at.k_start, tables, C)
    if C.rules:
        early, lo, mid, top, hi = row_range(n0, tl.minimum(n0 + C.block_n, at.k_length), rules, C)
        lo = lo - early  # rows 0..early and lo..mid and top..hi, joined
        for t in tl.range(lo, hi - (top - mid), C.block_m, num_stages=C.stages):
            m0 = tl.where(t < lo + early, t - lo, tl.where(t < mid, t, t + (top - mid)))
            dk_ND, dv_NE = _dkv_step(dk_ND, dv_NE, k_ND, v_NE, m0, columns, head, at, q, do, lse, delta, strides,
                                     rules, batch, numbers, position, tables, True, C)  # fmt: skip
    else:
        mid = 0
        top = at.q_length
    for m0 in tl.range(mid, top, C.block_m, num_stages=C.stages):
        dk_ND, dv_NE = _dkv_step(dk_ND, dv_NE, k_ND, v_NE, m0, columns, head, at, q, do, lse, delta, strides, rules,
                                 batch, numbers, position, tables, False, C)  # fmt: skip
    return dk_ND, dv_NE


@triton.jit
def dkv_kernel(q, k, v, do, lse, delta, dk, dv, strides, batch, numbers, position, tables, C: tl.constexpr):
    """dk (Tk, G, D) and dv (Tk, G, E), summed over the query heads and samples that share a row.

    Grid: (key tiles * kv heads,), heads fastest. For softmax it runs after dq_kernel, which writes delta.
    """
    kv_head = tl.program_id(0) % C.kv_heads
    row, n0, at = read_tile(batch.key_tiles, tl.program_id(0) // C.kv_heads, batch, C)
    if row < 0:
        return
    k_start, k_length = at.k_start, at.k_length
    k_ND = load_rows(k, strides.k, k_start, k_length, n0, kv_head, C.block_n, C.block_d, C.dim, C.tma)
    v_NE = load_rows(v, strides.v, k_start, k_length, n0, kv_head, C.block_n, C.block_e, C.v_dim, C.tma)
    dk_ND = tl.full([C.block_n, C.block_d], 0.0, tl.float32)
    dv_NE = tl.full([C.block_n, C.block_e], 0.0, tl.float32)
    if C.shared_kv:
        first = tl.load(batch.kv_samples + row).to(tl.int32)
        last = tl.load(batch.kv_samples + row + 1).to(tl.int32)
        for turn in range(first * C.group, last * C.group):
            head = kv_head * C.group + turn % C.group
            sample = read_sample(turn // C.group, batch, C)
            dk_ND, dv_NE = _dkv_sample(dk_ND, dv_NE, k_ND, v_NE, sample, n0, head, q, do, lse, delta, strides, batch,
                                       numbers, position, tables, C)  # fmt: skip
    elif C.group > 1:
        for turn in range(0, C.group):
            dk_ND, dv_NE = _dkv_sample(dk_ND, dv_NE, k_ND, v_NE, at, n0, kv_head * C.group + turn, q, do, lse, delta,
                                       strides, batch, numbers, position, tables, C)  # fmt: skip
    else:
        dk_ND, dv_NE = _dkv_sample(dk_ND, dv_NE, k_ND, v_NE, at, n0, kv_head, q, do, lse, delta, strides, batch,
                                   numbers, position, tables, C)  # fmt: skip
    dv_scale = numbers.inverse_divisor
    store_rows(dv, strides.dv, k_start, k_length, n0, kv_head, dv_NE * dv_scale, C.block_n, C.block_e, C.v_dim)
    store_rows(dk, strides.dk, k_start, k_length, n0, kv_head, dk_ND * numbers.gradient_scale, C.block_n, C.block_d,
               C.dim)  # fmt: skip


# ------------------------------------------------------------------------------------------------ few queries


@triton.jit
def short_query_kernel(q, k, v, do, dq, dk, dv, strides, batch, numbers, tables, C: tl.constexpr):
    """dq, dk and dv at once, where no sample has more than block_m queries: pointwise, no mask, no bias, no sharing.

    Grid: (B * heads,). Broadcast queries: dq is (B, S, H, D) float32, to be summed over B.
    """
    b = tl.program_id(0) // C.heads
    head = tl.program_id(0) % C.heads
    at = read_sample(b, batch, C)
    out_start, q_length, k_start, k_length = at.out_start, at.q_length, at.k_start, at.k_length
    q_MD = load_rows(q, strides.q, at.q_start, q_length, 0, head, C.block_m, C.block_d, C.dim, False)
    do_ME = load_rows(do, strides.do, out_start, q_length, 0, head, C.block_m, C.block_e, C.v_dim, False)
    row_M = tl.arange(0, C.block_m)
    _, _, inverse_M = row_numbers(q, q, head, out_start + row_M, row_M < q_length, batch, numbers, C)
    if C.per_token:
        inverse_M = inverse_M[None, :]
    dq_MD = tl.full([C.block_m, C.block_d], 0.0, tl.float32)
    for n0 in tl.range(0, k_length, C.block_n, num_stages=C.stages):
        k_ND = load_rows(k, strides.k, k_start, k_length, n0, head, C.block_n, C.block_d, C.dim, C.tma)
        v_NE = load_rows(v, strides.v, k_start, k_length, n0, head, C.block_n, C.block_e, C.v_dim, C.tma)
        x_NM = dot(k_ND, tl.trans(q_MD), C=C)
        dp_NM = dot(v_NE, tl.trans(do_ME), C=C)
        p_NM, ds_NM = chain(x_NM, numbers.scale, dp_NM, 0.0, 0.0, inverse_M, True, False, C)
        ds_NM = ds_NM.to(k_ND.dtype)
        dv_NE = dot(p_NM.to(do_ME.dtype), do_ME, C=C) * numbers.inverse_divisor
        dk_ND = dot(ds_NM, q_MD, C=C) * numbers.gradient_scale
        dq_MD = dot(tl.trans(ds_NM), k_ND, dq_MD, C=C)
        store_rows(dv, strides.dv, k_start, k_length, n0, head, dv_NE, C.block_n, C.block_e, C.v_dim)
        store_rows(dk, strides.dk, k_start, k_length, n0, head, dk_ND, C.block_n, C.block_d, C.dim)
    store_rows(dq, strides.dq, out_start, q_length, 0, head, dq_MD * numbers.gradient_scale, C.block_m, C.block_d,
               C.dim)  # fmt: skip
