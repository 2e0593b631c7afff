"""The only file that knows model and processes at once: places the dense model and the tables on the ranks.

Dense: every rank holds the whole model; DistributedDataParallel averages its gradients. `find_unused_parameters` is
on for two reasons: a rank whose rows have no events may not touch every parameter, and without it the first backward
reorders DDP's buckets, so that a resumed run would sum in another order than the run that went through. It costs one
walk of the graph a step. Tables: TorchRec spreads them over the same group.

At one process DDP is left out: there is nothing to average.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from gem_embeddings.api import build_tables
from gem_embeddings.interface import RowWiseAdagrad, Tables, TableSpec
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gem_pipelines.config import TablesConfig
from gem_pipelines.errors import RunError
from gem_pipelines.model.inputs import ModelInput
from gem_pipelines.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """The placed model.

    module   the bare dense model: names and values for checkpoints, parts for timing
    forward  what the step calls: `module`, or its data-parallel wrapper
    tables   the embedding tables
    specs    their shapes
    """

    module: nn.Module
    forward: nn.Module
    tables: Tables
    specs: tuple[TableSpec, ...]

    def __call__(self, inputs: ModelInput) -> Tensor:
        """Logits (B, T)."""
        logits: Tensor = self.forward(inputs)
        return logits

    @contextmanager
    def accumulating(self, *, more_to_come: bool) -> Iterator[None]:
        """Inside, backward adds to the dense gradients; ranks exchange them only when no more batch is to come."""
        holds_back = more_to_come and isinstance(self.forward, DistributedDataParallel)
        with self.forward.no_sync() if holds_back else nullcontext():
            yield


class _WithAnchor(nn.Module):
    """`model`, and a parameter that nothing uses: without one, `find_unused_parameters` makes every rank warn on every
    run that it found none, although it is asked for what it does to the order of sums."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.anchor = nn.Parameter(torch.zeros((), device=next(model.parameters()).device))

    def forward(self, inputs: ModelInput) -> Tensor:
        logits: Tensor = self.model(inputs)
        return logits


def parallelize(
    model: nn.Module, specs: Sequence[TableSpec], *, config: TablesConfig, seed: int, runtime: Runtime
) -> ParallelModel:
    """Move `model` to the device, build the tables, and wrap what more than one process needs."""
    if config.impl == "reference" and runtime.world_size > 1:
        raise RunError(f"tables.impl is 'reference', which runs in one process; this run has {runtime.world_size}")
    model = model.to(runtime.device)
    tables = build_tables(
        specs,
        optimizer=RowWiseAdagrad(lr=config.lr, eps=config.eps),
        seed=seed,
        process_group=dist.group.WORLD,
        device=runtime.device,
        impl=config.impl,
    )
    forward: nn.Module = model
    if runtime.world_size > 1:
        forward = DistributedDataParallel(_WithAnchor(model), find_unused_parameters=True, gradient_as_bucket_view=True)
    return ParallelModel(module=model, forward=forward, tables=tables, specs=tuple(specs))


def parameter_counts(parallel: ParallelModel) -> dict[str, int]:
    """{"dense": n, "tables": n}."""
    dense = sum(parameter.numel() for parameter in parallel.module.parameters())
    return {"dense": dense, "tables": sum(spec.rows * spec.dim for spec in parallel.specs)}


def seed_everything(seed: int, *, rank: int) -> None:
    """Seed the generators of this process; each rank draws its own numbers (dropout)."""
    import random

    import numpy as np

    torch.manual_seed(seed * 1_000_003 + rank)
    np.random.seed((seed * 1_000_003 + rank) % 2**32)
    random.seed(seed * 1_000_003 + rank)
