"""The parts of tables that FBGEMM holds on this rank, found in a sharded TorchRec model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTable:
    """Consecutive rows of one table, in FBGEMM's memory.

    name    of the table
    start   first row of the table that is here
    weight  (rows, dim), shares memory with FBGEMM; writing to it is invisible to autograd's version check, since what
            FBGEMM saved for backward is this memory and not its values
    kernel  FBGEMM's module, which may hold several tables; index: which of them
    """

    name: str
    start: int
    weight: Tensor
    kernel: Any
    index: int

    def fused_momentum(self) -> Tensor:
        """(rows,), shares memory with FBGEMM; only where FBGEMM makes the whole row-wise AdaGrad step."""
        (momentum,) = self.kernel.split_optimizer_states()[self.index]
        assert isinstance(momentum, Tensor)
        return momentum.detach().data.view(self.weight.shape[0])


def find_local_tables(model: nn.Module) -> list[LocalTable]:
    """All of them, in the order of modules: the same on every rank that holds the same parts."""
    from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding, BaseBatchedEmbeddingBag

    found = []
    for sharded in model.modules():
        # A sharded collection keeps its lookups in a plain list, so that their parameters are listed once.
        for module in (inner for lookup in getattr(sharded, "_lookups", ()) for inner in lookup.modules()):
            if isinstance(module, BaseBatchedEmbedding | BaseBatchedEmbeddingBag):
                found += _tables_of(module)
    return found


def _tables_of(module: Any) -> list[LocalTable]:
    tables = []
    kernel, weights = module.emb_module, module.emb_module.split_embedding_weights()
    for index, (table, weight) in enumerate(zip(module.config.embedding_tables, weights, strict=True)):
        assert weight.dtype == torch.float32, (table.name, weight.dtype)
        start = 0 if table.local_metadata is None else int(table.local_metadata.shard_offsets[0])
        tables.append(LocalTable(name=table.name, start=start, weight=weight.data, kernel=kernel, index=index))
    return tables
