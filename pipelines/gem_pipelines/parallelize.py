"""The only file that knows model and processes at once: places the dense model and the tables on the ranks.

Dense, whole on every rank (expert and shard 1): DistributedDataParallel averages its gradients, bucket by bucket while
backward computes the rest. DDP lays out its buckets after the first backward, in the order in which gradients came;
a resumed run would then sum in another order than the run that went through. So it sees one backward of zeros first, in
an order that does not depend on data. Its search for unused parameters is off, for it makes the host walk the graph and
wait for the device at every step: the models give every parameter a gradient on every batch, also where no row has
events (tests/pipelines/test_parallel.py). At one process DDP is left out: there is nothing to average.

Dense, cut (expert or shard > 1): experts first (parallel_experts.py), then FSDP2 (parallel_dense.py).

Tables: TorchRec spreads a copy over the `table_shard` ranks; the copies meet over `table_replica` through gem_comm.
The model is made whole on every rank's CPU first, from one seed, so that start values do not depend on the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from gem_comm.api import make_collectives, read_topology
from gem_comm.interface import Meshes
from gem_embeddings.api import build_tables, rows_suffice
from gem_embeddings.interface import ManagedIds, PlannerInputs, Replicas, RowWiseAdagrad, Tables, TableSpec
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from gem_pipelines.config import ParallelConfig, TablesConfig
from gem_pipelines.errors import ConfigError, RunError, did_you_mean
from gem_pipelines.model.inputs import ModelInput
from gem_pipelines.parallel_compile import compile_parts
from gem_pipelines.parallel_dense import (
    Placement,
    ShardedParameters,
    WholeParameters,
    load_whole,
    shard_parameters,
)
from gem_pipelines.parallel_experts import ExpertGroup, experts_in, place_experts
from gem_pipelines.parallel_graphs import graph_parts
from gem_pipelines.parallel_mesh import make_meshes
from gem_pipelines.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """The placed model.

    module   the bare dense model: its parts for timing, this rank's parameters
    forward  what the step calls: `module`, or its data-parallel wrapper
    tables   the embedding tables
    specs    their shapes
    placement       where the parts of the dense parameters are
    dense_expected  canonical name of every tensor of the whole dense model -> shape and dtype
    meshes  process groups by axis; None where the world is the only group
    policies  feature -> what happens to ids outside its table, where it is not an error
    """

    module: nn.Module
    forward: nn.Module
    tables: Tables
    specs: tuple[TableSpec, ...]
    placement: Placement
    dense_expected: dict[str, tuple[tuple[int, ...], torch.dtype]]
    meshes: Meshes | None = None
    policies: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, inputs: ModelInput) -> Tensor:
        """Logits (B, T)."""
        logits: Tensor = self.forward(inputs)
        return logits

    @contextmanager
    def accumulating(self, *, more_to_come: bool) -> Iterator[None]:
        """Inside, backward adds to the dense gradients; ranks exchange them only when no more batch is to come."""
        if isinstance(self.forward, FSDPModule):
            self.forward.set_requires_gradient_sync(not more_to_come)
        holds_back = more_to_come and isinstance(self.forward, DistributedDataParallel)
        with self.forward.no_sync() if holds_back else nullcontext():
            yield

    def dense_state(self) -> dict[str, Tensor]:
        """Canonical name -> whole tensor, of parameters and buffers. A collective where they are cut."""
        return self.placement.gather(self.module.state_dict(), {name: name for name in self.dense_expected})

    def load_dense_state(self, state: dict[str, Tensor]) -> None:
        """Inverse of `dense_state`; the caller has checked names and shapes."""
        load_whole(self.module, state, self.placement)


class _Replicated(nn.Module):
    """`model`, and for None instead of inputs a zero that every parameter takes part in: autograd then visits the
    parameters last to first, about as a backward of the model does.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: ModelInput | None) -> Tensor:
        if inputs is not None:
            logits: Tensor = self.model(inputs)
            return logits
        total = torch.zeros((), device=next(self.model.parameters()).device)
        for parameter in self.model.parameters():
            total = total + 0.0 * parameter.sum()
        return total


