"""One rank: plan the bytes of a step, run the step, compare. Started by run_rank.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from gem_comm.api import Traffic, build_meshes, layout, make_collectives, observe_traffic, read_topology, wrap
from gem_comm.differentiable import all_gather_rows, reduce_scatter_rows
from gem_comm.interface import MeshSpec
from gem_embeddings.api import build_tables
from gem_embeddings.interface import Replicas, RowWiseAdagrad, TableSpec
from gem_pipelines.model.build import build_model
from gem_pipelines.model.config import InteractionConfig, ModelConfig
from gem_pipelines.model.testing import make_config, make_inputs, make_schema
from gem_pipelines.parallel_experts import ExpertGroup, place_experts
from gem_pipelines.planner.moves import moves_of, table_bytes
from gem_pipelines.planner.shapes import _interaction_sizes
from gem_pipelines.planner.workload import TableLoad, Workload, dense_units, experts_of, owned_experts, units_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS = 3
TABLES = (TableLoad(name="a", rows=12, dim=4, ids=2.0, vectors=2.0),)
EXPERTS = InteractionConfig(kind="experts", fm_tokens=4, linear_tokens=4, rank=3, hidden=(5,), experts=4)
DHEN = InteractionConfig(kind="dhen", members=("fm", "linear"), fm_tokens=2, linear_tokens=2, rank=3, hidden=(5,))


def specs(world: int) -> list[MeshSpec]:
    found = [
        MeshSpec(shard=world, table_shard=world),
        MeshSpec(replicate=world, table_shard=1, table_replica=world),
        MeshSpec(expert=2, shard=world // 2, table_shard=world // 2, table_replica=2, fully_sharded=True),
    ]
    if world == 4:
        found.append(MeshSpec(shard=2, replicate=2, table_shard=2, table_replica=2))
        found.append(MeshSpec(expert=2, replicate=2, table_shard=2, table_replica=2))
    return found


class Spread(nn.Module):
    """A layer's DHEN interaction with its members spread over the expert axis."""

    def __init__(self, whole: nn.Module, comm, owned: list[str]) -> None:
        super().__init__()
        self.members = nn.ModuleDict({name: whole.members[name] for name in owned})
        self.shortcut, self.norm, self.comm = whole.shortcut, whole.norm, comm

    def forward(self, x):
        rows = [ROWS] * self.comm.size
        everybody = all_gather_rows(x, self.comm, rows=rows)
        total = torch.stack([member(everybody) for member in self.members.values()]).sum(0)
        return self.norm(reduce_scatter_rows(total, self.comm, rows=rows) + self.shortcut(x))


def workload(model: nn.Module, config: ModelConfig) -> Workload:
    """What the planner counts of this model; FLOPs play no part."""
    return Workload(
        name="t",
        units=dense_units(model, in_out=_interaction_sizes(make_schema(), config)),
        tables=TABLES,
        batch=ROWS,
        forward_flops=1,
        backward_flops=1,
        flops_spread=0,
        activation_bytes=1,
    )


def check_parts(rank: int, spec: MeshSpec) -> None:
    """Experts on parts of the tokens, as parallelize.py places them: bytes over the expert axis."""
    config = make_config(interaction=EXPERTS)
    model = build_model(make_schema(), config, seed=0)
    work = workload(model, config)
    placed = layout(spec, read_topology("laptop"))
    built = build_meshes(placed, device="cpu")
    counted = Traffic()
    comm = make_collectives(built, "expert", impl="torch", traffic=counted)
    place_experts(model, ExpertGroup(comm))
    model(make_inputs([2, 0, 5], seed=rank, dtype=torch.float32)).sum().backward()
    planned = sum(
        int(move.sent)
        for move in moves_of(work, spec, expert_rank=placed.coordinate(rank)["expert"])
        if move.axis == "expert"
    )
    # counts of rows travel as well, which plans leave out
    sent = sum(count for (_, kind), count in counted.sent.items() if kind == "all_to_all")
    assert sent == planned > 0, f"{spec}: counted {dict(counted.sent)}, planned {planned}"


def check(rank: int, spec: MeshSpec) -> None:
    config = make_config(interaction=DHEN)
    model = build_model(make_schema(), config, seed=0)
    work = workload(model, config)
    placed = layout(spec, read_topology("laptop"))
    built = build_meshes(placed, device="cpu")
    here = placed.coordinate(rank)["expert"]
    traffic = Traffic()
    comm = make_collectives(built, "expert", impl="torch")
    for _, layer in units_of(model):
        if spec.expert > 1:
            members = [name.rpartition(".")[2] for name, _ in experts_of(layer)]
            owned = [members[i] for i in owned_experts(len(members), spec.expert, here)]
            layer.interaction = Spread(layer.interaction, comm, owned)
            for member in layer.interaction.members.values():
                fully_shard(member, mesh=built.experts)
        fully_shard(layer, mesh=built.shared)
    fully_shard(model, mesh=built.shared)
    inputs = make_inputs([2, 0, 5], seed=rank, dtype=torch.float32)
    copy = make_collectives(built, "table_replica", impl="torch")
    # axes of one size may share a group: name them in the order in which the plan would
    order = ("replicate", "shard_expert") if spec.replicate > 1 else ("shard_expert", "expert", "shard")
    if spec.expert > 1:
        order = ("expert", "replicate") if spec.shard == 1 else ("expert", "shard", "shard_expert")
    with observe_traffic(built.process_groups, traffic, order=order):
        model(inputs).sum().backward()
    planned: dict[tuple[str, str], int] = {}
    for move in moves_of(work, spec, expert_rank=here):
        if not move.axis.startswith("table"):
            groups = built.process_groups
            axis = next(a for a in (*order, *groups) if groups[a].group_name == groups[move.axis].group_name)
            planned[axis, move.kind] = planned.get((axis, move.kind), 0) + int(move.sent)
    counted = {key: count for key, count in traffic.sent.items() if count}
    assert counted == planned, f"{spec}: counted {counted}, planned {planned}"
    copies(spec, copy, work)


