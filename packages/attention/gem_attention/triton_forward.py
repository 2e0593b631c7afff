"""The Triton forward kernel: one program for one tile of query rows of one head.

A pointwise activation needs no row maximum and no rescaling, so the inner loop is two matrix products and f; softmax
keeps the usual running maximum and sum and stores the log-sum-exp for the backward. Columns are visited in two loops:
first those a mask rule cuts (the two ends of the range, joined into one loop), then the full ones without a mask. A
mask branch inside one common loop would keep the mask's registers alive in every step.

Cost of a tile: Q read once, K and V once (from the L2 cache when the tiles of a sequence run together), O written once.
Letters as in triton_common.
"""

import triton
import triton.language as tl

from gem_attention.triton_bias import biased_scores, column_side, row_side
from gem_attention.triton_common import (
    LOG2E,
    activate,
    dot,
    key_range,
    load_rows,
    pair_mask,
    read_tile,
    sample_rules,
    store_rows,
)


@triton.jit
def _step(acc_ME, top_M, sum_M, q_MD, n0, position_M, site, k, v, strides, rules, batch, numbers, position, tables,
          MASK: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Add one tile of columns. top_M and sum_M are the running maximum (base 2) and sum, softmax only."""
    k_start, kv_head, head, rows = site
    k_ND = load_rows(k, strides.k, k_start, rules.length, n0, kv_head, C.block_n, C.block_d, C.dim, C.tma)
    column_N = n0 + tl.arange(0, C.block_n)
    i = position_M[:, None]
    j = column_N[None, :]
    columns = column_side(n0, k_start, tables, C)
    x_MN, scale = biased_scores(q_MD, tl.trans(k_ND), rows, columns, head, batch, numbers, position, tables, False, C)
    if C.softmax:
        x_MN = x_MN * (scale * LOG2E)
        if MASK:
            x_MN = tl.where(pair_mask(i, j, rules, C), x_MN, float("-inf"))
        new_top_M = tl.maximum(top_M, tl.max(x_MN, 1))
        safe_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
        p_MN = tl.exp2(x_MN - safe_M[:, None])
        keep_M = tl.exp2(top_M - safe_M)
        sum_M = sum_M * keep_M + tl.sum(p_MN, 1)
        acc_ME = acc_ME * keep_M[:, None]
        top_M = new_top_M
    else:
        p_MN = activate(x_MN, scale, C)
        if MASK:
            p_MN = tl.where(pair_mask(i, j, rules, C), p_MN, 0.0)
    v_NE = load_rows(v, strides.v, k_start, rules.length, n0, kv_head, C.block_n, C.block_e, C.v_dim, C.tma)
    acc_ME = dot(p_MN.to(v_NE.dtype), v_NE, acc_ME, C=C)
    return acc_ME, top_M, sum_M


@triton.jit
def forward_kernel(q, k, v, out, lse, strides, batch, numbers, position, tables, C: tl.constexpr):
    """out (rows, H, E), lse (H, rows) float32, base e, softmax only. Grid: (tiles * heads,), heads fastest."""
    head = tl.program_id(0) % C.heads
    b, m0, at = read_tile(batch.tiles, tl.program_id(0) // C.heads, batch, C)
    if b < 0:
        return
    rules = sample_rules(at.q_length, at.k_length, at.targets, at.context, numbers, C)
    kv_head = head // C.group
    q_MD = load_rows(q, strides.q, at.q_start, at.q_length, m0, head, C.block_m, C.block_d, C.dim, C.tma)
    p0 = m0 + rules.first_position
    p1 = tl.minimum(m0 + C.block_m, at.q_length) + rules.first_position
    position_M = p0 + tl.arange(0, C.block_m)
    lo, mid, top, hi = key_range(p0, p1, rules, C)
    site = (at.k_start, kv_head, head, row_side(p0, at.k_start, tables, C))

    acc_ME = tl.full([C.block_m, C.block_e], 0.0, tl.float32)
    top_M = tl.full([C.block_m], float("-inf"), tl.float32)
    sum_M = tl.full([C.block_m], 0.0, tl.float32)
    if C.masked:
        for t in tl.range(lo, hi - (top - mid), C.block_n, num_stages=C.stages):
            n0 = tl.where(t < mid, t, t + (top - mid))
            acc_ME, top_M, sum_M = _step(acc_ME, top_M, sum_M, q_MD, n0, position_M, site, k, v, strides, rules, batch,
                                         numbers, position, tables, True, C)  # fmt: skip
    for n0 in tl.range(mid, top, C.block_n, num_stages=C.stages):
        acc_ME, top_M, sum_M = _step(acc_ME, top_M, sum_M, q_MD, n0, position_M, site, k, v, strides, rules, batch,
                                     numbers, position, tables, False, C)  # fmt: skip

    row_M = m0 + tl.arange(0, C.block_m)
    if C.softmax:
        acc_ME = acc_ME / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
        # a row without keys gets +inf, so that the backward's exp(s - lse) is 0
        lse_M = tl.where(sum_M == 0.0, float("inf"), (top_M + tl.log2(sum_M)) / LOG2E)
        tl.store(lse + head.to(tl.int64) * numbers.rows + at.out_start + row_M, lse_M, mask=row_M < at.q_length)
    elif C.per_token:
        divisor_M = tl.load(batch.divisor + at.out_start + row_M, mask=row_M < at.q_length, other=1.0).to(tl.float32)
        acc_ME = acc_ME / divisor_M[:, None]
    else:
        acc_ME = acc_ME * numbers.inverse_divisor
    store_rows(out, strides.out, at.out_start, at.q_length, m0, head, acc_ME, C.block_m, C.block_e, C.v_dim)
