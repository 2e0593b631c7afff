"""Which rank holds which table: by TorchRec's planner, told our topology and what our tables can be cut by.

The planner looks for the plan of least time on its performance model: lookups, exchanges at the two bandwidths it knows
(within a host, between hosts), memory. By itself it may choose what keeps row-wise AdaGrad what it is: whole tables,
or blocks of rows (table_wise, row_wise). Cutting columns trains another model (layout.py), so that is done where it is
asked for by name, as the other kinds are; the planner then chooses the ranks.

It runs alike on every rank and sends nothing. Cost: some milliseconds a table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from gem_embeddings.distribute import TORCHREC_KIND
from gem_embeddings.interface import PlannerInputs, TableSpec
from gem_embeddings.layout import ON_A_HOST, SHARDINGS, Layout, Shard, parse_sharding
from gem_embeddings.validation import rows_suffice

FREE = ("table_wise", "row_wise")


def plan_tables(
    collections: nn.Module,
    specs: Sequence[TableSpec],
    *,
    inputs: PlannerInputs,
    ranks: int,
    host: int,
    device: str,
    given: Mapping[str, str],
) -> dict[str, Layout]:
    """Table -> layout. given: kinds that are decided. ValueError where no plan fits.

    collections  the TorchRec modules, on meta
    host         how many ranks TorchRec's lookups take for a host, which kinds that lie on a host are cut over
    """
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints, PlannerError

    decided = {name: parse_sharding(text) for name, text in given.items()}
    told = min(inputs.ranks_per_host, ranks)
    on_hosts = [name for name, (kind, _) in decided.items() if kind in ON_A_HOST]
    if on_hosts and told != host:  # the lookups would send ids to other ranks than those that hold their rows
        raise ValueError(
            f"the planner is told of {told} ranks a host (ranks_per_host {inputs.ranks_per_host}, {ranks} ranks), the "
            f"job runs with {host} a host, and {', '.join(map(repr, on_hosts))} are to be cut over the ranks of one "
            f"host; give the planner a topology with {host} ranks a host, or start {told} processes a host"
        )
    topology = Topology(
        world_size=ranks,
        compute_device=device,
        hbm_cap=int(inputs.memory_bytes),
        ddr_cap=int(inputs.host_memory_bytes),
        local_world_size=told,
        # the planner counts in bytes a millisecond
        intra_host_bw=inputs.host_bytes_per_s / 1e3,
        inter_host_bw=inputs.network_bytes_per_s / 1e3,
    )
    constraints = {
        spec.name: ParameterConstraints(
            sharding_types=_torchrec_kinds(decided[spec.name][0]) if spec.name in decided else _possible(spec, ranks),
            compute_kernels=["dense" if spec.name in decided and decided[spec.name][0] == "data_parallel" else "fused"],
            min_partition=spec.dim // decided[spec.name][1] if spec.name in decided else None,
            pooling_factors=[inputs.mean_ids.get(feature, 1.0) for feature in spec.features],
            is_weighted=spec.weighted,
        )
        for spec in specs
    }
    # It warns that a topology was made by hand, and that our modules are on meta: both are meant.
    logging.getLogger("torchrec.distributed.planner").setLevel(logging.ERROR)
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=inputs.rows_per_rank, constraints=constraints, debug=False
    )
    try:
        plan = planner.plan(collections, _sharders())
    except PlannerError as problem:
        raise ValueError(
            f"TorchRec's planner finds no place for the tables on {ranks} ranks with {inputs.memory_bytes:.3g} bytes "
            f"each: {problem}"
        ) from problem
    return {name: _layout(sharding) for module in plan.plan.values() for name, sharding in module.items()}


def _layout(sharding: Any) -> Layout:
    kind = next((ours for ours, theirs in TORCHREC_KIND.items() if theirs == sharding.sharding_type), None)
    if sharding.sharding_spec is None:
        return Layout(kind=kind or sharding.sharding_type, shards=())
    shards = (
        Shard(
            rank=rank,
            first_row=shard.shard_offsets[0],
            rows=shard.shard_sizes[0],
            first_column=shard.shard_offsets[1],
            columns=shard.shard_sizes[1],
        )
        for shard, rank in zip(sharding.sharding_spec.shards, sharding.ranks, strict=True)
    )
    return Layout(kind=kind or sharding.sharding_type, shards=tuple(shards))


def _torchrec_kinds(kind: str) -> list[str]:
    return [TORCHREC_KIND.get(kind, kind)]


def _possible(spec: TableSpec, ranks: int) -> list[str]:
    """Row-wise only where every rank gets rows (see layout.check_sharding)."""
    return list(FREE) if rows_suffice(spec.rows, ranks) else ["table_wise"]


def _sharders() -> list[Any]:
    """TorchRec's own sharders leave out kinds on a CPU that gloo can do."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    class Bags(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [TORCHREC_KIND.get(kind, kind) for kind in SHARDINGS]

    class Sequences(EmbeddingCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [TORCHREC_KIND.get(kind, kind) for kind in SHARDINGS]

    return [Bags(), Sequences()]