def replicate(model: nn.Module) -> DistributedDataParallel:
    """DDP whose buckets are laid out; see the module's docstring. A collective."""
    wrapped = DistributedDataParallel(_Replicated(model), gradient_as_bucket_view=True)
    wrapped(None).backward()
    for parameter in model.parameters():
        parameter.grad = None
    return wrapped


def parallelize(
    model: nn.Module,
    specs: Sequence[TableSpec],
    *,
    config: TablesConfig,
    seed: int,
    runtime: Runtime,
    parallel: ParallelConfig | None = None,
    rows_per_rank: int = 512,
    compiled: Sequence[str] = (),
    graphs: Sequence[str] = (),
) -> ParallelModel:
    """Move `model` to the device, build the tables, and cut or wrap what more than one process needs. A collective.

    rows_per_rank: of a micro-batch, which TorchRec's planner asks for, and for which graphs are recorded
    compiled: parts of the model for torch.compile (ModelConfig.compile)
    graphs: parts of the model for CUDA graphs (ModelConfig.graphs), which `check_graphs` has let pass
    """
    if config.impl == "reference" and runtime.world_size > 1:
        raise RunError(f"tables.impl is 'reference', which runs in one process; this run has {runtime.world_size}")
    parallel = parallel or ParallelConfig()
    specs, managed = manage_ids(specs, config)
    meshes = make_meshes(parallel, runtime)
    model = model.to(runtime.device)
    expected = {name: (tuple(value.shape), value.dtype) for name, value in model.state_dict().items()}
    forward, placement = _place_dense(
        model, meshes, runtime, compiled=compiled, graphs=graphs, rows=rows_per_rank, reshard=parallel.reshard
    )
    tables = _place_tables(
        specs,
        config,
        managed,
        parallel=parallel,
        meshes=meshes,
        seed=seed,
        runtime=runtime,
        rows_per_rank=rows_per_rank,
    )
    return ParallelModel(
        module=model,
        forward=forward,
        tables=tables,
        specs=tuple(specs),
        placement=placement,
        dense_expected=expected,
        meshes=meshes,
        policies={feature: policy for feature, policy in config.policy_of().items() if policy != "error"},
    )


def _place_dense(
    model: nn.Module,
    meshes: Meshes | None,
    runtime: Runtime,
    *,
    compiled: Sequence[str],
    graphs: Sequence[str],
    rows: int,
    reshard: bool,
) -> tuple[nn.Module, Placement]:
    """(what the step calls, where the parameters are); `model` is changed in place."""
    whole = WholeParameters(model.named_parameters())
    if meshes is None or meshes.layout.spec.expert * meshes.layout.spec.shard == 1:
        compile_parts(model, compiled)
        graph_parts(model, graphs, rows=rows, device=runtime.device)
        if runtime.world_size == 1:
            return model, whole
        return replicate(model), whole
    expert = make_collectives(meshes, "expert", impl="torch")
    owners = place_experts(model, ExpertGroup(expert)) if expert.size > 1 else {}
    compile_parts(model, compiled)
    shard_parameters(model, meshes, experts_in(model), reshard=reshard)
    shard = make_collectives(meshes, "shard_expert", impl="torch")
    return model, ShardedParameters(whole.shapes, shard=shard, expert=expert, owners=owners)


def _place_tables(
    specs: Sequence[TableSpec],
    config: TablesConfig,
    managed: Mapping[str, ManagedIds],
    *,
    parallel: ParallelConfig,
    meshes: Meshes | None,
    seed: int,
    runtime: Runtime,
    rows_per_rank: int,
) -> Tables:
    replicas = None
    if meshes is not None and meshes.layout.spec.table_replica > 1:
        group = meshes.process_groups["table_shard"]
        replicas = Replicas(
            exchange=make_collectives(meshes, "table_replica", impl="torch"),
            sync=parallel.table_sync,
            every=parallel.table_sync_every,
            fully_sharded=parallel.fully_sharded,
            moment_scaling=parallel.moment_scaling,
        )
    else:
        group = _table_group(runtime)
    return build_tables(
        specs,
        optimizer=RowWiseAdagrad(lr=config.lr, eps=config.eps),
        seed=seed,
        process_group=group,
        device=runtime.device,
        impl=config.impl,
        replicas=replicas,
        policies={f: policy for f, policy in config.policy_of().items() if policy != "zch"},  # type: ignore[misc]
        managed=managed,
        sharding=_sharding(specs, config, parallel, dist.get_world_size(group)),
        cache_share=config.cache_share,
        planner=None if config.planner is None else planner_inputs(config.planner, rows_per_rank),
        timeout=runtime.timeout,
    )


