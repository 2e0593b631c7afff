"""What each rank of a gloo world checks. Run by gloo_worker.py, started by test_gloo.py."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from coded_shard import INT8, CodedShard
from gem_comm import differentiable
from gem_comm.api import (
    Trace,
    Traffic,
    build_meshes,
    check_traces,
    exchange_hosts,
    layout,
    make_collectives,
    observe_traffic,
    parse_topology,
    probe_topology,
    read_topology,
    to_toml,
)
from gem_comm.fsdp import FsdpAllGather, FsdpReduceScatter
from gem_comm.interface import CommError, MeshSpec
from gem_comm.single import SingleCollectives
from gem_comm.testing import Quirks, check_rank
from gem_comm.traced import TracedCollectives
from torch.distributed.fsdp import fully_shard

TWO_BY_TWO = parse_topology(
    """
name = "two hosts of two"
[[tier]]
name = "host"
group_size = 2
bandwidth_bytes_per_s = 100e9
latency_s = 1e-6
[[tier]]
name = "network"
bandwidth_bytes_per_s = 10e9
latency_s = 10e-6
""",
    where="test",
)
SPECS = {
    1: [MeshSpec()],
    2: [MeshSpec(expert=2, table_shard=2), MeshSpec(shard=2, table_replica=2, fully_sharded=True)],
    4: [
        MeshSpec(expert=2, replicate=2, table_shard=2, table_replica=2),
        MeshSpec(shard=2, replicate=2, table_shard=2, table_replica=2, fully_sharded=True),
        MeshSpec(expert=2, shard=2, table_shard=4),
    ],
}


def meshes(rank: int, world_size: int) -> None:
    """Every mesh has the ranks its layout says, in group and in DeviceMesh, and each group's first sum is right."""
    for spec in SPECS[world_size]:
        placed = layout(spec, TWO_BY_TWO)
        built = build_meshes(placed, device="cpu", timeouts={"table_shard": timedelta(seconds=90)})
        for axis, group in built.process_groups.items():
            assert tuple(dist.get_process_group_ranks(group)) == placed.group_of(rank, axis), axis
        here = placed.coordinate(rank)
        tables = built.tables
        assert list(tables.get_coordinate()) == [here["table_replica"], here["table_shard"]]
        assert dist.get_process_group_ranks(tables.get_group("table_shard")) == [*placed.group_of(rank, "table_shard")]
        for mesh, last in ((built.shared, "shard_expert"), (built.experts, "shard")):
            wanted = ("replicate", last) if spec.replicate > 1 else (last,)
            assert mesh.mesh_dim_names == wanted
            assert mesh.get_group(last).size() == len(placed.group_of(rank, last))
            if spec.replicate > 1:
                assert mesh.get_coordinate()[0] == here["replicate"]


def limits(rank: int, world_size: int) -> None:
    """A collective that others do not join ends after its axis's limit."""
    placed = layout(SPECS[world_size][1], TWO_BY_TWO)
    built = build_meshes(placed, device="cpu", timeouts={"shard": timedelta(seconds=2)})
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(1), group=built.process_groups["shard"])
        assert 1.5 < time.monotonic() - begin < 20
    dist.barrier()


def conformance(rank: int, world_size: int) -> None:
    """The shipped suite over torch.distributed, alone and coded."""
    built = build_meshes(layout(SPECS[world_size][0], TWO_BY_TWO), device="cpu")
    check_rank(make_collectives(built, "world", impl="torch"), Quirks())
    for codec in ("bf16", "fp8", "int8") if world_size == 2 else ("int8",):
        check_rank(make_collectives(built, "world", impl="torch", codec=codec), Quirks(codec=codec))


def hosts(rank: int, world_size: int) -> None:
    assert exchange_hosts(f"host-{rank // 2}") == tuple(f"host-{r // 2}" for r in range(world_size))


