"""A kernel for test_triton_interpreter: what tiles of 128 rows and their halves visit. Imported by its child only."""

import triton
import triton.language as tl
from gem_attention.triton_common import key_range, sample_rules


@triton.jit
def ranges(out, length, targets, context, numbers, C: tl.constexpr):
    """(lo, mid, top, hi) of tile number program_id, of its first half, of its second."""
    at = out + 12 * tl.program_id(0)
    rules = sample_rules(length, length, targets, context, numbers, C)
    m0 = tl.program_id(0) * 128
    for part in tl.static_range(3):
        p0 = m0 + 64 * (part == 2)
        p1 = tl.minimum(m0 + 128 - 64 * (part == 1), length)
        lo, mid, top, hi = key_range(p0, p1, rules, C)
        tl.store(at + 4 * part, lo)
        tl.store(at + 4 * part + 1, mid)
        tl.store(at + 4 * part + 2, top)
        tl.store(at + 4 * part + 3, hi)
