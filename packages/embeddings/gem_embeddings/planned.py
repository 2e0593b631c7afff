"""Which rank holds which table: by TorchRec's planner, told our topology and what our tables can be cut by.

The planner looks for the plan of least time on its performance model: lookups, exchanges at the two bandwidths it knows
(within a host, between hosts), memory. It is given only what keeps row-wise AdaGrad what it is: whole tables, or whole
rows of them (table_wise, row_wise). Cutting columns (column_wise, grid) would give each part a moment of its own, and
data_parallel copies a table with another update; copies are Replicas' business.

It runs alike on every rank and sends nothing. Cost: some milliseconds a table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from gem_embeddings.interface import PlannerInputs, TableSpec
from gem_embeddings.validation import rows_suffice

KINDS = ("table_wise", "row_wise")


def plan_tables(
    collections: nn.Module,
    specs: Sequence[TableSpec],
    *,
    inputs: PlannerInputs,
    ranks: int,
    device: str,
    given: Mapping[str, str],
) -> dict[str, tuple[str, int | None]]:
    """Table -> (kind, rank for table_wise). given: kinds that are decided. ValueError where no plan fits.

    collections  the TorchRec modules, on meta
    """
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints, PlannerError

    topology = Topology(
        world_size=ranks,
        compute_device=device,
        hbm_cap=int(inputs.memory_bytes),
        ddr_cap=int(inputs.host_memory_bytes),
        local_world_size=min(inputs.ranks_per_host, ranks),
        # the planner counts in bytes a millisecond
        intra_host_bw=inputs.host_bytes_per_s / 1e3,
        inter_host_bw=inputs.network_bytes_per_s / 1e3,
    )
    constraints = {
        spec.name: ParameterConstraints(
            sharding_types=[given[spec.name]] if spec.name in given else _possible(spec, ranks),
            compute_kernels=["fused"],
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
    found: dict[str, tuple[str, int | None]] = {}
    for module in plan.plan.values():
        for name, sharding in module.items():
            whole = sharding.sharding_type == "table_wise"
            found[name] = (sharding.sharding_type, sharding.ranks[0] if whole else None)
    return found


def _possible(spec: TableSpec, ranks: int) -> list[str]:
    """Row-wise only where every rank gets rows (see validation.check_row_wise)."""
    return list(KINDS) if rows_suffice(spec.rows, ranks) else ["table_wise"]


def _sharders() -> list[Any]:
    """TorchRec's own sharders leave out row_wise on a CPU, which gloo can do."""
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    class Bags(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return list(KINDS)

    class Sequences(EmbeddingCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return list(KINDS)

    return [Bags(), Sequences()]