def copies(spec: MeshSpec, comm, work: Workload) -> None:
    """Gathering slices and scattering updates, or averaging: weights and momentum of this rank's part."""
    counted = Traffic()
    comm = wrap(comm, traffic=counted)
    part = int(table_bytes(work)) // spec.table_shard
    whole = torch.zeros(part // 4)
    if spec.fully_sharded:
        for _ in range(2):
            comm.all_gather(whole[: len(whole) // comm.size])
        comm.reduce_scatter(whole, op="mean")
    else:
        comm.all_reduce(whole, op="mean")
    planned = sum(m.sent for m in moves_of(work, spec) if m.axis == "table_replica")
    assert counted.by_axis()["table_replica"] == planned, f"{spec}: {counted.by_axis()} != {planned}"


def summed(world: int) -> None:
    """Copies that exchange gradients: touched rows where every row is touched, and slices of weights."""
    spec = TableSpec(name="t", rows=world * 6, dim=8, features=("f",))
    load = TableLoad(name="t", rows=spec.rows, dim=spec.dim, ids=1.0, vectors=1.0)
    for fully_sharded in (False, True):
        mesh = MeshSpec(replicate=world, table_replica=world, fully_sharded=fully_sharded)
        built = build_meshes(layout(mesh, read_topology("laptop")), device="cpu")
        counted = Traffic()
        copy = make_collectives(built, "table_replica", impl="torch", traffic=counted)
        tables = build_tables(
            [spec],
            optimizer=RowWiseAdagrad(),
            seed=0,
            process_group=built.process_groups["table_shard"],
            replicas=Replicas(exchange=copy, fully_sharded=fully_sharded),
        )
        counted.clear()
        rows = 4096  # so many lookups that every row is touched, and expected to be
        ids = KeyedJaggedTensor(
            keys=["f"], values=torch.arange(rows) % spec.rows, lengths=torch.ones(rows, dtype=torch.int64)
        )
        tables(ids)["f"].sum().backward()
        work = Workload(
            name="t", units=(), tables=(load,), batch=rows, forward_flops=1, backward_flops=1, flops_spread=0,
            activation_bytes=1,
        )  # fmt: skip
        moves = moves_of(work, mesh, table_sync="gradients")
        planned = sum(move.sent for move in moves if move.axis == "table_replica")
        counts = 0 if fully_sharded else 8 * (world - 1)  # how many rows each copy touched
        sent = counted.by_axis()["table_replica"] - counts
        assert abs(sent - planned) < 1e-6 * planned, f"{mesh}: counted {sent}, planned {planned}"


def lookups(world: int) -> None:
    """TorchRec's exchange of ids, vectors and gradients, table-wise: over all ranks as much as planned.

    Beside it TorchRec exchanges three counts with each peer and collection, which plans leave out.
    """
    rows, lengths = 4, {"a": 1, "s.a": 3, "b": 1, "t": 2, "u": 2}
    specs = [
        TableSpec(name="a", rows=20, dim=8, features=("a", "s.a")),
        TableSpec(name="b", rows=20, dim=8, features=("b",)),
        TableSpec(name="t", rows=20, dim=8, features=("t",), pooling="mean"),
        TableSpec(name="u", rows=20, dim=8, features=("u",), pooling="sum"),
    ]
    tables = build_tables(specs, optimizer=RowWiseAdagrad(), seed=0, process_group=dist.group.WORLD, impl="torchrec")
    ids = KeyedJaggedTensor(
        keys=list(lengths),
        values=torch.arange(rows * sum(lengths.values())) % 20,
        lengths=torch.tensor(list(lengths.values())).repeat_interleave(rows),
    )
    spec = MeshSpec(shard=world, table_shard=world)
    built = build_meshes(layout(spec, read_topology("laptop")), device="cpu")
    with observe_traffic(built.process_groups, Traffic(), order=("table_shard",)) as traffic:
        sum(vectors.sum() for vectors in tables(ids).values()).backward()
    counted = torch.tensor([traffic.sent["table_shard", "all_to_all"] - 2 * 3 * 8 * (world - 1)])
    dist.all_reduce(counted)
    loads = tuple(
        TableLoad(
            name=s.name,
            rows=s.rows,
            dim=s.dim,
            ids=sum(lengths[f] for f in s.features),
            vectors=sum(1 if s.pooling != "none" else lengths[f] for f in s.features),
            features=len(s.features),
        )
        for s in specs
    )
    work = Workload(
        name="t", units=(), tables=loads, batch=rows, forward_flops=1, backward_flops=1, flops_spread=0,
        activation_bytes=1,
    )  # fmt: skip
    planned = world * sum(m.sent for m in moves_of(work, spec) if m.axis == "table_shard")
    assert int(counted) == planned, f"counted {int(counted)}, planned {planned}"


def main(rank: int, world: int, init_method: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    for spec in specs(world):
        check(rank, spec)
    check_parts(rank, MeshSpec(expert=2, replicate=world // 2, table_shard=world))
    summed(world)
    lookups(world)
    dist.destroy_process_group()