def expert_parallel(rank: int, world_size: int) -> None:
    """Rank e owns expert e: the sum over experts of everybody's rows, and gradients, equal one process's."""
    built = build_meshes(layout(MeshSpec(expert=world_size, table_shard=world_size), TWO_BY_TWO), device="cpu")
    traffic = Traffic()
    comm = make_collectives(built, "expert", impl="torch", traffic=traffic)
    rows = [3 * r for r in range(world_size)]  # rank 0 has none
    generator = torch.Generator().manual_seed(0)
    x_all = torch.randn(sum(rows), 5, generator=generator, dtype=torch.float64)
    weights = torch.randn(world_size, 5, 4, generator=generator, dtype=torch.float64)
    target = torch.randn(sum(rows), 4, generator=generator, dtype=torch.float64)
    whole = x_all.clone().requires_grad_()
    experts = weights.clone().requires_grad_()
    y_all = torch.einsum("rd,edf->rf", whole, experts)
    ((y_all - target) ** 2).sum().backward()
    start = sum(rows[:rank])
    mine = x_all[start : start + rows[rank]].clone().requires_grad_()
    expert = weights[rank].clone().requires_grad_()
    counts = differentiable.exchange_counts(len(mine), comm)
    assert counts == tuple(rows)
    gathered = differentiable.all_gather_rows(mine, comm, rows=counts)
    y = differentiable.reduce_scatter_rows(gathered @ expert, comm, rows=counts)
    torch.testing.assert_close(y, y_all[start : start + rows[rank]].detach())
    ((y - target[start : start + rows[rank]]) ** 2).sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[start : start + rows[rank]])
    torch.testing.assert_close(expert.grad, experts.grad[rank])
    most, n = max(rows), world_size
    assert traffic.sent["expert", "all_gather"] == (n - 1) * (8 + most * 5 * 8 + most * 4 * 8)
    assert traffic.sent["expert", "reduce_scatter"] == (n - 1) * (most * 4 * 8 + most * 5 * 8)


def wrong_world(rank: int, world_size: int) -> None:
    """A layout for another world size is refused with both products."""
    placed = layout(MeshSpec(shard=8, table_shard=8), read_topology("laptop"))
    with pytest.raises(ValueError, match=f"shard 8 .* both products must be {world_size}"):
        build_meshes(placed, device="cpu")


