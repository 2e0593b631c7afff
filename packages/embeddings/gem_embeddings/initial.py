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


def initial_values(spec: TableSpec, rows_U: Tensor, *, seed: int) -> Tensor:
    """Start values of some rows, (U, dim) float32 on CPU. Cost: their blocks of BLOCK_ROWS are drawn whole."""
    rows_U = rows_U.cpu()
    values_UD = torch.empty(rows_U.numel(), spec.dim)
    for block in (rows_U // BLOCK_ROWS).unique().tolist():
        first = block * BLOCK_ROWS
        inside = (rows_U >= first) & (rows_U < first + BLOCK_ROWS)
        last = int(rows_U[inside].max()) + 1
        values_UD[inside] = initial_rows(spec, seed=seed, start=first, stop=last)[rows_U[inside] - first]
    return values_UD


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
