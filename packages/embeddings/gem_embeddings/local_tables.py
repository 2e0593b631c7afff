"""The parts of tables that FBGEMM holds on this rank, found in a sharded TorchRec model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gem_embeddings.distribute import modules_of


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTable:
    """A block of one table, in FBGEMM's memory.

    name    of the table
    start   first row of the table that is here; column: first column
    weight  (rows, columns), shares memory with FBGEMM; writing to it is invisible to autograd's version check, since
            what FBGEMM saved for backward is this memory and not its values
    kernel  FBGEMM's module, which may hold several tables; index: which of them
    """

    name: str
    start: int
    column: int
    weight: Tensor
    kernel: Any
    index: int

    @property
    def block(self) -> tuple[slice, slice]:
        """Rows and columns of the table that are here."""
        rows, columns = self.weight.shape
        return slice(self.start, self.start + rows), slice(self.column, self.column + columns)

    @property
    def part(self) -> int:
        """Which of the table's column parts, which are equally wide."""
        return self.column // self.weight.shape[1]

    def moments_of(self, whole: Tensor) -> Tensor:
        """This block's moments in (rows,) or (rows, parts) moments of the whole table; a view."""
        rows = self.block[0]
        return whole[rows] if whole.ndim == 1 else whole[rows, self.part]

    def fused_momentum(self) -> Tensor:
        """(rows,), shares memory with FBGEMM; only where FBGEMM makes the whole row-wise AdaGrad step."""
        (momentum,) = self.kernel.split_optimizer_states()[self.index]
        assert isinstance(momentum, Tensor)
        return momentum.detach().data.view(self.weight.shape[0])


def find_local_tables(model: nn.Module) -> list[LocalTable]:
    """All of them, in the order of modules: the same on every rank that holds the same parts."""
    from torchrec.distributed.batched_embedding_kernel import (
        BaseBatchedEmbedding,
        BaseBatchedEmbeddingBag,
        BatchedDenseEmbedding,
        BatchedDenseEmbeddingBag,
    )

    found = []
    for module in (inner for sharded in model.modules() for inner in modules_of(sharded)):
        dense = isinstance(module, BatchedDenseEmbedding | BatchedDenseEmbeddingBag)  # see dense_tables.py
        if isinstance(module, BaseBatchedEmbedding | BaseBatchedEmbeddingBag) and not dense:
            found += _tables_of(module)
    return found


def _tables_of(module: Any) -> list[LocalTable]:
    tables = []
    kernel, weights = module.emb_module, module.emb_module.split_embedding_weights()
    for index, (table, weight) in enumerate(zip(module.config.embedding_tables, weights, strict=True)):
        assert weight.dtype == torch.float32, (table.name, weight.dtype)
        start, column = (0, 0) if table.local_metadata is None else map(int, table.local_metadata.shard_offsets)
        tables.append(
            LocalTable(name=table.name, start=start, column=column, weight=weight.data, kernel=kernel, index=index)
        )
    return tables
