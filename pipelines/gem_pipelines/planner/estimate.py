"""Memory and step time of one mesh on one topology: a model, with every assumption named.

    step = compute + recompute + tables + optimizer + host + exposed communication + contention + imbalance

compute      FLOPs of a rank over peak times `utilisation`
recompute    forward FLOPs of the share of activations that do not fit and are computed again
tables       lookups and updates, bound by memory: each id reads its row, reads and writes it in the update
optimizer    AdamW over this rank's dense shard, bound by memory
host         what launching a step, and each of its collectives, takes longer than the four above, beside which it runs
exposed      moves that nothing hides, plus what of the hidden ones outlasts the dense computing. Hidden moves queue on
             each tier; the busiest tier decides
contention   computing beside a hidden collective loses `overlap_slowdown` of its speed
imbalance    the slowest rank: of W ranks the largest sum of `batch` random sample lengths (mean + spread * sqrt(2 ln W
             / batch)), and the fullest rank of the tables' placement, for lookups and exchange

Tables are placed as a planner would: each table cut in equal parts of at most an even share, then largest first to the
least loaded rank. It is no promise: congestion, stragglers by hardware, launch overhead and the input pipeline are not
in it. What was measured is compared with it in docs/planning.md.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gem_comm.interface import Device, MeshSpec, Topology
from gem_comm.layouts import strided_groups, tier_units
from gem_comm.traffic import GroupShape, bytes_by_tier, group_shape, steps_by_tier

from gem_pipelines.errors import ConfigError
from gem_pipelines.planner.moves import Move, moves_of, table_bytes
from gem_pipelines.planner.workload import TableLoad, Workload, count_of, owned_experts, padded_shard


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Numbers that a plan rests on and cannot know. Each says where it comes from."""

    utilisation: float = 0.37
    """Share of peak FLOPs of dense computing alone on one device: published for Kunlun layers."""
    overlap_slowdown: float = 0.15
    """Computing lost while a collective runs beside it: published as up to 15 % for collectives on SMs."""
    table_sync: Literal["gradients", "average"] = "average"
    """How copies of tables are kept equal (parallel.table_sync of a config)."""
    sync_every: int = 1
    """Steps between two averages of plain table copies."""
    table_gathers: int = 2
    """Fully sharded tables: gathers a step; 2 releases the copy between lookup and update, 1 keeps it."""
    host_s: float = 0.0
    """Host seconds to launch one step on one rank, waits left out: of software and model, so it must be measured
    (`host_s` of benchmarks/gpu/parallel.py). 0: the device is never kept waiting."""
    collective_host_s: float = 0.0
    """Host seconds to issue one collective; measured too."""
    unit_host_s: float = 0.0
    """Host seconds a step that FSDP2 adds for one unit (a layer, the root, an expert) beside its collectives."""
    memory_share: float = 0.92
    """Share of device memory that a job may fill: the rest is for the runtime, buffers of the network and holes."""
    state_bytes: int = 16
    """Bytes a dense parameter: float32 weight, gradient and AdamW's two moments."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One mesh. seconds: part -> seconds, adding up to `step_s`; memory: part -> bytes at the peak of the fullest rank.

    moved: (move, seconds) for every move. recomputed: share of activations computed again.
    """

    spec: MeshSpec
    seconds: dict[str, float]
    memory: dict[str, float]
    memory_limit: float
    moved: tuple[tuple[Move, float], ...]
    recomputed: float
    table_imbalance: float
    length_imbalance: float

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.memory_limit


