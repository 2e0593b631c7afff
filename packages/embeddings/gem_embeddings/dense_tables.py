"""Tables that every rank of a copy holds whole ("data_parallel"): TorchRec's dense kernel, and the step that it lacks.

TorchRec looks such tables up without any exchange and gives their parameter a dense gradient, which
DistributedDataParallel averages; the step is left to a dense optimizer of the user's. Ours is row-wise AdaGrad on that
gradient, row by row: the same mathematics as FBGEMM's fused step, since gradients of equal ids were summed in the dense
gradient, and a row without gradient stays as it is. It is made late, when the table is needed again (lookup, state,
another learning rate), so that it cannot come before the all-reduce at the end of backward.

On a CPU FBGEMM's dense kernel (1.8) pools where it should give one vector an id; its output is replaced by indexing.

Cost: an all-reduce, and a step, of the whole table, whatever was touched: for small tables, whose lookups it makes
local. Not with copies: TorchRec (1.8) sends the start values from rank 0 of the job, which other copies do not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gem_embeddings.distribute import modules_of
from gem_embeddings.interface import RowWiseAdagrad
from gem_embeddings.rowwise import step_all_


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseTable:
    """weight (rows, dim) shares memory with the kernel's parameter; momentum (rows,) is ours."""

    name: str
    weight: Tensor
    momentum: Tensor
    kernel: Any

    def gradient(self) -> Tensor | None:
        grad = self.kernel.weights.grad
        if grad is None:
            return None
        first = self.weight.storage_offset()
        part: Tensor = grad.view(-1)[first : first + self.weight.numel()].view_as(self.weight)
        return part


class DenseTables:
    """All of them on this rank."""

    def __init__(self, model: nn.Module, optimizer: RowWiseAdagrad) -> None:
        self.tables = _find(model)
        self._lr, self._eps = optimizer.lr, optimizer.eps

    def finish(self) -> None:
        """Make the step of the last backward, if there was one."""
        for table in self.tables:
            grad = table.gradient()
            if grad is not None:
                step_all_(table.weight, table.momentum, grad, lr=self._lr, eps=self._eps)
        for table in self.tables:
            table.kernel.weights.grad = None

    def set_learning_rate(self, lr: float) -> None:
        self.finish()
        self._lr = lr


def _index_rows(features: tuple[int, ...], kernel: Any, args: Any, kwargs: dict[str, Any], pooled: Tensor) -> Tensor:
    """(N, dim), a vector an id, in the order of features (their tables' numbers); `pooled` is dropped."""
    indices_N, offsets = kwargs["indices"], kwargs["offsets"]
    bounds = offsets[:: (offsets.numel() - 1) // len(features)].tolist()
    found = []
    for number, table in enumerate(features):
        rows, dim = kernel.embedding_specs[table]
        first = int(kernel.weights_physical_offsets[table])
        weight_RD = kernel.weights[first : first + rows * dim].view(rows, dim)
        found.append(weight_RD[indices_N[bounds[number] : bounds[number + 1]]])
    return torch.cat(found)


def _find(model: nn.Module) -> Sequence[DenseTable]:
    from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding, BatchedDenseEmbeddingBag

    found = []
    for module in (inner for sharded in model.modules() for inner in modules_of(sharded)):
        if isinstance(module, BatchedDenseEmbedding | BatchedDenseEmbeddingBag):
            weights = module.emb_module.split_embedding_weights()
            if isinstance(module, BatchedDenseEmbedding) and weights[0].device.type == "cpu":
                module.emb_module.register_forward_hook(
                    partial(_index_rows, tuple(module._feature_table_map)), with_kwargs=True
                )
            for table, weight in zip(module.config.embedding_tables, weights, strict=True):
                found.append(
                    DenseTable(
                        name=table.name,
                        weight=weight.detach(),
                        momentum=weight.detach().new_zeros(weight.shape[0]),
                        kernel=module.emb_module,
                    )
                )
    return tuple(found)
