"""All meshes of a world size, estimated and ranked: those that fit first, then by step time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gem_comm.interface import MeshSpec, Topology

from gem_pipelines.errors import ConfigError
from gem_pipelines.planner.estimate import Assumptions, Estimate, estimate
from gem_pipelines.planner.workload import Workload

Keep = Callable[[MeshSpec], bool]
AXES = ("expert", "shard", "replicate", "table_shard", "table_replica")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Estimates from the best to the worst, and what they are of. `chosen` is the first unless a mesh was asked for."""

    workload: Workload
    topology: Topology
    assumptions: Assumptions
    world_size: int
    chosen: Estimate
    ranked: tuple[Estimate, ...]

    @property
    def runners_up(self) -> tuple[Estimate, ...]:
        """The others, best first."""
        return tuple(found for found in self.ranked if found is not self.chosen)


def divisors(number: int) -> list[int]:
    """Example: divisors(12) is [1, 2, 3, 4, 6, 12]."""
    return [n for n in range(1, number + 1) if number % n == 0]


def meshes(world_size: int, *, experts: int, fastest: int) -> Iterator[MeshSpec]:
    """Every factorization. expert divides the experts and stays inside the fastest tier (`fastest` ranks)."""
    for expert in divisors(world_size):
        if experts % expert or expert > fastest:
            continue
        for shard in divisors(world_size // expert):
            for copies in divisors(world_size):
                for fully in (False, True) if copies > 1 else (False,):
                    yield MeshSpec(
                        expert=expert,
                        shard=shard,
                        replicate=world_size // expert // shard,
                        table_shard=world_size // copies,
                        table_replica=copies,
                        fully_sharded=fully,
                    )


def make_plan(
    workload: Workload,
    topology: Topology,
    world_size: int,
    *,
    assumptions: Assumptions | None = None,
    mesh: MeshSpec | None = None,
    keep: Keep = lambda spec: True,
) -> Plan:
    """Estimate all meshes that `keep` accepts. mesh: the one to report on instead of the best."""
    if world_size < 1:
        raise ConfigError(f"--world is {world_size}, expected at least 1")
    assumptions = assumptions or Assumptions()
    fastest = topology.tiers[0].group_size or world_size
    candidates = [s for s in meshes(world_size, experts=workload.experts, fastest=fastest) if keep(s)]
    found = [estimate(workload, spec, topology, assumptions) for spec in candidates]
    ranked = sorted(found, key=_rank)
    if mesh is not None:
        mesh.check_world(world_size)
        wanted = next((e for e in ranked if e.spec == mesh), None) or estimate(workload, mesh, topology, assumptions)
        return _plan(workload, topology, assumptions, world_size, wanted, ranked)
    if not ranked:
        raise ConfigError(f"no mesh of {world_size} ranks is left to choose from")
    return _plan(workload, topology, assumptions, world_size, ranked[0], ranked)


def _plan(
    workload: Workload,
    topology: Topology,
    assumptions: Assumptions,
    world_size: int,
    chosen: Estimate,
    ranked: list[Estimate],
) -> Plan:
    return Plan(
        workload=workload,
        topology=topology,
        assumptions=assumptions,
        world_size=world_size,
        chosen=chosen,
        ranked=tuple(ranked),
    )


def _rank(found: Estimate) -> tuple[object, ...]:
    """Fitting before not fitting; then time, to a tenth of a percent; then the simpler mesh."""
    spec = found.spec
    if not found.fits:
        return (True, found.memory_bytes, 0, 0)
    simple = sum(getattr(spec, axis) > 1 for axis in AXES) + spec.fully_sharded
    return (False, float(f"{found.step_s:.4g}"), simple, spec.expert)


def parse_mesh(text: str) -> MeshSpec:
    """ "expert=2,shard=4,table_shard=8" -> MeshSpec; axes left out are 1. fully_sharded=true for slices of tables."""
    values: dict[str, int | bool] = {}
    for item in text.split(","):
        key, equals, value = item.strip().partition("=")
        if not equals or key not in (*AXES, "fully_sharded"):
            raise ConfigError(f"--mesh: {item!r}: expected axis=size, axes are {', '.join(AXES)}, fully_sharded=true")
        if key in values:
            raise ConfigError(f"--mesh names {key} twice")
        if key == "fully_sharded":
            if value not in ("true", "false"):
                raise ConfigError(f"--mesh: fully_sharded is {value!r}, expected true or false")
            values[key] = value == "true"
        else:
            if not value.isdigit():
                raise ConfigError(f"--mesh: {key} is {value!r}, expected a whole number")
            values[key] = int(value)
    return MeshSpec(**values)  # type: ignore[arg-type]