def estimate(workload: Workload, spec: MeshSpec, topology: Topology, assumptions: Assumptions) -> Estimate:
    """The whole model for one mesh. ConfigError when the topology does not say what a rank is made of."""
    device = device_of(topology)
    world = spec.world_size
    lookups, held = table_placement(workload.tables, spec.table_shard)
    memory, recomputed = _memory(workload, spec, assumptions, device, held, lookups)
    moves = moves_of(
        workload,
        spec,
        table_sync=assumptions.table_sync,
        sync_every=assumptions.sync_every,
        table_gathers=assumptions.table_gathers,
    )
    rate = device.flops_per_s * assumptions.utilisation
    compute = workload.batch * (workload.forward_flops + workload.backward_flops) / rate
    recompute = recomputed * workload.batch * workload.forward_flops / rate
    tables = _lookup_bytes(workload) / device.memory_bytes_per_s
    optimizer = 1.75 * assumptions.state_bytes * _dense_shard(workload, spec) / device.memory_bytes_per_s
    moved, exposed, hidden = _communication(moves, spec, topology)
    window = compute + recompute
    host = assumptions.host_s + assumptions.collective_host_s * sum(move.calls for move, _ in moved)
    host += assumptions.unit_host_s * _cut_units(workload, spec)
    length_imbalance = 1 + workload.flops_spread * math.sqrt(2 * math.log(world) / workload.batch) if world > 1 else 1.0
    uneven = sum(s for move, s in moved if not move.balanced and not move.hidden and move.axis == "table_shard")
    seconds = {
        "compute": compute,
        "recompute": recompute,
        "tables": tables,
        "optimizer": optimizer,
        "host": max(0.0, host - window - tables - optimizer),
        "exposed": exposed + max(0.0, hidden - window),
        "contention": min(hidden, window) * assumptions.overlap_slowdown,
        "imbalance": (length_imbalance - 1) * window + (lookups - 1) * (tables + uneven),
    }
    return Estimate(
        spec=spec,
        seconds=seconds,
        memory=memory,
        memory_limit=device.memory_bytes * assumptions.memory_share,
        moved=moved,
        recomputed=recomputed,
        table_imbalance=lookups,
        length_imbalance=length_imbalance,
    )


def device_of(topology: Topology) -> Device:
    if topology.device is None:
        raise ConfigError(
            f"topology {topology.name!r} has no [device] table, so nothing is known of a rank's memory and speed; add "
            "name, flops_per_s, memory_bytes and memory_bytes_per_s"
        )
    return topology.device


# ------------------------------------------------------------------------------------------------ memory


def _dense_shard(workload: Workload, spec: MeshSpec) -> int:
    """Dense parameters that the fullest rank keeps."""
    total = 0
    for unit in workload.units:
        total += padded_shard(unit.shapes, spec.shard * spec.expert)
        if unit.experts is not None:
            total += max(
                sum(padded_shard(unit.experts.shapes[i], spec.shard) for i in owned)
                for owned in (owned_experts(len(unit.experts.shapes), spec.expert, e) for e in range(spec.expert))
            )
    return total


