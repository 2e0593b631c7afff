"""Copies that make their own steps and are averaged: what 2D sparse parallelism does (arXiv 2508.03854).

Copy m of M sees the mean gradient g_m of its own 1 / M of the batch; the gradient of the whole batch is g = mean(g_m).
Every `every` backwards, weights and second moments of all copies are replaced by their means.

**Moment scaling.** Gradients of a batch M times smaller are noisier: where noise dominates, E[g_m^2] = M E[g^2].
(Plainly so for a row that only one copy meets in a step: its g_m is M g.) The averaged moment therefore grows M times
as fast as that of one process, and steps shrink by sqrt(M), as if the learning rate fell. Row-wise AdaGrad with the
moment divided by M undoes it:

    lr * g / (sqrt(v / M) + eps)  =  lr * sqrt(M) * g / (sqrt(v) + eps * sqrt(M))

that is, exactly the ordinary fused optimizer with lr' = lr * sqrt(M), eps' = eps * sqrt(M). State in checkpoints is
v / M, in the units of one process, so that a run goes on with another number of copies.

**What is equal to one process, at every = 1, with scaling** (tests/embeddings/test_copies.py):
- the step is linear in the gradient while moments stand still: then the mean of the steps is the step of the mean, and
  weights are those of one process, whatever gradients are;
- a row that one copy meets: after averaging v / M has grown by g^2, exactly as in one process; its step was made with
  v / M + M g^2 instead of v / M + g^2, so it is sqrt((v + g^2) / (v + M g^2)) of that of one process (v in units of one
  process): between 1 / sqrt(M) and 1, and 1 once the row has seen many more than M gradients;
- a row that all copies meet with the same gradient: v / M grows by g^2 / M only: up to sqrt(M) too large a step.
  Scaling is right where noise dominates, as for ids that are rare in a batch, and too bold for ids in every row.
Otherwise it is another model. "gradients" is the exact way; this one sends 1 / every of the bytes.

Cost: one all-reduce of weights and moments every `every` backwards, in blocks of BLOCK_BYTES.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from gem_embeddings.copies import Copies, set_kernel_rate
from gem_embeddings.interface import Exchange, Replicas, RowWiseAdagrad
from gem_embeddings.local_tables import LocalTable

BLOCK_BYTES = 64 << 20


def moment_scale(replicas: Replicas) -> float:
    """c: the second moment is divided by it."""
    return float(replicas.exchange.size) if replicas.moment_scaling else 1.0


def scaled_optimizer(optimizer: RowWiseAdagrad, replicas: Replicas | None) -> RowWiseAdagrad:
    """The ordinary optimizer that equals row-wise AdaGrad with its second moment divided by the number of copies.

    Example: lr 0.1, eps 0.01, 4 copies: lr 0.2, eps 0.02.
    """
    if replicas is None or replicas.sync != "average":
        return optimizer
    root = math.sqrt(moment_scale(replicas))
    return RowWiseAdagrad(lr=optimizer.lr * root, eps=optimizer.eps * root)


class AveragedCopies(Copies):
    """Whole copies. `state` averages first: what is saved is what training goes on with."""

    def __init__(self, tables: Sequence[LocalTable], optimizer: RowWiseAdagrad, replicas: Replicas) -> None:
        super().__init__(tables, optimizer)
        self._exchange, self._every, self._scale = replicas.exchange, replicas.every, moment_scale(replicas)
        self._since = 0

    def after_update(self) -> None:
        self._since += 1
        if self._since >= self._every:
            self.average()

    def average(self) -> None:
        """Replace weights and moments by their means over the copies."""
        self._since = 0
        for table in self.tables:
            for part in (table.weight, table.fused_momentum()):
                for block in blocks(part):
                    block.copy_(mean(block, self._exchange))

    def set_learning_rate(self, lr: float) -> None:
        set_kernel_rate(self.tables, lr * math.sqrt(self._scale))

    def copied(self) -> list[tuple[Tensor, Tensor]]:
        return [] if self._since else [(table.weight, table.fused_momentum()) for table in self.tables]

    def held(self) -> list[tuple[Tensor, Tensor, int]]:
        return [(table.weight, table.fused_momentum(), 0) for table in self.tables]

    def state(self) -> list[tuple[Tensor, Tensor]]:
        if self._since:
            self.average()
        return [(table.weight, table.fused_momentum() / self._scale) for table in self.tables]

    def load(self, state: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._since = 0
        for table, (weight, momentum) in zip(self.tables, state, strict=True):
            table.weight.copy_(weight)
            table.fused_momentum().copy_(momentum * self._scale)


def blocks(part: Tensor) -> Iterator[Tensor]:
    """Views of whole rows of at most BLOCK_BYTES (and at least one row)."""
    if part.numel() == 0:
        return
    rows = max(1, BLOCK_BYTES // (part[0].numel() * part.element_size()))
    yield from part.split(rows)


def mean(part: Tensor, exchange: Exchange) -> Tensor:
    """The mean over the copies, the same bits on each."""
    return exchange.all_reduce(part) / exchange.size
