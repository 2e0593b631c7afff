"""Process groups and DeviceMeshes of a layout, each group tried once before anything depends on it.

Groups are made here and handed to DeviceMesh, instead of letting DeviceMesh make them, because a group can then have
its own time limit and a description that names its axis in every error. Axes over the same ranks share a group; an
axis over all ranks uses the default group unless it has a time limit of its own. All ranks make all groups in one
order, as torch requires.

A smoke collective sums a known number over each group. It costs one small all-reduce a group at start, and turns a
wrong network interface or a dead link into a message that names axis and ranks, instead of a hang in the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gem_comm.interface import CommError, Layout, Meshes
from gem_comm.validation import check_axis

# Order in which groups are made and tried: the ones that talk most first.
AXES = ("expert", "shard", "replicate", "shard_expert", "table_shard", "table_replica", "world")
SMOKE_LIMIT = timedelta(seconds=120)


def build_meshes(
    layout: Layout,
    *,
    device: torch.device | str,
    timeouts: Mapping[str, timedelta] | None = None,
    smoke_limit: timedelta = SMOKE_LIMIT,
) -> Meshes:
    """Make and try the groups of `layout`. A collective: every rank of the default group calls it alike.

    device    where this rank computes; the smoke collective runs there, and the meshes get its type
    timeouts  axis -> how long a collective over it may take. Axes without one: where one group has all ranks, that is
              the default group with its limit; groups of a part have torch's limit for the backend, since torch
              does not hand the default group's on

    Raises CommError when the world size differs from the layout's, or naming the group whose smoke collective failed.
    """
    if not dist.is_initialized():
        raise CommError("no process group yet: call torch.distributed.init_process_group first, also for one process")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layout.spec.check_world(world_size)
    timeouts = dict(timeouts or {})
    for axis in timeouts:
        check_axis(axis, layout.groups)
    device = torch.device(device)
    groups = _make_groups(layout, rank, timeouts)
    for axis in AXES:
        smoke(groups[axis], axis=axis, device=device, limit=min(smoke_limit, timeouts.get(axis, smoke_limit)))
    spec = layout.spec
    tables = torch.arange(world_size).view(spec.table_shard, spec.table_replica).t() if spec.fully_sharded else None
    if tables is None:
        tables = torch.arange(world_size).view(spec.table_replica, spec.table_shard)
    shared = torch.arange(world_size).view(spec.replicate, spec.shard * spec.expert)
    dense = torch.arange(world_size).view(spec.replicate, spec.shard, spec.expert)
    experts = dense[:, :, layout.coordinate(rank)["expert"]]
    return Meshes(
        layout=layout,
        rank=rank,
        process_groups=groups,
        shared=_mesh(device, shared, ("replicate", "shard_expert"), groups),
        experts=_mesh(device, experts, ("replicate", "shard"), groups),
        tables=_two_axes(device, tables, ("table_replica", "table_shard"), groups),
    )


def smoke(group: dist.ProcessGroup, *, axis: str, device: torch.device, limit: timedelta) -> None:
    """Sum 1 + rank over the group and compare. CommError names axis, ranks and this rank."""
    ranks = dist.get_process_group_ranks(group)
    x = torch.tensor([1.0 + dist.get_rank()], dtype=torch.float64, device=device)
    where = f"rank {dist.get_rank()}: the first collective over axis {axis!r} (ranks {_short(ranks)})"
    try:
        dist.all_reduce(x, group=group, async_op=True).wait(limit)
        found = float(x)
    except RuntimeError as problem:
        raise CommError(
            f"{where} failed within {limit.total_seconds():g} s: {problem}; check that all of these ranks are alive "
            "and that their hosts reach each other (GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME name the interface)"
        ) from problem
    expected = float(sum(1 + rank for rank in ranks))
    if found != expected:
        raise CommError(f"{where} summed to {found}, expected {expected}: the group moves wrong data; do not train")


def exchange_hosts(name: str) -> tuple[str, ...]:
    """Host name of every rank, in rank order; `name` is this rank's (socket.gethostname()). A collective."""
    if dist.get_world_size() == 1:
        return (name,)
    backend = dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    encoded = name.encode()[:256]
    mine = torch.zeros(257, dtype=torch.uint8)
    mine[0] = len(encoded) % 256
    mine[1 : 1 + len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    parts = [torch.empty_like(mine, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.to(device))
    rows = [part.cpu() for part in parts]
    return tuple(bytes(row[1 : 1 + int(row[0])].tolist()).decode(errors="replace") for row in rows)


def _make_groups(layout: Layout, rank: int, timeouts: Mapping[str, timedelta]) -> dict[str, dist.ProcessGroup]:
    everyone = tuple(range(layout.world_size))
    made: dict[tuple[tuple[int, ...], timedelta | None], dist.ProcessGroup] = {}
    mine: dict[str, dist.ProcessGroup] = {}
    for axis in AXES:
        timeout = timeouts.get(axis)
        for ranks in layout.groups[axis]:
            key = (ranks, timeout)
            if key not in made:
                made[key] = _new_group(ranks, everyone, timeout, axis)
            if rank in ranks:
                mine[axis] = made[key]
    return mine


def _new_group(
    ranks: tuple[int, ...], everyone: tuple[int, ...], timeout: timedelta | None, axis: str
) -> dist.ProcessGroup:
    if ranks == everyone and timeout is None:
        world = dist.group.WORLD
        assert world is not None
        return world
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, group_desc=f"{axis}:{_short(ranks)}")
    return group


def _mesh(
    device: torch.device,
    ranks: torch.Tensor,
    axes: tuple[str, str],
    groups: Mapping[str, dist.ProcessGroup],
) -> DeviceMesh:
    """FSDP2 takes a mesh of one axis to shard over, or of two to copy and shard: one copy needs no axis."""
    if ranks.shape[0] > 1:
        return _two_axes(device, ranks, axes, groups)
    return DeviceMesh.from_group(groups[axes[1]], device.type, mesh_dim_names=axes[1:])


def _two_axes(
    device: torch.device, ranks: torch.Tensor, axes: tuple[str, str], groups: Mapping[str, dist.ProcessGroup]
) -> DeviceMesh:
    return DeviceMesh.from_group([groups[axis] for axis in axes], device.type, mesh=ranks, mesh_dim_names=axes)


def _short(ranks: tuple[int, ...] | list[int]) -> str:
    """Example: 0..7 is "0-7"; (0, 4, 8) is "0,4,8"; long lists are cut."""
    found = list(ranks)
    if len(found) > 2 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}-{found[-1]}"
    shown = ",".join(map(str, found[:16]))
    return shown + (f",... {len(found)} ranks" if len(found) > 16 else "")
