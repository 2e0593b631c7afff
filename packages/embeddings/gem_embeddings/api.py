"""Builds tables by the name of the implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from gem_embeddings.interface import ManagedIds, PlannerInputs, Policy, Replicas, RowWiseAdagrad, Tables, TableSpec
from gem_embeddings.layout import SHARDINGS, check_sharding, parse_sharding
from gem_embeddings.managed import check_managed
from gem_embeddings.policies import check_policies
from gem_embeddings.validation import check_optimizer, check_replicas, check_specs, rows_suffice

__all__ = ["IMPLS", "SHARDINGS", "Impl", "build_tables", "parse_sharding", "rows_suffice"]

Impl = Literal["torchrec", "reference"]
IMPLS = ("torchrec", "reference")


def build_tables(
    specs: Sequence[TableSpec],
    *,
    optimizer: RowWiseAdagrad,
    seed: int,
    process_group: Any = None,
    device: Any = "cpu",
    impl: Impl = "torchrec",
    sharding: Mapping[str, str] | None = None,
    replicas: Replicas | None = None,
    policies: Mapping[str, Policy] | None = None,
    planner: PlannerInputs | None = None,
    cache_share: float | None = None,
    managed: Mapping[str, ManagedIds] | None = None,
    timeout: timedelta | None = None,
) -> Tables:
    """All tables of `specs`, initialised from `seed` and the tables' names, with the optimizer fused into backward.

    process_group  ranks that share the tables; None = the default group. "torchrec" needs an initialised one, also
                   for a single process; "reference" takes it when there is one.
    impl           "torchrec": EmbeddingBagCollection / EmbeddingCollection under DistributedModelParallel.
                   "reference": plain torch, every table whole on every rank.
    sharding       table name -> one of SHARDINGS, "table_wise" (whole on one rank) where not named; "column_wise:4" and
                   "grid:4" say the number of column parts (2). The result depends on nothing but that number: parts
                   keep a moment each, on any number of ranks and in "reference" (see layout.py).
    replicas       copies of the tables: process_group then holds one copy, replicas.exchange joins the ranks that hold
                   the same part in every copy. "reference" holds every table whole and takes none.
    planner        let TorchRec's planner choose kind and rank of every table that `sharding` does not name, instead of
                   whole tables, largest first to the least loaded rank. "reference" ignores it, as it does `sharding`
    cache_share    CUDA: tables live in host memory (UVM), and so large a share of their rows is cached on the device.
                   None: on the device. The result does not depend on it. Without replicas
    policies       feature -> "error" (default), "drop" or "hash": what happens to ids outside the table
    managed        table name -> ManagedIds: tables whose ids earn their rows; their features need no policy
    timeout        how long a collective may take over groups that TorchRec makes itself, within hosts and between them
                   ("table_row_wise", "grid"); None: as torch has it for a new group. process_group keeps its own

    Gradients: a row receives the sum over ranks divided by the world size W (all copies' ranks), as in DDP. For the
    mean over a global batch of G rows, every rank's loss is W / G * sum over its own rows. All must run the same
    forwards and backwards.

    Raises ValueError for tables that cannot be built, an unknown impl, or a missing process group.
    """
    sharding = dict(sharding or {})
    check_specs(specs)
    check_optimizer(optimizer)
    _check_kinds(specs, sharding)
    check_policies(specs, policies or {})
    check_managed(specs, managed or {}, policies or {})
    if replicas is not None:
        check_replicas(replicas)
    shared: dict[str, Any] = {"optimizer": optimizer, "seed": seed, "process_group": process_group, "device": device}
    shared |= {"policies": policies, "managed": managed}
    if impl == "reference":
        if cache_share is not None or replicas is not None:
            _refuse_copies_and_caches(replicas)
        from gem_embeddings.reference import ReferenceTables

        check_sharding(specs, sharding, ranks=1, host=1)
        parts = {name: parse_sharding(kind)[1] for name, kind in sharding.items()}
        return ReferenceTables(specs, column_parts=parts, **shared)
    if impl == "torchrec":
        from gem_embeddings.torchrec_tables import TorchRecTables

        placing: dict[str, Any] = {"sharding": sharding, "replicas": replicas, "planner": planner}
        return TorchRecTables(specs, cache_share=cache_share, timeout=timeout, **placing, **shared)
    raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")


def _check_kinds(specs: Sequence[TableSpec], sharding: Mapping[str, str]) -> None:
    names = {spec.name for spec in specs}
    for name, kind in sharding.items():
        if name not in names:
            raise ValueError(f"sharding names table {name!r}; the tables are {sorted(names)}")
        try:
            parse_sharding(kind)
        except ValueError as problem:
            raise ValueError(f"table {name!r}: {problem}") from problem


def _refuse_copies_and_caches(replicas: Replicas | None) -> None:
    if replicas is not None:
        raise ValueError('impl="reference" holds every table whole on each rank: give process_group, no replicas')
    raise ValueError('impl="reference" has no cache: leave cache_share out')
