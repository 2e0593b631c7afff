"""Triton kernels of the gate: y = act(u) * norm(attention), forward and backward in one kernel each.

Both are bound by memory. Kept for the backward: attention, u, and mean and rstd of each row; the backward reads the
gradient besides, writes both gradients and, on request, y once more (the output projection's input: rebuilding it here
costs its write alone, since everything it is made of is in registers).

A row is a token, or a token's head; a program holds whole rows. Letters: M rows, N columns of a row. C is a GateConfig.
"""

import triton
import triton.language as tl

from gem_attention.block_kernels import silu, silu_and_slope, tanh


@triton.jit
def _places(rows, u_stride, C: tl.constexpr):
    """(row, whether it exists, offsets into packed rows, offsets into u, mask)."""
    row_M = tl.program_id(0) * C.block_m + tl.arange(0, C.block_m)
    live_M = row_M < rows
    col_N = tl.arange(0, C.block_n)
    wide_M = row_M.to(tl.int64)
    at_MN = wide_M[:, None] * C.width + col_N[None, :]
    u_MN = (wide_M // C.heads)[:, None] * u_stride + (wide_M % C.heads)[:, None] * C.width + col_N[None, :]
    return row_M, live_M, at_MN, u_MN, live_M[:, None] & (col_N < C.width)[None, :]


@triton.jit
def gate_kernel(attention, u, u_stride, y, mean, rstd, rows, eps, C: tl.constexpr):
    row_M, live_M, at_MN, u_at_MN, mask_MN = _places(rows, u_stride, C)
    a_MN = tl.load(attention + at_MN, mask=mask_MN, other=0.0).to(tl.float32)
    if C.layer:
        mean_M = tl.sum(a_MN, 1) / C.width
        a_MN = tl.where(mask_MN, a_MN - mean_M[:, None], 0.0)
        tl.store(mean + row_M, mean_M, mask=live_M)
    rstd_M = tl.rsqrt(tl.sum(a_MN * a_MN, 1) / C.width + eps)
    tl.store(rstd + row_M, rstd_M, mask=live_M)
    u_MN = tl.load(u + u_at_MN, mask=mask_MN, other=0.0).to(tl.float32)
    if C.activation == "silu":
        u_MN = silu(u_MN, C.fast_math)
    elif C.activation == "sigmoid":
        u_MN = 0.5 * tanh(0.5 * u_MN, C.fast_math) + 0.5
    tl.store(y + at_MN, (u_MN * (a_MN * rstd_M[:, None])).to(y.dtype.element_ty), mask=mask_MN)


@triton.jit
def gate_gradient_kernel(dy, attention, u, u_stride, mean, rstd, da, du, y, rows, C: tl.constexpr):
    row_M, live_M, at_MN, u_at_MN, mask_MN = _places(rows, u_stride, C)
    a_MN = tl.load(attention + at_MN, mask=mask_MN, other=0.0).to(tl.float32)
    u_MN = tl.load(u + u_at_MN, mask=mask_MN, other=0.0).to(tl.float32)
    dy_MN = tl.load(dy + at_MN, mask=mask_MN, other=0.0).to(tl.float32)
    rstd_M = tl.load(rstd + row_M, mask=live_M, other=0.0)
    if C.layer:
        a_MN = tl.where(mask_MN, a_MN - tl.load(mean + row_M, mask=live_M, other=0.0)[:, None], 0.0)
    n_MN = a_MN * rstd_M[:, None]
    if C.activation == "silu":
        gate_MN, slope_MN = silu_and_slope(u_MN, C.fast_math)
        du_MN = dy_MN * n_MN * slope_MN
    elif C.activation == "sigmoid":
        gate_MN = 0.5 * tanh(0.5 * u_MN, C.fast_math) + 0.5
        du_MN = dy_MN * n_MN * (gate_MN * (1.0 - gate_MN))
    else:
        gate_MN = u_MN
        du_MN = dy_MN * n_MN
    tl.store(du + at_MN, du_MN.to(du.dtype.element_ty), mask=mask_MN)
    if C.rebuild:
        tl.store(y + at_MN, (gate_MN * n_MN).to(y.dtype.element_ty), mask=mask_MN)
    dn_MN = dy_MN * gate_MN
    da_MN = dn_MN - n_MN * (tl.sum(dn_MN * n_MN, 1) / C.width)[:, None]
    if C.layer:
        da_MN = da_MN - (tl.sum(dn_MN, 1) / C.width)[:, None]
    tl.store(da + at_MN, (da_MN * rstd_M[:, None]).to(da.dtype.element_ty), mask=mask_MN)
