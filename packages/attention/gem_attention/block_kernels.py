"""Triton kernels of the projection: norm(x) @ W^T with SiLU and rotary in the epilogue, and its backward.

Lazy pre-norm: rows of norm(x) are scaled rows of x, so the product runs on x itself and the rows are scaled at its end:

    rms    z = rstd * (x @ W^T)                  layer    z = rstd * (x @ W^T - mean * rowsum(W))

with the sums behind rstd and mean taken beside the product, from the tiles of x that pass anyway (C.beside), or by
`stats_kernel` before it. norm(x) never exists in memory. In the backward, with g = rstd * dz (one pass over the
gradients, `gradient_kernel`) and G = g @ W,

    dW = g^T @ x  (- (g^T @ mean) 1^T for "layer")          dx = G - mean(G) - xhat * mean(G * xhat)

(no mean(G) for "rms"), so again no norm(x). Both row means are also sums over the outputs, mean(G * xhat) = <g, z> / D
and mean(G) = <g, rowsum(W)> / D: where z is at hand they cost nothing in gradient_kernel and dx becomes the epilogue
of its product (`input_gradient_kernel`); elsewhere the vendor's product is followed by `norm_gradient_kernel`.

Turning back happens on float32 values in gradient_kernel: one rounding, of g.

A tile never crosses from one output to the next: `C.starts` lists where each output's column tiles begin, and
`C.shifts` what to add to a tile's columns to get rows of W. Where rotary pairs halves of a head dim that is no power of
two, tiles hold each half padded (C.padded); memory is not padded.

Letters: M tokens of a tile, N columns of a tile, K depth of a step; T tokens, D width of x. C is a ProjectConfig.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """One special-function instruction (error 2^-11 of the value), or the exact form where there is none."""
    if FAST:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    return y


@triton.jit
def silu(z, FAST: tl.constexpr):
    return z * (0.5 * tanh(0.5 * z, FAST) + 0.5)


@triton.jit
def silu_and_slope(z, FAST: tl.constexpr):
    """(silu(z), silu'(z))."""
    gate = 0.5 * tanh(0.5 * z, FAST) + 0.5
    y = z * gate
    return y, y * (1.0 - gate) + gate


@triton.jit
def dot(a, b, acc, C: tl.constexpr):
    """a b + acc in float32. The interpreter has no bfloat16 product, so there the operands are widened first.

    C as a whole: Triton 3.6 takes no text as an argument of a call between kernels (3.7 does).
    """
    if C.precision == "upcast":
        y = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        y = tl.dot(a, b, acc, input_precision=C.precision)
    return y


@triton.jit
def columns(n0, COUNT: tl.constexpr, C: tl.constexpr):
    """(columns of an output that a tile holds, which of them exist in the padding's sense)."""
    j = tl.arange(0, COUNT)
    if C.padded:
        col = n0 + (j // C.padded_half) * C.half + j % C.padded_half
        ok = j % C.padded_half < C.half
    else:
        col = n0 + j
        ok = j >= 0
    return col, ok


@triton.jit
def turn(x_MN, table, row_M, live_M, n0, wanted, BACK: tl.constexpr, BN: tl.constexpr, C: tl.constexpr):
    """Turn the pairs of a tile, or turn them back, if wanted (then without a branch: by an angle of 0, not read).

    The tile begins at a head's first column.
    """
    BM: tl.constexpr = C.block_m
    p = tl.arange(0, BN // 2)
    if C.interleaved:
        i = (n0 + 2 * p) % C.head_dim // 2
        pairs = tl.reshape(x_MN, [BM, BN // 2, 2])
    else:
        i = p % C.padded_half
        halves = tl.reshape(x_MN, [BM, BN // (2 * C.padded_half), 2, C.padded_half])
        pairs = tl.reshape(tl.permute(halves, (0, 1, 3, 2)), [BM, BN // 2, 2])
    first, second = tl.split(pairs)
    at = table + row_M.to(tl.int64)[:, None] * C.head_dim + i[None, :]
    mask = live_M[:, None] & (i < C.half)[None, :] & wanted
    cos = tl.load(at, mask=mask, other=1.0)
    sin = tl.load(at + C.half, mask=mask, other=0.0)
    if BACK:
        sin = -sin
    turned = tl.join(first * cos - second * sin, first * sin + second * cos)
    if C.interleaved:
        y_MN = tl.reshape(turned, [BM, BN])
    else:
        y_MN = tl.reshape(turned, [BM, BN // (2 * C.padded_half), C.padded_half, 2])
        y_MN = tl.reshape(tl.permute(y_MN, (0, 1, 3, 2)), [BM, BN])
    return y_MN


@triton.jit
def store_tile(out, tile_MN, row_M, col_N, stride, mask_MN):
    at = out + row_M.to(tl.int64)[:, None] * stride + col_N[None, :]
    tl.store(at, tile_MN.to(out.dtype.element_ty), mask=mask_MN)


# ------------------------------------------------------------------------------------------------ forward


@triton.jit
def stats_kernel(x, x_stride, mean, rstd, tokens, eps, C: tl.constexpr):
    """mean (T,) and rstd (T,) float32, two passes over a row that the second time comes from the cache."""
    row_M = tl.program_id(0) * C.block_m + tl.arange(0, C.block_m)
    live_M = row_M < tokens
    base = x + row_M.to(tl.int64)[:, None] * x_stride
    mean_M = tl.full([C.block_m], 0.0, tl.float32)
    if C.layer:
        for k0 in range(0, C.dim, C.block_k):
            k = k0 + tl.arange(0, C.block_k)
            tile = tl.load(base + k[None, :], mask=live_M[:, None] & (k < C.dim)[None, :], other=0.0)
            mean_M += tl.sum(tile.to(tl.float32), 1)
        mean_M = mean_M / C.dim
    square_M = tl.full([C.block_m], 0.0, tl.float32)
    for k0 in range(0, C.dim, C.block_k):
        k = k0 + tl.arange(0, C.block_k)
        mask = live_M[:, None] & (k < C.dim)[None, :]
        d = tl.load(base + k[None, :], mask=mask, other=0.0).to(tl.float32) - mean_M[:, None]
        square_M += tl.sum(tl.where(mask, d * d, 0.0), 1)
    if C.layer:
        tl.store(mean + row_M, mean_M, mask=live_M)
    tl.store(rstd + row_M, tl.rsqrt(square_M / C.dim + eps), mask=live_M)


@triton.jit
def _product(x, x_rows, x_stride, weight, m0, row_M, live_M, w_row, w_row_N, w_ok_N, C: tl.constexpr):
    """(x @ W^T of a tile, the sums of d and of d^2 for d = x - shift, shift).

    "layer" shifts by the row's first element: rows that lie far from zero would else lose their variance to rounding.
    """
    acc_MN = tl.full([C.block_m, C.block_n], 0.0, tl.float32)
    sum_M = tl.full([C.block_m], 0.0, tl.float32)
    square_M = tl.full([C.block_m], 0.0, tl.float32)
    shift_M = tl.full([C.block_m], 0.0, tl.float32)
    row = row_M.to(tl.int64)[:, None] * x_stride
    if C.beside and C.layer:
        shift_M = tl.load(x_rows + row_M.to(tl.int64) * x_stride, mask=live_M, other=0.0).to(tl.float32)
    for k0 in tl.range(0, C.dim, C.block_k, num_stages=C.stages):
        k = k0 + tl.arange(0, C.block_k)
        if C.tma:
            a = x.load([m0, k0])
            b = weight.load([w_row, k0])
        else:
            ok_K = k < C.dim
            a = tl.load(x_rows + row + k[None, :], mask=live_M[:, None] & ok_K[None, :], other=0.0)
            b = tl.load(weight + w_row_N.to(tl.int64)[:, None] * C.dim + k[None, :],
                        mask=w_ok_N[:, None] & ok_K[None, :], other=0.0)  # fmt: skip
        acc_MN = dot(a, tl.trans(b), acc_MN, C)
        if C.beside:
            d = a.to(tl.float32)
            if C.layer:
                d = d - shift_M[:, None]
                if C.dim % C.block_k != 0:
                    d = tl.where((k < C.dim)[None, :], d, 0.0)
                sum_M += tl.sum(d, 1)
            square_M += tl.sum(d * d, 1)
    return acc_MN, sum_M, square_M, shift_M


@triton.jit
def project_kernel(x, x_rows, x_stride, weight, row_sums, table, outs, preacts, mean, rstd, tokens, eps,
                   C: tl.constexpr):  # fmt: skip
    """Every output, its pre-activation where preacts has a place for it, and mean and rstd where taken beside.

    Grid: any number of programs; each takes every so-manieth tile, column tiles first, so that W stays in the L2 cache
    and a strip of x is read from memory once. row_sums (N,) float32 of W, for "layer".
    """
    outputs: tl.constexpr = C.outputs
    total = tl.cdiv(tokens, C.block_m) * C.tiles_n
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=C.flatten):
        m0 = tile // C.tiles_n * C.block_m
        t_n = tile % C.tiles_n
        w_shift = C.shifts[0]
        start = 0
        width = C.widths[0]
        active = C.silu[0]
        wanted = C.turned[0]
        out = outs[0]
        preact = preacts[0]
        for s in tl.static_range(1, outputs):  # by selection: branches would keep the two loops from becoming one
            later = t_n >= C.starts[s]
            w_shift = tl.where(later, C.shifts[s], w_shift)
            start = tl.where(later, C.starts[s], start)
            width = tl.where(later, C.widths[s], width)
            active = tl.where(later, C.silu[s], active)
            wanted = tl.where(later, C.turned[s], wanted)
            out = tl.where(later, outs[s], out)
            if C.keeps:
                preact = tl.where(later, preacts[s], preact)
        n0 = (t_n - start) * C.span
        w_row = t_n * C.span + w_shift
        col_N, exists_N = columns(n0, C.block_n, C)
        w_row_N = w_row - n0 + col_N
        w_ok_N = exists_N & (w_row_N < C.rows_n)
        row_M = m0 + tl.arange(0, C.block_m)
        live_M = row_M < tokens

        acc_MN, sum_M, square_M, shift_M = _product(x, x_rows, x_stride, weight, m0, row_M, live_M, w_row, w_row_N,
                                                    w_ok_N, C)  # fmt: skip
        if C.beside:
            d_M = sum_M / C.dim
            mean_M = shift_M + d_M
            rstd_M = tl.rsqrt(tl.maximum(square_M / C.dim - d_M * d_M, 0.0) + eps)
            if t_n == 0:
                if C.layer:
                    tl.store(mean + row_M, mean_M, mask=live_M)
                tl.store(rstd + row_M, rstd_M, mask=live_M)
        else:
            rstd_M = tl.load(rstd + row_M, mask=live_M, other=0.0)
            mean_M = rstd_M
            if C.layer:
                mean_M = tl.load(mean + row_M, mask=live_M, other=0.0)
        target = (out, preact, width, active, wanted)
        if C.halved:  # a tile's end works on half of it at a time, since its temporaries need registers too
            left_MN, right_MN = _halves(acc_MN, C)
            part: tl.constexpr = C.block_n // 2
            n1 = n0 + C.span // 2
            _finish(left_MN, mean_M, rstd_M, row_sums, w_row - n0, table, target, row_M, live_M, n0, part, C)
            _finish(right_MN, mean_M, rstd_M, row_sums, w_row - n0, table, target, row_M, live_M, n1, part, C)
        else:
            _finish(acc_MN, mean_M, rstd_M, row_sums, w_row - n0, table, target, row_M, live_M, n0, C.block_n, C)


@triton.jit
def _halves(x_MN, C: tl.constexpr):
    """The left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x_MN, [C.block_m, 2, C.block_n // 2]), (0, 2, 1)))


@triton.jit
def _finish(z_MN, mean_M, rstd_M, row_sums, w_first, table, target, row_M, live_M, n0, COUNT: tl.constexpr,
            C: tl.constexpr):  # fmt: skip
    """Scale the rows of x @ W^T, activate, turn, store. w_first: the row of W of the output's first column."""
    out, preact, width, active, wanted = target
    col_N, exists_N = columns(n0, COUNT, C)
    ok_N = exists_N & (col_N < width)
    mask_MN = live_M[:, None] & ok_N[None, :]
    if C.layer:
        sums_N = tl.load(row_sums + w_first + col_N, mask=ok_N, other=0.0)
        z_MN = z_MN - mean_M[:, None] * sums_N[None, :]
    z_MN = z_MN * rstd_M[:, None]
    if C.keeps:
        store_tile(preact, z_MN, row_M, col_N, width, mask_MN & active)
    if C.all_silu:
        z_MN = silu(z_MN, C.fast_math)
    elif C.some_silu:  # noqa: SIM102 (one is known to the compiler, the other is not)
        if active:
            z_MN = silu(z_MN, C.fast_math)
    if C.some_turned:
        z_MN = turn(z_MN, table, row_M, live_M, n0, wanted, False, COUNT, C)
    store_tile(out, z_MN, row_M, col_N, width, mask_MN)


# ------------------------------------------------------------------------------------------------ backward


@triton.jit
def _output_gradient(grad, stride, preact, table, row_sums, g, shares, row_M, live_M, mean_M, rstd_M, sums_M, product_M,
                     S: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """The columns of g that belong to output S; returns the running row sums."""
    width: tl.constexpr = C.widths[S]
    first: tl.constexpr = C.first_rows[S]
    row = row_M.to(tl.int64)[:, None]
    for n0 in tl.range(0, width, C.span, num_stages=C.stages):
        col_N, exists_N = columns(n0, C.block_n, C)
        ok_N = exists_N & (col_N < width)
        mask_MN = live_M[:, None] & ok_N[None, :]
        z_MN = tl.load(grad + row * stride + col_N[None, :], mask=mask_MN, other=0.0).to(tl.float32)
        if C.turned[S]:
            z_MN = turn(z_MN, table, row_M, live_M, n0, True, True, C.block_n, C)
        if C.silu[S]:
            preact_MN = tl.load(preact + row * width + col_N[None, :], mask=mask_MN, other=0.0).to(tl.float32)
            _, slope_MN = silu_and_slope(preact_MN, C.fast_math)
            z_MN = z_MN * slope_MN
        g_MN = z_MN * rstd_M[:, None]
        store_tile(g, g_MN, row_M, first + col_N, C.rows_n, mask_MN)
        if C.dots:
            product_M += tl.sum(g_MN * preact_MN, 1)
        if C.layer:
            if C.dots:
                sums_N = tl.load(row_sums + first + col_N, mask=ok_N, other=0.0)
                sums_M += tl.sum(g_MN * sums_N[None, :], 1)
            tl.store(shares + first + col_N, tl.sum(g_MN * mean_M[:, None], 0), mask=ok_N)
    return sums_M, product_M


@triton.jit
def gradient_kernel(grads, grad_strides, preacts, table, mean, rstd, row_sums, g, dots, shares, tokens,
                    C: tl.constexpr):  # fmt: skip
    """g (T, N) = rstd * dz out of the gradients of all outputs. One program: block_m tokens, all columns.

    dots (2, T) float32: <g, rowsum(W)> / D ("layer") and <g, z> / D, where C.dots (then every output has a preact)
    shares (programs, N) float32: this program's share of g^T @ mean, where C.layer
    """
    row_M = tl.program_id(0) * C.block_m + tl.arange(0, C.block_m)
    live_M = row_M < tokens
    rstd_M = tl.load(rstd + row_M, mask=live_M, other=0.0)
    mean_M = rstd_M
    if C.layer:
        mean_M = tl.load(mean + row_M, mask=live_M, other=0.0)
    sums_M = tl.full([C.block_m], 0.0, tl.float32)
    product_M = tl.full([C.block_m], 0.0, tl.float32)
    outputs: tl.constexpr = C.outputs
    share = shares + tl.program_id(0).to(tl.int64) * C.rows_n
    for s in tl.static_range(outputs):
        sums_M, product_M = _output_gradient(grads[s], grad_strides[s], preacts[s], table, row_sums, g, share, row_M,
                                             live_M, mean_M, rstd_M, sums_M, product_M, s, C)  # fmt: skip
    if C.dots:
        tl.store(dots + row_M, sums_M / C.dim, mask=live_M)
        tl.store(dots + tokens + row_M, product_M / C.dim, mask=live_M)


@triton.jit
def input_gradient_kernel(g, g_rows, weight, x, x_stride, mean, rstd, dots, dx, tokens, C: tl.constexpr):
    """dx (T, D): the product g @ W with the norm's backward as its epilogue. Here columns are those of x, depth N."""
    tiles_n: tl.constexpr = (C.dim + C.block_n - 1) // C.block_n
    total = tl.cdiv(tokens, C.block_m) * tiles_n
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=C.flatten):
        m0 = tile // tiles_n * C.block_m
        n0 = tile % tiles_n * C.block_n
        row_M = m0 + tl.arange(0, C.block_m)
        live_M = row_M < tokens
        col_N = n0 + tl.arange(0, C.block_n)
        ok_N = col_N < C.dim
        row = row_M.to(tl.int64)[:, None]
        acc_MN = tl.full([C.block_m, C.block_n], 0.0, tl.float32)
        for k0 in tl.range(0, C.rows_n, C.block_k, num_stages=C.stages):
            if C.tma:
                a = g.load([m0, k0])
                b = weight.load([k0, n0])
            else:
                k = k0 + tl.arange(0, C.block_k)
                ok_K = k < C.rows_n
                a = tl.load(g_rows + row * C.rows_n + k[None, :], mask=live_M[:, None] & ok_K[None, :], other=0.0)
                b = tl.load(weight + k.to(tl.int64)[:, None] * C.dim + col_N[None, :],
                            mask=ok_K[:, None] & ok_N[None, :], other=0.0)  # fmt: skip
            acc_MN = dot(a, b, acc_MN, C)
        slope_M = tl.load(dots + tokens + row_M, mask=live_M, other=0.0)
        slope_M = slope_M * tl.load(rstd + row_M, mask=live_M, other=0.0)
        shift_M = slope_M
        if C.layer:  # dx = G - mean(G) - (x - mean) * slope = G - x * slope - shift
            shift_M = tl.load(dots + row_M, mask=live_M, other=0.0)
            shift_M -= slope_M * tl.load(mean + row_M, mask=live_M, other=0.0)
        if C.halved:
            left_MN, right_MN = _halves(acc_MN, C)
            part: tl.constexpr = C.block_n // 2
            _finish_dx(left_MN, x, x_stride, slope_M, shift_M, dx, row_M, live_M, n0, part, C)
            _finish_dx(right_MN, x, x_stride, slope_M, shift_M, dx, row_M, live_M, n0 + part, part, C)
        else:
            _finish_dx(acc_MN, x, x_stride, slope_M, shift_M, dx, row_M, live_M, n0, C.block_n, C)


@triton.jit
def _finish_dx(acc_MN, x, x_stride, slope_M, shift_M, dx, row_M, live_M, n0, COUNT: tl.constexpr, C: tl.constexpr):
    """The norm's backward on a tile of G."""
    col_N = n0 + tl.arange(0, COUNT)
    mask_MN = live_M[:, None] & (col_N < C.dim)[None, :]
    row = row_M.to(tl.int64)[:, None]
    x_MN = tl.load(x + row * x_stride + col_N[None, :], mask=mask_MN, other=0.0).to(tl.float32)
    acc_MN = acc_MN - x_MN * slope_M[:, None]
    if C.layer:
        acc_MN = acc_MN - shift_M[:, None]
    store_tile(dx, acc_MN, row_M, col_N, C.dim, mask_MN)


@triton.jit
def norm_gradient_kernel(gradient, x, x_stride, mean, rstd, dx, tokens, C: tl.constexpr):
    """dx (T, D) out of G = g @ W (T, D), which already carries rstd. block_n covers a whole row."""
    row_M = tl.program_id(0) * C.block_m + tl.arange(0, C.block_m)
    live_M = row_M < tokens
    col_N = tl.arange(0, C.block_n)
    mask_MN = live_M[:, None] & (col_N < C.dim)[None, :]
    row = row_M.to(tl.int64)[:, None]
    g_MN = tl.load(gradient + row * C.dim + col_N[None, :], mask=mask_MN, other=0.0).to(tl.float32)
    x_MN = tl.load(x + row * x_stride + col_N[None, :], mask=mask_MN, other=0.0).to(tl.float32)
    if C.layer:
        x_MN = tl.where(mask_MN, x_MN - tl.load(mean + row_M, mask=live_M, other=0.0)[:, None], 0.0)
    x_MN = x_MN * tl.load(rstd + row_M, mask=live_M, other=0.0)[:, None]
    y_MN = g_MN - x_MN * (tl.sum(g_MN * x_MN, 1) / C.dim)[:, None]
    if C.layer:
        y_MN = y_MN - (tl.sum(g_MN, 1) / C.dim)[:, None]
    store_tile(dx, y_MN, row_M, col_N, C.dim, mask_MN)
