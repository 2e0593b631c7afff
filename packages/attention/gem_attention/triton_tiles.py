"""Which tile each program works on: a list made on the device from the offsets, longest sequences first.

Sequences differ in length, so a grid of (longest length, samples) would be mostly empty. Instead one small kernel lists
the tiles that exist, all tiles of a sequence together (they read the same keys, which then stay in the L2 cache), and
the sequences with most work per tile first. The hardware starts programs in that order, so the short ones fill the gaps
at the end: longest-first scheduling without a counter. No value travels to the host: the list has room for rows //
block + samples tiles, the unused end holds sample -1, and programs that find it return.

An entry is a record of 8 numbers, everything a program must know before its first load of q: found through the offsets
this would be three dependent reads of memory, about 2 us of a tile that takes 5 to 10.

Within a sequence the last tile comes first (under a causal mask it has most work). A persistent kernel that is dealt
entries in turn wants equal portions instead: `paired` lists tiles as last, first, last but one, second, ..., so that
two neighbours together always have the same work; a sequence with an odd number of tiles gets an empty partner.

Cost: one launch. Each program ranks its sequence by comparing it with all others, B^2 comparisons, about 5 us at B =
2048; above RANKED_LIMIT samples the list keeps the batch's order instead and takes a prefix sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

RANKED_LIMIT = 16384
RECORD = 8  # sample, first row of the tile, q start, q length, k start, k length, targets, context
_CHUNK = 1024


class Sequences(NamedTuple):
    """The batch as the list reads it. seeds > 0: broadcast queries, the same rows 0..seeds for each sample."""

    q_offsets: Tensor | None
    k_offsets: Tensor
    num_targets: Tensor | None
    num_context: Tensor | None
    kv_index: Tensor | None
    seeds: int


@triton.jit
def _length(offsets, i, mask):
    lo = tl.load(offsets + i, mask=mask, other=0)
    return (tl.load(offsets + i + 1, mask=mask, other=0) - lo).to(tl.int32)


@triton.jit
def _slots(length, BLOCK: tl.constexpr, PAIRED: tl.constexpr):
    count = tl.cdiv(length, BLOCK)
    if PAIRED:
        count = (count + 1) // 2 * 2
    return count


@triton.jit(do_not_specialize=["size", "room"])
def tile_list_kernel(tiles, rows_offsets, work_offsets, starts, sequences, size, room, BLOCK: tl.constexpr,
                     KEYS: tl.constexpr, PAIRED: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Program b writes the records of sample (KEYS: kv row) b; program 0 also ends the list."""
    b = tl.program_id(0)
    length = _length(rows_offsets, b, True)
    count = tl.cdiv(length, BLOCK)
    slots = _slots(length, BLOCK, PAIRED)
    first = 0
    total = 0
    if starts is None:
        work = _length(work_offsets, b, True)
        for at in range(0, size, CHUNK):
            i = at + tl.arange(0, CHUNK)
            inside = i < size
            theirs = _slots(_length(rows_offsets, i, inside), BLOCK, PAIRED)
            other = _length(work_offsets, i, inside)
            before = ((other > work) | ((other == work) & (i < b))) & inside
            first += tl.sum(tl.where(before, theirs, 0))
            total += tl.sum(theirs)
    else:
        first = tl.load(starts + b).to(tl.int32)
        total = tl.load(starts + size).to(tl.int32)

    q_start = 0
    q_length = sequences.seeds
    if sequences.q_offsets is not None and not (KEYS and sequences.kv_index is not None):
        q_start = tl.load(sequences.q_offsets + b).to(tl.int32)
        q_length = _length(sequences.q_offsets, b, True)
    row = b
    if sequences.kv_index is not None and not KEYS:
        row = tl.load(sequences.kv_index + b).to(tl.int32)
    k_start = tl.load(sequences.k_offsets + row).to(tl.int32)
    k_length = _length(sequences.k_offsets, row, True)
    targets = 0
    if sequences.num_targets is not None:
        targets = tl.load(sequences.num_targets + b).to(tl.int32)
    context = 0
    if sequences.num_context is not None:
        context = tl.load(sequences.num_context + b).to(tl.int32)

    t = tl.arange(0, CHUNK)
    for at in range(0, slots, CHUNK):
        slot = at + t
        inside = slot < slots
        to = tiles + 8 * (first + slot).to(tl.int64)
        if PAIRED:
            tile = tl.where(slot % 2 == 0, count - 1 - slot // 2, slot // 2)
        else:
            tile = count - 1 - slot
        zero = slot * 0
        tl.store(to, tl.where(slot < count, b, -1), mask=inside)
        tl.store(to + 1, tile * BLOCK, mask=inside)
        tl.store(to + 2, zero + q_start, mask=inside)
        tl.store(to + 3, zero + q_length, mask=inside)
        tl.store(to + 4, zero + k_start, mask=inside)
        tl.store(to + 5, zero + k_length, mask=inside)
        tl.store(to + 6, zero + targets, mask=inside)
        tl.store(to + 7, zero + context, mask=inside)
    if b == 0:
        for at in range(0, room - total, CHUNK):
            slot = total + at + t
            tl.store(tiles + 8 * slot.to(tl.int64), t * 0 - 1, mask=slot < room)


def tile_list(
    sequences: Sequences,
    *,
    rows_offsets: Tensor,
    work_offsets: Tensor,
    rows: int,
    block: int,
    keys: bool = False,
    paired: bool = False,
) -> Tensor:
    """(room, 8) int32 records, most work first; unused entries have sample -1.

    rows_offsets (B + 1,): the rows that are cut into tiles of `block`. work_offsets (B + 1,): the lengths to order by.
    rows: rows_offsets[-1] as a host number. keys: the rows are those of k, else of q. paired: see the module.

    Example: lengths 2, 0, 5 and block 4 give tiles (2, 4), (2, 0), (0, 0), then -1, -1: room is 7 // 4 + 3 + 1.
    """
    size = rows_offsets.shape[0] - 1
    room = rows // block + size + 1
    if paired:
        room = (room + size + 1) // 2 * 2
    tiles = torch.empty(room, RECORD, dtype=torch.int32, device=rows_offsets.device)
    if size == 0:
        return tiles.fill_(-1)
    starts = None
    if size > RANKED_LIMIT:
        slots = (rows_offsets.diff() + (block - 1)) // block
        slots = (slots + 1) // 2 * 2 if paired else slots
        starts = torch.nn.functional.pad(slots.cumsum(0), (1, 0))
    tile_list_kernel[(size,)](
        tiles,
        rows_offsets,
        work_offsets,
        starts,
        sequences,
        size,
        room,
        BLOCK=block,
        KEYS=keys,
        PAIRED=paired,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    return tiles
