"""Builds tables by the name of the implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from gem_embeddings.interface import RowWiseAdagrad, Tables, TableSpec
from gem_embeddings.validation import check_optimizer, check_specs

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
) -> Tables:
    """All tables of `specs`, initialised from `seed` and the tables' names, with the optimizer fused into backward.

    process_group  ranks that share the tables; None = the default group. "torchrec" needs an initialised one, also
                   for a single process; "reference" takes it when there is one.
    impl           "torchrec": EmbeddingBagCollection / EmbeddingCollection under DistributedModelParallel.
                   "reference": plain torch, every table whole on every rank.
    sharding       table name -> "table_wise" (default: whole on one rank) or "row_wise" (cut over all ranks). The
                   result does not depend on it; "reference" checks and ignores it.

    Gradients: what a table's row receives is the sum over ranks divided by the world size W, as in
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
    if impl == "reference":
        from gem_embeddings.reference import ReferenceTables

        return ReferenceTables(specs, optimizer=optimizer, seed=seed, process_group=process_group, device=device)
    if impl == "torchrec":
        from gem_embeddings.torchrec_tables import TorchRecTables

        return TorchRecTables(
            specs, optimizer=optimizer, seed=seed, process_group=process_group, device=device, sharding=sharding
        )
    raise ValueError(f"impl must be one of {IMPLS}, got {impl!r}")