def observed(rank: int, world_size: int) -> None:
    """What plain torch.distributed moves, in forward and in autograd's backward, is seen and equals the formulas."""
    built = build_meshes(layout(SPECS[world_size][0], TWO_BY_TWO), device="cpu")
    world, n = built.process_groups["world"], world_size

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            total = grad.contiguous()
            dist.all_reduce(total, group=world)
            return total

    x = torch.ones(6 * n, requires_grad=True)
    with observe_traffic(built.process_groups, Traffic(), order=("world",)) as traffic:
        dist.all_gather([torch.empty(3) for _ in range(n)], torch.ones(3), group=world)
        work = dist.all_reduce(torch.ones(2, dtype=torch.float64), group=world, async_op=True)
        work.wait()
        Summed.apply(x).sum().backward()
        out = torch.empty(n, 5, dtype=torch.bfloat16)
        dist.all_to_all_single(out, torch.ones(n, 5, dtype=torch.bfloat16), group=world)
        dist.broadcast(torch.ones(7), src=0, group=world)
        torch.distributed._functional_collectives.all_reduce(torch.ones(4), "sum", world)
        dist.barrier(group=world)
    assert traffic.sent == {
        ("world", "all_gather"): (n - 1) * 12,
        ("world", "all_reduce"): -(-2 * (n - 1) * 16 // n) * 2 + 2 * (n - 1) * 24,
        ("world", "all_to_all"): (n - 1) * 10,
        ("world", "broadcast"): (n - 1) * 28 * (rank == 0),
        ("world", "barrier"): 0,
    }
    assert traffic.calls["world", "all_reduce"] == 3


def fsdp(rank: int, world_size: int) -> None:
    """FSDP2 on the `shared` mesh trains as one process, its traffic is seen, and its hooks take our collectives."""
    for spec in SPECS[world_size][1:]:
        built = build_meshes(layout(spec, TWO_BY_TWO), device="cpu")
        torch.manual_seed(0)
        whole = torch.nn.Linear(8, 8, bias=False)
        rows = torch.randn(2 * world_size, 8)
        (whole(rows) ** 2).mean().backward()
        for ours in (False, True):
            part = torch.nn.Linear(8, 8, bias=False)
            part.load_state_dict(whole.state_dict())
            fully_shard(part, mesh=built.shared)
            counted = Traffic()
            if ours:
                comm = make_collectives(built, "shard_expert", impl="torch", traffic=counted)
                part.set_custom_all_gather(FsdpAllGather(comm))
                part.set_custom_reduce_scatter(FsdpReduceScatter(comm))
            with observe_traffic(built.process_groups, Traffic(), order=("shard_expert", "replicate")) as seen:
                (part(rows[2 * rank : 2 * rank + 2]) ** 2).mean().backward()
            torch.testing.assert_close(part.weight.grad.full_tensor(), whole.weight.grad)
            n = spec.expert * spec.shard
            shard_bytes = 8 * 8 * 4 // n
            assert seen.sent["shard_expert", "reduce_scatter"] == (n - 1) * shard_bytes
            # the root keeps its parameters between forward and backward: one gather
            assert seen.sent["shard_expert", "all_gather"] == (n - 1) * shard_bytes
            if spec.replicate > 1:
                r = spec.replicate
                assert seen.sent["replicate", "all_reduce"] == 2 * (r - 1) * shard_bytes // r
            if ours:
                both = ("all_gather", "reduce_scatter")
                assert {k: counted.sent["shard_expert", k] for k in both} == {
                    k: seen.sent["shard_expert", k] for k in both
                }


def coded_fsdp(rank: int, world_size: int) -> None:
    """Shards that are coded already travel unchanged: the bytes of the code, and the model of decoded weights."""
    spec = MeshSpec(shard=world_size, table_shard=world_size)
    built = build_meshes(layout(spec, TWO_BY_TWO), device="cpu")
    torch.manual_seed(0)
    plain = torch.nn.Linear(8, 12, bias=False)
    rows = torch.randn(2 * world_size, 8)
    decoded = INT8.decode(INT8.encode(plain.weight.detach()), 8)
    expected = (rows[2 * rank : 2 * rank + 2] @ decoded.t()).detach()
    part = torch.nn.Linear(8, 12, bias=False)
    part.weight = torch.nn.Parameter(CodedShard(plain.weight.detach().clone()))
    fully_shard(part, mesh=built.shared)
    counted = Traffic()
    comm = make_collectives(built, "shard_expert", impl="torch", traffic=counted)
    part.set_custom_all_gather(FsdpAllGather(comm))
    found = part(rows[2 * rank : 2 * rank + 2])
    assert torch.equal(found.detach(), expected), (found, expected)
    assert not torch.equal(decoded, plain.weight), "the code must lose something, or nothing was coded"
    coded = 12 // world_size * INT8.row_bytes(8)
    assert counted.sent["shard_expert", "all_gather"] == (world_size - 1) * coded < (world_size - 1) * 12 * 8 * 4


def probe(rank: int, world_size: int) -> None:
    """All ranks agree on the probed tiers: two hosts of two ranks are a host tier and a network tier."""
    found = probe_topology(device="cpu", sizes_bytes=(1 << 12, 1 << 20, 1 << 22), repeats=3, host=f"host-{rank // 2}")
    tiers = [(tier.name, tier.group_size) for tier in found.tiers]
    assert tiers == ([("host", None)] if world_size == 2 else [("host", 2), ("network", None)])
    text = to_toml(found)
    assert parse_topology(text, where="test") == found, text
    world = build_meshes(layout(SPECS[world_size][0], found), device="cpu").process_groups["world"]
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    length = torch.tensor([len(encoded)])
    dist.broadcast(length, src=0, group=world)
    assert int(length) == len(encoded)
    copy = encoded.clone()
    dist.broadcast(copy, src=0, group=world)
    assert torch.equal(copy, encoded)


def traces(rank: int, world_size: int) -> None:
    """A rank without rows makes the same calls; one that leaves a call out is named, and eagerly before it hangs."""
    built = build_meshes(layout(SPECS[world_size][0], TWO_BY_TWO), device="cpu")
    world = make_collectives(built, "world", impl="torch")
    trace = Trace()
    comm = make_collectives(built, "world", impl="torch", trace=trace)
    send = [0] * world_size if rank == 0 else [rank] * world_size
    receive = [0 if r == 0 else r for r in range(world_size)]
    comm.all_to_all(torch.ones(sum(send), 2), send_rows=send, receive_rows=receive)
    comm.all_reduce(torch.ones(3))
    check_traces(trace, world)
    trace.clear()
    alone = TracedCollectives(SingleCollectives(axis="expert"), trace)
    if rank != 1:
        alone.barrier()
    comm.all_reduce(torch.ones(3))
    with pytest.raises(CommError, match="call 0: rank 0: barrier over expert; rank 1: all_reduce over world") as found:
        check_traces(trace, world)
    assert "calls in all: [2, 1" in str(found.value)
    eager = TracedCollectives(world, Trace(), eager=True)
    with pytest.raises(CommError, match=r"rank 1: all_reduce over world: \(4\) float32 sum"):
        eager.all_reduce(torch.ones(4 if rank == 1 else 3))
