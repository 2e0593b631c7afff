"""From the parallel section of a config to process groups: which ranks share samples, parameters and tables.

The groups need no figures of the network, so a flat topology serves; `gemline plan` is where figures matter. A run in
which every rank holds the whole dense model and all ranks share one copy of the tables needs no groups but the world.
"""

from __future__ import annotations

from gem_comm.api import build_meshes, layout
from gem_comm.interface import CommError, Meshes, MeshSpec, Tier, Topology

from gem_pipelines.config import ParallelConfig
from gem_pipelines.errors import ConfigError
from gem_pipelines.runtime import Runtime

FLAT = Topology(
    name="flat",
    tiers=(Tier(name="all", group_size=None, bandwidth_bytes_per_s=1.0, latency_s=1.0),),
    source="no figures: only used to place ranks, which does not depend on them",
)


def mesh_spec(config: ParallelConfig, world_size: int) -> MeshSpec:
    """Sizes of the five axes, None filled with what is left of the world. ConfigError prints both products.

    Example: expert 2 and shard 2 in a world of 8: replicate 2, table_shard 8.
    """
    replicate, table_shard = config.replicate, config.table_shard
    if replicate is None:
        replicate = max(1, world_size // (config.expert * config.shard))
    if table_shard is None:
        table_shard = max(1, world_size // config.table_replica)
    spec = MeshSpec(
        expert=config.expert,
        shard=config.shard,
        replicate=replicate,
        table_shard=table_shard,
        table_replica=config.table_replica,
        fully_sharded=config.fully_sharded,
    )
    try:
        spec.check_world(world_size)
    except CommError as error:
        raise ConfigError(f"parallel: {error}") from None
    return spec


def make_meshes(config: ParallelConfig, runtime: Runtime) -> Meshes | None:
    """Groups of this run, tried; None where the world is all that is needed. A collective.

    Groups of a part of the ranks have the run's limit too, which torch does not hand on to new groups.
    """
    spec = mesh_spec(config, runtime.world_size)
    if spec.expert * spec.shard * spec.table_replica == 1:
        return None
    placed = layout(spec, FLAT)
    parts = [axis for axis, groups in placed.groups.items() if len(groups) > 1]
    limits = {} if runtime.timeout is None else dict.fromkeys(parts, runtime.timeout)
    return build_meshes(placed, device=runtime.device, timeouts=limits)