def _table_group(runtime: Runtime) -> dist.ProcessGroup | None:
    """All ranks. On CUDA a group of its own: over the default one, the next step's ids would queue up behind this
    step's gradients, and the host, which reads how many come, would wait for the whole backward. It has the job's
    limit, which torch does not hand on to new groups. A collective.
    """
    if runtime.device.type == "cuda" and runtime.world_size > 1:
        return dist.new_group(timeout=runtime.timeout, group_desc="tables")  # type: ignore[no-any-return]
    return dist.group.WORLD


def _sharding(specs: Sequence[TableSpec], config: TablesConfig, parallel: ParallelConfig, ranks: int) -> dict[str, str]:
    """Table -> kind, of the tables that the config decides: tables.sharding, else parallel.table_sharding (for a table
    with too few rows to cut: whole), unless a planner is there to decide the rest.
    """
    named = config.sharding_of()
    for table in named:
        if table not in (known := [spec.name for spec in specs]):
            raise ConfigError(f"tables.sharding names table {table!r}; {did_you_mean(table, known)}")
    if parallel.table_sharding == "table_wise":
        return named
    return {spec.name: "row_wise" for spec in specs if rows_suffice(spec.rows, ranks)} | named


def manage_ids(specs: Sequence[TableSpec], config: TablesConfig) -> tuple[tuple[TableSpec, ...], dict[str, ManagedIds]]:
    """(tables, those with managed ones in the size asked for; table -> how its ids are managed). ConfigError where the
    features of a table do not agree, or tables.zch names another table.
    """
    asked, policies = config.zch_of(), config.policy_of()
    dynamic = {feature for feature, policy in policies.items() if policy == "zch"}
    managed, found = {}, []
    for spec in specs:
        if not dynamic & set(spec.features):
            found.append(spec)
            continue
        if left := [feature for feature in spec.features if feature not in dynamic]:
            raise ConfigError(
                f"tables.policies: ids of table {spec.name!r} earn their rows (zch), so all its features need that "
                f"policy; missing: {', '.join(f'{feature}=zch' for feature in left)}"
            )
        policy, interval, rows = asked.get(spec.name, ("lfu", 100, None))
        managed[spec.name] = ManagedIds(policy=policy, interval=interval)  # type: ignore[arg-type]
        found.append(replace(spec, rows=rows or spec.rows))
    for table in asked:
        if table not in managed:
            raise ConfigError(
                f"tables.zch names table {table!r}, none of whose features has the policy zch; "
                f"{did_you_mean(table, managed)}"
            )
    return tuple(found), managed


def planner_inputs(topology: str, rows_per_rank: int) -> PlannerInputs:
    """What TorchRec's planner is told of our topology: it knows two bandwidths, within a host and between hosts."""
    found = read_topology(topology)
    if found.device is None:
        raise ConfigError(f"tables.planner: topology {topology!r} has no [device] table, which says a rank's memory")
    return PlannerInputs(
        rows_per_rank=rows_per_rank,
        memory_bytes=found.device.memory_bytes,
        host_memory_bytes=found.device.memory_bytes,
        ranks_per_host=found.tiers[0].group_size or 1_000_000,
        host_bytes_per_s=found.tiers[0].shared_bandwidth,
        network_bytes_per_s=found.tiers[min(1, len(found.tiers) - 1)].shared_bandwidth,
    )


def parameter_counts(parallel: ParallelModel) -> dict[str, int]:
    """{"dense": n, "tables": n}."""
    dense = sum(math.prod(shape) for shape in parallel.placement.shapes.values())
    return {"dense": dense, "tables": sum(spec.rows * spec.dim for spec in parallel.specs)}


def seed_everything(seed: int, *, rank: int) -> None:
    """Seed the generators of this process; each rank draws its own numbers (dropout)."""
    import random

    import numpy as np

    torch.manual_seed(seed * 1_000_003 + rank)
    np.random.seed((seed * 1_000_003 + rank) % 2**32)
    random.seed(seed * 1_000_003 + rank)
