"""Which tile each program works on: a list made on the device from the offsets, longest sequences first.

Sequences differ in length, so a grid of (longest length, samples) would be mostly empty. Instead one small kernel lists
the tiles that exist, all tiles of a sequence together (they read the same keys, which then stay in the L2 cache), the
sequences with most work per tile first, and within a sequence the last tile first (under a causal mask it has most
work). The hardware starts programs in that order, so the short ones fill the gaps at the end: that is longest-first
scheduling without a counter. No value travels to the host: the list has room for rows // block + samples tiles, the
unused end holds sample -1, and programs that find it return.

Cost: one launch. Each program ranks its sequence by comparing it with all others, B^2 comparisons, about 5 us at
B = 2048; above RANKED_LIMIT samples the list keeps the batch's order instead and takes a prefix sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

RANKED_LIMIT = 16384
_CHUNK = 1024


@triton.jit
def tile_list_kernel(rows_offsets, work_offsets, starts, tiles, batch, room, BLOCK: tl.constexpr, RANKED: tl.constexpr,
                     CHUNK: tl.constexpr):  # fmt: skip
    b = tl.program_id(0)
    begin = tl.load(rows_offsets + b)
    mine = tl.cdiv((tl.load(rows_offsets + b + 1) - begin).to(tl.int32), BLOCK)
    first = 0
    total = 0
    if RANKED:
        work = (tl.load(work_offsets + b + 1) - tl.load(work_offsets + b)).to(tl.int32)
        for at in range(0, batch, CHUNK):
            i = at + tl.arange(0, CHUNK)
            inside = i < batch
            lo = tl.load(rows_offsets + i, mask=inside, other=0)
            hi = tl.load(rows_offsets + i + 1, mask=inside, other=0)
            count = tl.cdiv((hi - lo).to(tl.int32), BLOCK)
            w_lo = tl.load(work_offsets + i, mask=inside, other=0)
            w_hi = tl.load(work_offsets + i + 1, mask=inside, other=0)
            other_work = (w_hi - w_lo).to(tl.int32)
            before = (other_work > work) | ((other_work == work) & (i < b))
            first += tl.sum(tl.where(before & inside, count, 0))
            total += tl.sum(count)
    else:
        first = tl.load(starts + b).to(tl.int32)
        total = tl.load(starts + batch).to(tl.int32)
    t = tl.arange(0, CHUNK)
    for at in range(0, mine, CHUNK):
        inside = at + t < mine
        tl.store(tiles + 2 * (first + at + t), t * 0 + b, mask=inside)
        tl.store(tiles + 2 * (first + at + t) + 1, mine - 1 - at - t, mask=inside)
    if b == 0:
        for at in range(0, room - total, CHUNK):
            tl.store(tiles + 2 * (total + at + t), t * 0 - 1, mask=total + at + t < room)


def tile_list(rows_offsets: Tensor, work_offsets: Tensor, rows: int, block: int) -> Tensor:
    """(room, 2) int32 pairs (sample, tile), most work first; the end is padded with sample -1.

    rows_offsets (B + 1,): the rows that are cut into tiles of `block`. work_offsets (B + 1,): the lengths to order by.
    rows: rows_offsets[-1] as a host number.

    Example: lengths 2, 0, 5 and block 4 give (2, 1), (2, 0), (0, 0), (-1, *), (-1, *): room is 7 // 4 + 3 + 1.
    """
    batch = rows_offsets.shape[0] - 1
    room = rows // block + batch + 1
    tiles = torch.empty(room, 2, dtype=torch.int32, device=rows_offsets.device)
    if batch == 0:
        return tiles.fill_(-1)
    ranked = batch <= RANKED_LIMIT
    starts = None
    if not ranked:
        counts = (rows_offsets.diff() + (block - 1)) // block
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    tile_list_kernel[(batch,)](
        rows_offsets, work_offsets, starts, tiles, batch, room, BLOCK=block, RANKED=ranked, CHUNK=_CHUNK, num_warps=4
    )
    return tiles
