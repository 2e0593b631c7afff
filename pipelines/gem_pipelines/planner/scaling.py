"""How far each way of placing tables scales: the same work a rank on 8 to 4,096 ranks.

1D             one copy of the tables over all ranks
2D             copies of `table_group` ranks, averaged every `sync_every` steps
fully sharded  copies of which each rank keeps a slice between steps; the best group size is searched

The dense axes are the best for each. A strategy has broken down at a world size where it does not fit, or where it is
more than `MARGIN` slower than the best strategy there; the part of the step that differs most says why. What all of
them lose with size (the spine, the longest of ever more samples) shows in the rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from gem_comm.interface import MeshSpec, Topology

from gem_pipelines.planner.estimate import Assumptions, Estimate
from gem_pipelines.planner.search import Keep, make_plan
from gem_pipelines.planner.workload import Workload

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
STRATEGIES = ("1D", "2D", "fully sharded")
MARGIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Point:
    """The best mesh of one strategy at one world size. rate: samples a second and rank."""

    strategy: str
    world_size: int
    best: Estimate
    rate: float


def strategy_filter(strategy: str, world_size: int, table_group: int) -> Keep:
    """Which meshes belong to a strategy."""

    def keep(spec: MeshSpec) -> bool:
        if strategy == "1D":
            return spec.table_replica == 1
        if strategy == "2D":
            return not spec.fully_sharded and spec.table_shard == min(table_group, world_size)
        return spec.fully_sharded or world_size == 1

    return keep


def scale(
    workload: Workload,
    topology: Topology,
    *,
    worlds: Sequence[int] = WORLDS,
    assumptions: Assumptions | None = None,
    table_group: int = 256,
) -> tuple[Point, ...]:
    """The best mesh of each strategy at each world size."""
    points = []
    for strategy in STRATEGIES:
        for world in worlds:
            keep = strategy_filter(strategy, world, table_group)
            found = make_plan(workload, topology, world, assumptions=assumptions, keep=keep).chosen
            points.append(Point(strategy=strategy, world_size=world, best=found, rate=workload.batch / found.step_s))
    return tuple(points)


def breakdown(points: Sequence[Point], strategy: str) -> str:
    """World sizes at which a strategy holds and those at which it has broken down, and why.

    Example: "1D: does not fit at 8 to 32 ranks (tables); holds at 64 to 1,024; 6 % to 8 % behind at 2,048 to 4,096
    (imbalance)".
    """
    worlds = sorted({point.world_size for point in points})
    verdicts: list[tuple[str, str, int, float]] = []
    for world in worlds:
        here = {point.strategy: point for point in points if point.world_size == world}
        kind, why, behind = _verdict(here[strategy], list(here.values()))
        verdicts.append((kind, why, world, behind))
    parts = []
    for (kind, why), run in groupby(verdicts, key=lambda verdict: verdict[:2]):
        found = list(run)
        where = _range([world for _, _, world, _ in found])
        if kind == "behind":
            least, most = (f"{f([behind for *_, behind in found]):.0%}" for f in (min, max))
            amount = least if least == most else f"{least} to {most}"
            parts.append(f"{amount} behind at {where} ranks ({why})")
        else:
            parts.append(f"{kind} at {where} ranks" + (f" ({why})" if why else ""))
    return f"{strategy}: " + "; ".join(parts)


def _verdict(point: Point, others: Sequence[Point]) -> tuple[str, str, float]:
    """(verdict, part that says why, share of the best rate that is missing)."""
    if not point.best.fits:
        memory = point.best.memory
        return "does not fit", max(memory, key=lambda part: memory[part]), 0.0
    best = max((other for other in others if other.best.fits), key=lambda other: other.rate)
    behind = 1 - point.rate / best.rate
    if behind <= MARGIN:
        return "holds", "", behind
    own, theirs = point.best.seconds, best.best.seconds
    return "behind", max(own, key=lambda part: own[part] - theirs[part]), behind


def _range(worlds: Sequence[int]) -> str:
    return f"{worlds[0]:,}" if len(worlds) == 1 else f"{worlds[0]:,} to {worlds[-1]:,}"
