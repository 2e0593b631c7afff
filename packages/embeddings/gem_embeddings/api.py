"""Builds tables by the name of the implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gem_embeddings.interface import PlannerInputs, Policy, Replicas, RowWiseAdagrad, Tables, TableSpec
from gem_embeddings.policies import check_policies
from gem_embeddings.validation import check_optimizer, check_replicas, check_specs, rows_suffice

__all__ = ["IMPLS", "SHARDINGS", "Impl", "Sharding", "build_tables", "rows_suffice"]

Impl = Literal["torchrec", "reference"]
Sharding = Literal["table_wise", "row_wise"]
IMPLS = ("torchrec", "reference")
SHARDINGS = ("table_wise", "row_wise")


def build_tables(
    specs: Sequence[TableSpec],
    *,
    optimizer: RowWiseAdagrad,
    seed: int,
    process_group: Any = None,
    device: Any = "cpu",
    impl: Impl = "torchrec",
    sharding: Mapping[str, Sharding] | None = None,
    replicas: Replicas | None = None,
    policies: Mapping[str, Policy] | None = None,
    planner: PlannerInputs | None = None,
    cache_share: float | None = None,
) -> Tables:
    """All tables of `specs`, initialised from `seed` and the tables' names, with the optimizer fused into backward.

    process_group  ranks that share the tables; None = the default group. "torchrec" needs an initialised one, also
                   for a single process; "reference" takes it when there is one.
    impl           "torchrec": EmbeddingBagCollection / EmbeddingCollection under DistributedModelParallel.
                   "reference": plain torch, every table whole on every rank.
    sharding       table name -> "table_wise" (default: whole on one rank) or "row_wise" (cut over all ranks). The
                   result does not depend on it; "reference" checks and ignores it.
    replicas       copies of the tables: process_group then holds one copy, replicas.exchange joins the ranks that hold
                   the same part in every copy. "reference" holds every table whole and takes none.
    planner        let TorchRec's planner choose kind and rank of every table that `sharding` does not name, instead of
                   whole tables, largest first to the least loaded rank. "reference" ignores it, as it does `sharding`
    cache_share    CUDA: tables live in host memory (UVM), and so large a share of their rows is cached on the device.
                   None: on the device. The result does not depend on it. Without replicas
    policies       feature -> "error" (default), "drop" or "hash": what happens to ids outside the table

    Gradients: what a table's row receives is the sum over ranks divided by the world size W (all copies' ranks), as in
    DistributedDataParallel. For the mean over a global batch of G rows, every rank's loss is
    W / G * sum over its own rows. A process that builds tables must run the same forwards and backwards as the others.

    Raises ValueError for tables that cannot be built, an unknown impl, or a missing process group.
    """
    check_specs(specs)
    check_optimizer(optimizer)
    sharding = dict(sharding or {})
    names = {spec.name for spec in specs}
    for name, kind in sharding.items():
        if name not in names:
            raise ValueError(f"sharding names table {name!r}; the tables are {sorted(names)}")
        if kind not in SHARDINGS:
            raise ValueError(f"sharding of table {name!r} must be one of {SHARDINGS}, got {kind!r}")
    check_policies(specs, policies or {})
    if replicas is not None:
        check_replicas(replicas)
    if impl == "reference":
        if cache_share is not None:
            raise ValueError('impl="reference" has no cache: leave cache_share out')
        if replicas is not None:
            raise ValueError('impl="reference" holds every table whole on each rank: give process_group, no replicas')
        from gem_embeddings.reference import ReferenceTables

        return ReferenceTables(
            specs, optimizer=optimizer, seed=seed, process_group=process_group, device=device, policies=policies
        )
    if impl == "torchrec":
        from gem_embeddings.torchrec_tables import TorchRecTables

        return TorchRecTables(
            specs,
            optimizer=optimizer,
            seed=seed,
            process_group=process_group,
            device=device,
            sharding=sharding,
            replicas=replicas,
            policies=policies,
            planner=planner,
            cache_share=cache_share,
        )
    raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")