def _cut_units(workload: Workload, spec: MeshSpec) -> int:
    """Units of FSDP2 on a rank; experts that are cut or copied are units too."""
    if spec.shard * spec.expert == 1:
        return 0
    found = len(workload.units)
    if spec.shard * spec.replicate > 1 and spec.expert > 1:
        found += sum(len(u.experts.shapes) // spec.expert for u in workload.units if u.experts is not None)
    return found


def _gathered(workload: Workload, spec: MeshSpec) -> float:
    """Two whole units at once, the one at work and the next, as gathered; nothing where nothing is sharded."""
    sizes = []
    for unit in workload.units:
        size = count_of(unit.shapes)
        if unit.experts is not None:
            size += sum(sorted(map(count_of, unit.experts.shapes))[-len(unit.experts.shapes) // spec.expert :])
        sizes.append(size)
    largest = sum(sorted(sizes)[-2:])
    return 0.0 if spec.shard * spec.expert == 1 else float(largest * (workload.gather_bytes + workload.reduce_bytes))


def _memory(
    workload: Workload, spec: MeshSpec, assumptions: Assumptions, device: Device, held: float, lookups: float
) -> tuple[dict[str, float], float]:
    part = table_bytes(workload) / spec.table_shard * held
    vectors = workload.batch * sum(t.vectors * t.dim for t in workload.tables) * workload.vector_bytes
    activations = workload.batch * workload.activation_bytes
    if spec.expert > 1:
        together = [u.experts for u in workload.units if u.experts is not None and not u.experts.parts]
        read = max((experts.in_elements + experts.out_elements for experts in together), default=0)
        activations += spec.expert * workload.batch * read * workload.activation_number_bytes
    memory = {
        "dense state": float(_dense_shard(workload, spec) * assumptions.state_bytes),
        "gathered units": _gathered(workload, spec),
        "tables": part / spec.table_replica if spec.fully_sharded else part,
        "embedding vectors": 2 * vectors * lookups,
        "activations": activations,
    }
    if spec.fully_sharded and assumptions.table_gathers == 1:
        memory["whole tables"] = part
    # A released copy is back before the update, when activations are gone: only the larger of the two counts.
    if spec.fully_sharded and assumptions.table_gathers == 2:
        memory["whole tables"] = max(0.0, part - activations)
    over = sum(memory.values()) - device.memory_bytes * assumptions.memory_share
    # Recomputation keeps the units' inputs: a tenth is taken as the least that stays.
    recomputed = min(0.9, max(0.0, over / activations)) if activations else 0.0
    memory["activations"] = activations * (1 - recomputed)
    return memory, recomputed


@lru_cache(maxsize=256)
def table_placement(tables: tuple[TableLoad, ...], ranks: int) -> tuple[float, float]:
    """(lookups, bytes) of the fullest rank over the mean. Parts of tables, largest first, to the least loaded rank.

    Example: tables of equal size, 3 of them over 2 ranks, each part at most half of everything: (4/3, 4/3).
    """
    if ranks == 1 or not tables:
        return 1.0, 1.0
    lookups = sum(table.ids for table in tables) or 1.0
    numbers = sum(table.rows * table.dim for table in tables)
    pieces = []
    for table in tables:
        load, size = table.ids / lookups, table.rows * table.dim / numbers
        count = max(1, math.ceil(max(load, size) * ranks))
        pieces += [(load / count, size / count)] * count
    pieces.sort(key=sum, reverse=True)
    heap = [(0.0, rank) for rank in range(ranks)]
    loads, sizes = [0.0] * ranks, [0.0] * ranks
    for load, size in pieces:
        total, rank = heapq.heappop(heap)
        loads[rank] += load
        sizes[rank] += size
        heapq.heappush(heap, (total + load + size, rank))
    return max(loads) * ranks, max(sizes) * ranks


def _lookup_bytes(workload: Workload) -> float:
    """Rows read by the lookup, read and written by the update, and vectors and gradients beside them."""
    per_sample = sum(t.ids * t.dim * 4 * 3 + t.vectors * t.dim * workload.vector_bytes * 2 for t in workload.tables)
    return workload.batch * per_sample


# ------------------------------------------------------------------------------------------------ communication


def axis_strides(spec: MeshSpec) -> dict[str, tuple[int, int]]:
    """axis -> (size, stride) of its groups, as `gem_comm.api.layout` places them."""
    tables = ("table_replica", "table_shard") if spec.fully_sharded else ("table_shard", "table_replica")
    found = {"shard_expert": (spec.expert * spec.shard, 1)}
    for axes in (("expert", "shard", "replicate"), tables):
        stride = 1
        for axis in axes:
            found[axis] = (getattr(spec, axis), stride)
            stride *= getattr(spec, axis)
    return found


@lru_cache(maxsize=4096)
def group_shapes(topology: Topology, world: int, size: int, stride: int) -> tuple[GroupShape, ...]:
    """The different shapes of an axis' groups on the tiers. One group stands for all where the sizes nest."""
    units = _units(topology, world)
    groups = strided_groups(world, size=size, stride=stride)
    nests = all(_nests(tier.group_size or world, size * stride, stride) for tier in topology.tiers)
    return tuple({group_shape(group, units) for group in (groups[:1] if nests else groups)})


@lru_cache(maxsize=64)
def _units(topology: Topology, world: int) -> tuple[tuple[int, ...], ...]:
    return tier_units(topology, world)


def _nests(unit: int, block: int, stride: int) -> bool:
    if block <= unit:
        return unit % block == 0
    return block % unit == 0 and (unit % stride == 0 or stride % unit == 0)


def _communication(
    moves: tuple[Move, ...], spec: MeshSpec, topology: Topology
) -> tuple[tuple[tuple[Move, float], ...], float, float]:
    """(move, seconds) of all, exposed seconds, seconds of the tier that is busiest with hidden moves."""
    strides = axis_strides(spec)
    moved, exposed, busy = [], 0.0, [0.0] * len(topology.tiers)
    for move in moves:
        size, stride = strides[move.axis]
        seconds, tiers = max(
            _on_tiers(move, shape, topology) for shape in group_shapes(topology, spec.world_size, size, stride)
        )
        moved.append((move, seconds))
        if move.hidden:
            busy = [a + b for a, b in zip(busy, tiers, strict=True)]
        else:
            exposed += seconds
    return tuple(moved), exposed, max(busy)


def _on_tiers(move: Move, shape: GroupShape, topology: Topology) -> tuple[float, tuple[float, ...]]:
    """Seconds of a move, and how long it keeps each tier busy."""
    sent = bytes_by_tier(move.kind, shape, move.sent)
    steps = steps_by_tier(move.kind, shape)
    waits = [move.calls * count * tier.latency_s for count, tier in zip(steps, topology.tiers, strict=True)]
    transfers = [part / tier.shared_bandwidth for part, tier in zip(sent, topology.tiers, strict=True)]
    return max(transfers) + sum(waits), tuple(a + b for a, b in zip(transfers, waits, strict=True))
