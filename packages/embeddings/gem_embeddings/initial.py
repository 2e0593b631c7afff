"""Start values of a table: the same numbers under every sharding, world size and implementation.

A table is drawn in blocks of BLOCK_ROWS rows, each from its own generator seeded by (seed, table name, block). A rank
thus draws only the blocks that its shard touches, and never holds a whole table that it does not own.
Cost: at most one block more than needed at either end of a shard.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from gem_embeddings.interface import TableSpec

BLOCK_ROWS = 65_536


def initial_rows(spec: TableSpec, *, seed: int, start: int, stop: int) -> Tensor:
    """Rows start:stop of the table's start values, (stop - start, dim) float32, normal(0, init_std), on CPU.

    Example: rows 2:5 of a table equal rows 0:10 of the same table and seed, cut to [2:5].
    """
    assert 0 <= start <= stop <= spec.rows, (spec.name, start, stop)
    rows_ND = torch.empty(stop - start, spec.dim)
    for block in range(start // BLOCK_ROWS, (stop + BLOCK_ROWS - 1) // BLOCK_ROWS):
        first = block * BLOCK_ROWS
        block_ND = torch.randn(
            min(BLOCK_ROWS, spec.rows - first), spec.dim, generator=_generator(seed, spec.name, block)
        )
        low, high = max(start, first), min(stop, first + block_ND.shape[0])
        rows_ND[low - start : high - start] = block_ND[low - first : high - first]
    return rows_ND.mul_(spec.init_std)


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
