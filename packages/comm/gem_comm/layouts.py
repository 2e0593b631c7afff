"""From a mesh and a topology to the place of every rank: pure, so a plan for 4,096 ranks needs one CPU.

Both halves of the mesh count through the ranks like digits of a number; the axis named first turns fastest, so its
groups are neighbours and stay inside the fastest tier:

    dense                   expert, then shard, then replicate
    tables, plain copies    table_shard, then table_replica: ids and vectors move at every step, copies are averaged
                            every few steps
    tables, fully sharded   table_replica, then table_shard: whole tables move at every step, many times the vectors

Expert groups exchange activations in the middle of forward and backward, where nothing hides them; shard groups move
parameters a module ahead; replicas meet once a step with 1 / (shard * expert) of the gradients. Ranks are numbered
host by host, as torchrun does; hosts whose ranks are interleaved are refused instead of renumbered, since process
groups keep their members in ascending order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from gem_comm.interface import CommError, Layout, MeshSpec, Topology


def tier_units(topology: Topology, world_size: int, hosts: Sequence[str] | None = None) -> tuple[tuple[int, ...], ...]:
    """For each tier, the unit in which each rank sits.

    hosts: name of every rank's host, where known; otherwise hosts are full. Example: tiers of 2 and 4 ranks and a
    world of 6: ((0, 0, 1, 1, 2, 2), (0, 0, 0, 0, 1, 1)).
    """
    _check_reach(topology, world_size)
    sizes = [tier.group_size or world_size for tier in topology.tiers]
    if hosts is None:
        return tuple(tuple(rank // size for rank in range(world_size)) for size in sizes)
    host_of = _host_numbers(topology, world_size, hosts)
    in_host = topology.tiers[0].group_size or world_size
    hosts_in = [tier.group_size // in_host if tier.group_size else world_size for tier in topology.tiers]
    return tuple(tuple(host // count for host in host_of) for count in hosts_in)


def layout(spec: MeshSpec, topology: Topology, *, hosts: Sequence[str] | None = None) -> Layout:
    """Place `spec` on `topology`. hosts: host name of each rank (see `api.exchange_hosts`); None: full hosts.

    Raises CommError where the products differ, the topology is too small, or hosts are interleaved or overfull.
    """
    world_size = spec.world_size if hosts is None else len(hosts)
    spec.check_world(world_size)
    units = tier_units(topology, world_size, hosts)
    tables = ("table_replica", "table_shard") if spec.fully_sharded else ("table_shard", "table_replica")
    order = (("expert", "shard", "replicate"), tables)
    groups: dict[str, tuple[tuple[int, ...], ...]] = {}
    for axes in order:
        stride = 1
        for axis in axes:
            size = getattr(spec, axis)
            groups[axis] = strided_groups(world_size, size=size, stride=stride)
            stride *= size
    groups["shard_expert"] = strided_groups(world_size, size=spec.expert * spec.shard, stride=1)
    groups["world"] = (tuple(range(world_size)),)
    tiers = {axis: topology.tiers[max(span(group, units) for group in found)].name for axis, found in groups.items()}
    return Layout(spec=spec, world_size=world_size, groups=groups, tiers=tiers, order=order)


def strided_groups(world_size: int, *, size: int, stride: int) -> tuple[tuple[int, ...], ...]:
    """Groups of `size` ranks that are `stride` apart.

    Example: strided_groups(8, size=2, stride=2) is ((0, 2), (1, 3), (4, 6), (5, 7)).
    """
    block = size * stride
    return tuple(
        tuple(start + offset + stride * i for i in range(size))
        for start in range(0, world_size, block)
        for offset in range(stride)
    )


def span(group: Sequence[int], units: Sequence[Sequence[int]]) -> int:
    """Number of the fastest tier of which one unit holds the whole group."""
    for number, unit_of in enumerate(units):
        if len({unit_of[rank] for rank in group}) == 1:
            return number
    raise CommError(f"no tier holds the ranks {tuple(group)} together; leave out group_size of the last tier")


def _check_reach(topology: Topology, world_size: int) -> None:
    reach = topology.tiers[-1].group_size
    if reach is not None and reach < world_size:
        raise CommError(
            f"topology {topology.name!r} joins {reach} ranks (tier {topology.tiers[-1].name!r}), but {world_size} are "
            "asked for; add a tier above it, or leave out the last tier's group_size"
        )


def _host_numbers(topology: Topology, world_size: int, hosts: Sequence[str]) -> list[int]:
    if len(hosts) != world_size:
        raise CommError(f"hosts names {len(hosts)} ranks, the world has {world_size}")
    runs = [(name, len(list(members))) for name, members in groupby(hosts)]
    names = [name for name, _ in runs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        ranks = [rank for rank, name in enumerate(hosts) if name == twice]
        raise CommError(
            f"ranks {ranks} run on host {twice!r}, with other hosts' ranks between them; number ranks host by host, as "
            "torchrun does"
        )
    room = topology.tiers[0].group_size
    for name, count in runs:
        if room is not None and count > room:
            raise CommError(
                f"host {name!r} runs {count} ranks, but tier {topology.tiers[0].name!r} of topology "
                f"{topology.name!r} holds {room}"
            )
    return [number for number, (_, count) in enumerate(runs) for _ in range(count)]
