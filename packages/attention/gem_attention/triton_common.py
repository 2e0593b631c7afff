"""Device functions shared by the Triton kernels: rows in and out, activations, masks, and which tiles to visit.

Letters: M query rows of a tile, N key rows of a tile, D head dim of q and k, E head dim of v. C is the KernelSpec.
"Position" is a place in the key sequence: for query kind "tail" query row i sits at position i + (Lk - Lq).

Rows are read so that whatever lies past a sequence's end arrives as zero, by masked pointers or by descriptors that
clip in hardware. Every pointwise activation may then ignore the end: a zero value row adds nothing to the output, a
zero key row nothing to dq, a zero dO row nothing to dk and dv. So "full" tiles carry no mask at all, and the mask is
worked out only in tiles that a rule cuts (diagonal, targets, context, window edge), in a loop of their own.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.tools.ragged_tma import to_ragged_indices

LOG2E = tl.constexpr(1.4426950408889634)


# ------------------------------------------------------------------------------------------------ rows in and out


@triton.jit
def load_rows(x, strides, start, length, row, head, ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
              TMA: tl.constexpr):  # fmt: skip
    """Rows row..row + ROWS of the sequence that begins at packed row `start`; zero past `length` and past DIM."""
    if TMA:
        far, end, at = to_ragged_indices(start, length, row)
        tile = tl.reshape(x.load([far, end, at, head, 0]), [ROWS, WIDTH])
    else:
        i = row + tl.arange(0, ROWS)
        d = tl.arange(0, WIDTH)
        at = x + (start + i).to(tl.int64)[:, None] * strides[0] + head.to(tl.int64) * strides[1] + d[None, :]
        if DIM == WIDTH:
            tile = tl.load(at, mask=(i < length)[:, None], other=0.0)
        else:
            tile = tl.load(at, mask=(i < length)[:, None] & (d < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def store_rows(x, strides, start, length, row, head, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Write a tile's rows that exist."""
    i = row + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    at = x + (start + i).to(tl.int64)[:, None] * strides[0] + head.to(tl.int64) * strides[1] + d[None, :]
    mask = (i < length)[:, None]
    if DIM != WIDTH:
        mask = mask & (d < DIM)[None, :]
    tl.store(at, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def sequence(offsets, b):
    """First packed row and length of sequence b."""
    start = tl.load(offsets + b).to(tl.int32)
    return start, tl.load(offsets + b + 1).to(tl.int32) - start


@triton.jit
def dot(a, b, acc=None, C: tl.constexpr = None):
    """a b + acc in float32. The interpreter has no bfloat16 product, so there the operands are widened first."""
    if C.precision == "upcast":
        y = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        y = tl.dot(a, b, acc, input_precision=C.precision)
    return y


# ------------------------------------------------------------------------------------------------ activations


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """One special-function instruction (error 2^-11 of the value), or the exact form where there is none."""
    if FAST:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    return y


@triton.jit
def activate(x, scale, C: tl.constexpr):
    """f(scale * x) for the pointwise activations; scale goes into scalar factors where that saves a multiplication."""
    if C.activation == "silu":
        h = x * (0.5 * scale)
        y = h * tanh(h, C.fast_math) + h
    elif C.activation == "gelu_tanh":
        h = x * (0.5 * scale)
        z = x * x
        t = tanh(x * (z * (0.035677408136300125 * scale * scale * scale) + 0.7978845608028654 * scale), C.fast_math)
        y = h * t + h
    else:
        x = x * scale
        if C.activation == "gelu":
            y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
        elif C.activation == "gelu_poly":
            z = x * x
            y = 0.5 * x + z * (0.3989423 + z * (-0.0664904 + z * 0.0099736))
        elif C.activation == "relu":
            y = tl.maximum(x, 0.0)
        elif C.activation == "relu2":
            y = tl.maximum(x, 0.0)
            y = y * y
        else:
            tl.static_assert(C.activation == "identity")
            y = x
    return y


@triton.jit
def activate_and_slope(x, scale, C: tl.constexpr):
    """(f(scale * x), f'(scale * x))."""
    if C.activation == "silu":
        h = x * (0.5 * scale)
        t = tanh(h, C.fast_math)
        y = h * t + h
        slope = y * (0.5 - 0.5 * t) + (0.5 * t + 0.5)
    elif C.activation == "gelu_tanh":
        h = x * (0.5 * scale)
        z = x * x
        t = tanh(x * (z * (0.035677408136300125 * scale * scale * scale) + 0.7978845608028654 * scale), C.fast_math)
        y = h * t + h
        bend = z * (0.10703222440890037 * scale * scale) + 0.7978845608028654
        slope = (h - y * t + h * t) * bend + (0.5 * t + 0.5)
    else:
        x = x * scale
        if C.activation == "gelu":
            cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
            y = x * cdf
            slope = cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
        elif C.activation == "gelu_poly":
            z = x * x
            y = 0.5 * x + z * (0.3989423 + z * (-0.0664904 + z * 0.0099736))
            slope = 0.5 + x * (0.7978846 + z * (-0.2659616 + z * 0.0598416))
        elif C.activation == "relu":
            y = tl.maximum(x, 0.0)
            slope = tl.where(x > 0, 1.0, 0.0)
        elif C.activation == "relu2":
            r = tl.maximum(x, 0.0)
            y = r * r
            slope = 2.0 * r
        else:
            tl.static_assert(C.activation == "identity")
            y = x
            slope = x * 0.0 + 1.0
    return y, slope


# ------------------------------------------------------------------------------------------------ masks


@triton.jit
def rank(p, rules, C: tl.constexpr):
    """The rank of positions p: context 0, history counting up, targets all the same or counting on."""
    r = p
    if C.context:
        r = tl.maximum(p - rules.context + rules.shift, 0)
    if C.targets and not C.distinct_targets:
        r = tl.minimum(r, rules.top)
    return r


@triton.jit
def below(r, rules, C: tl.constexpr):
    """The number of positions whose rank is under r (ranks count up, so these are the first ones)."""
    count = r
    if C.context:
        count = tl.where(r <= 0, 0, r - rules.shift + rules.context)
    if C.targets and not C.distinct_targets:
        count = tl.where(r > rules.top, rules.length, count)
    return tl.minimum(tl.maximum(count, 0), rules.length)


@triton.jit
def pair_mask(i, j, rules, C: tl.constexpr):
    """Whether row positions i may meet column positions j; any two shapes that broadcast."""
    ok = (j < rules.length) & (i >= 0)
    if C.block > 0:
        ok = ok & (i // C.block == j // C.block)
    elif C.rules:
        d = rank(i, rules, C) - rank(j, rules, C)
        seen = ok
        if C.causal:
            seen = ok & (d > 0)
        elif C.targets:
            seen = ok & (d != 0)
        if C.targets and C.distinct_targets:
            both = (i >= rules.first_target) & (j >= rules.first_target)
            if C.grouped:
                both = both & ((i - rules.first_target) // rules.group != (j - rules.first_target) // rules.group)
            seen = seen & (both == 0)
        seen = seen | (ok & (i == j))
        if C.window:
            if C.causal:
                near = d <= rules.window
            else:
                near = tl.abs(d) <= rules.window
            if C.min_full:
                near = near | (rank(i, rules, C) >= rules.top - rules.min_full)
            seen = seen & near
        if C.context:
            seen = seen | (ok & (i < rules.context) & (j < rules.first_target))
        ok = seen
    return ok


@triton.jit
def key_range(p0, p1, rules, C: tl.constexpr):
    """Columns for row positions p0..p1: visit lo..hi, of which mid..top need no mask. All multiples of block_n.

    Returns (lo, mid, top, hi) with lo <= mid <= top <= hi.
    """
    n = rules.length
    lo = 0
    hi = n
    full_lo = 0
    full_hi = n
    if C.block > 0:
        lo = p0 // C.block * C.block
        hi = tl.minimum(tl.cdiv(p1, C.block) * C.block, n)
        full_lo = lo
        full_hi = tl.where(hi - lo <= C.block, hi, lo)
    elif C.rules:
        if C.causal:
            hi = tl.minimum(p1, n)
            full_hi = tl.minimum(p0, rules.first_target)
        elif C.targets:
            full_hi = tl.where(p1 <= rules.first_target, n, rules.first_target)
        if C.window:
            r0 = rank(p0, rules, C)
            r1 = rank(p1 - 1, rules, C)
            lo = below(r0 - rules.window, rules, C)
            full_lo = below(r1 - rules.window, rules, C)
            if not C.causal:
                hi = below(r1 + rules.window + 1, rules, C)
                full_hi = tl.minimum(full_hi, below(r0 + rules.window + 1, rules, C))
            if C.min_full:
                lifted = r1 >= rules.top - rules.min_full
                lo = tl.where(lifted, 0, lo)
                if not C.causal:
                    hi = tl.where(lifted, n, hi)
        if C.context:
            lo = tl.where(p0 < rules.context, 0, lo)
            hi = tl.where(p0 < rules.context, tl.maximum(hi, rules.first_target), hi)
    return block_range(lo, full_lo, full_hi, hi, n, C.block_n, C.masked_tail)


@triton.jit
def block_range(lo, full_lo, full_hi, hi, n, BLOCK: tl.constexpr, MASKED_TAIL: tl.constexpr):
    """Round a visited range outwards and its full part inwards; a full part that ends at n may include the tail."""
    lo = lo // BLOCK * BLOCK
    hi = tl.maximum(tl.cdiv(hi, BLOCK) * BLOCK, lo)
    mid = tl.minimum(tl.maximum(tl.cdiv(full_lo, BLOCK) * BLOCK, lo), hi)
    top = full_hi // BLOCK * BLOCK
    if not MASKED_TAIL:
        top = tl.where(full_hi >= n, hi, top)
    top = tl.minimum(tl.maximum(top, mid), hi)
    return lo, mid, top, hi


@triton.jit
def row_range(n0, n1, rules, C: tl.constexpr):
    """Query rows for column positions n0..n1, as in `key_range`, in rows of q (not positions), multiples of block_m.

    Returns (early, lo, mid, top, hi): besides lo..hi, rows 0..early (context rows, which see all history) are visited.
    """
    n = rules.length
    lo = 0
    hi = n
    full_lo = 0
    full_hi = n
    early = 0
    if C.block > 0:
        lo = n0 // C.block * C.block
        hi = tl.minimum(tl.cdiv(n1, C.block) * C.block, n)
        full_lo = lo
        full_hi = tl.where(hi - lo <= C.block, hi, lo)
    elif C.rules:
        if C.causal:
            lo = n0
            full_lo = tl.where(n1 <= rules.first_target, n1, n)
            if C.targets:
                last = n1
                if C.grouped:
                    last = rules.first_target + tl.cdiv(n1 - rules.first_target, rules.group) * rules.group
                hi = tl.where(n0 >= rules.first_target, tl.minimum(last, n), n)
        elif C.targets:
            full_hi = tl.where(n1 <= rules.first_target, n, rules.first_target)
        if C.window:
            r0 = rank(n0, rules, C)
            r1 = rank(n1 - 1, rules, C)
            reach = below(r1 + rules.window + 1, rules, C)
            if C.min_full:
                reach = n
            hi = tl.minimum(hi, reach)
            full_hi = tl.minimum(full_hi, below(r0 + rules.window + 1, rules, C))
            if not C.causal:
                lo = below(r0 - rules.window, rules, C)
                full_lo = tl.maximum(full_lo, below(r1 - rules.window, rules, C))
        if C.context:
            early = tl.where(n0 < rules.first_target, tl.minimum(rules.context, lo), 0)
    shift = rules.first_position
    lo = tl.maximum(lo - shift, 0)
    hi = tl.maximum(hi - shift, 0)
    early = tl.maximum(early - shift, 0)
    lo, mid, top, hi = block_range(lo, full_lo - shift, full_hi - shift, hi, n - shift, C.block_m, False)
    early = tl.minimum(tl.cdiv(early, C.block_m) * C.block_m, lo)
    return early, lo, mid, top, hi


# ------------------------------------------------------------------------------------------------ one sample


class Rules(NamedTuple):
    """One sample's run-time mask numbers. length: keys; shift: 1 when there is context; top: the targets' rank R."""

    length: tl.tensor
    context: tl.tensor
    shift: tl.tensor
    first_target: tl.tensor
    top: tl.tensor
    first_position: tl.tensor
    window: tl.tensor
    min_full: tl.tensor
    group: tl.tensor


@triton.jit
def sample_rules(q_length, k_length, targets, context, numbers, C: tl.constexpr):
    """Mask numbers of one sample."""
    shift = 0
    first_target = k_length
    if C.context:
        shift = tl.where(context > 0, 1, 0)
    if C.targets:
        first_target = k_length - targets
    first_position = 0
    if C.query == "tail":
        first_position = k_length - q_length
    top = first_target - context + shift
    return Rules(k_length, context, shift, first_target, top, first_position, numbers.window, numbers.min_full,
                 numbers.group)  # fmt: skip


class Sample(NamedTuple):
    """Where one sample's rows are: first rows (of q, of the output, of k) and lengths; and its mask numbers."""

    q_start: tl.tensor
    out_start: tl.tensor
    k_start: tl.tensor
    q_length: tl.tensor
    k_length: tl.tensor
    targets: tl.tensor
    context: tl.tensor


@triton.jit
def read_tile(tiles, entry, batch, C: tl.constexpr):
    """(sample or -1, first row of the tile, Sample) of one record of `triton_tiles`; all reads are independent."""
    at = tiles + 8 * entry.to(tl.int64)
    b = tl.load(at)
    row = tl.load(at + 1)
    q_start = tl.load(at + 2)
    q_length = tl.load(at + 3)
    k_start = tl.load(at + 4)
    k_length = tl.load(at + 5)
    targets = 0
    if C.targets:
        targets = tl.load(at + 6)
    context = 0
    if C.context:
        context = tl.load(at + 7)
    out_start = q_start
    if C.query == "broadcast":
        out_start = b * batch.seeds
    return b, row, Sample(q_start, out_start, k_start, q_length, k_length, targets, context)


@triton.jit
def read_sample(b, batch, C: tl.constexpr):
    """The Sample b, through the offsets; only for query kinds without mask rules."""
    row = b
    if C.shared_kv:
        row = tl.load(batch.kv_index + b).to(tl.int32)
    k_start, k_length = sequence(batch.k_offsets, row)
    if C.query == "broadcast":
        q_start = k_start * 0
        q_length = k_length * 0 + batch.seeds
        out_start = q_start + b * batch.seeds
    else:
        q_start, q_length = sequence(batch.q_offsets, b)
        out_start = q_start
    return Sample(q_start, out_start, k_start, q_length, k_length, 0, 0)
