"""The checks every implementation makes, so that a mistake reads the same whatever runs underneath.

FBGEMM's default for an id outside its table is to warn and train row 0; so ids are checked here, before any lookup.
The check is one pass over the ids and, on a GPU, one wait for the device; it is not optional.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.interface import Prepared, Replicas, RowWiseAdagrad, TableSpec

POOLINGS = ("none", "sum", "mean")
SYNCS = ("gradients", "average")
STATE_KEYS = ("weight", "momentum")


def check_specs(specs: Sequence[TableSpec]) -> None:
    """Raise ValueError listing everything that is wrong with the tables asked for."""
    problems = []
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            problems.append(f"table {spec.name!r} is given twice")
        seen.add(spec.name)
        if not spec.name or "." in spec.name:
            problems.append(f"table name {spec.name!r} must be non-empty and without dots")
        if spec.rows < 1 or spec.dim < 1:
            problems.append(f"table {spec.name!r} needs rows >= 1 and dim >= 1, got rows={spec.rows}, dim={spec.dim}")
        if spec.dim % 4:
            problems.append(f"table {spec.name!r}: dim must be a multiple of 4 (FBGEMM's row layout), got {spec.dim}")
        if spec.pooling not in POOLINGS:
            problems.append(f"table {spec.name!r}: pooling must be one of {POOLINGS}, got {spec.pooling!r}")
        if spec.init_std < 0:
            problems.append(f"table {spec.name!r}: init_std must be >= 0, got {spec.init_std}")
        if not spec.features:
            problems.append(f"table {spec.name!r} has no feature that looks it up")
        problems += [
            f"table {spec.name!r}: feature {feature!r} is given twice"
            for feature in sorted(set(spec.features))
            if spec.features.count(feature) > 1
        ]
        if spec.weighted and spec.pooling != "sum":
            problems.append(f"table {spec.name!r}: weighted ids need pooling 'sum', got {spec.pooling!r}")
    if not specs:
        problems.append("no table given")
    if problems:
        raise ValueError("tables cannot be built:\n  " + "\n  ".join(problems))


def check_optimizer(optimizer: RowWiseAdagrad) -> None:
    """Raise ValueError unless lr >= 0 and eps > 0."""
    if optimizer.lr < 0 or optimizer.eps <= 0:
        raise ValueError(f"RowWiseAdagrad needs lr >= 0 and eps > 0, got lr={optimizer.lr}, eps={optimizer.eps}")


P = TypeVar("P", bound=Prepared)


def own_prepared(prepared: Prepared, kind: type[P]) -> P:
    """`prepared`; ValueError unless this implementation made it."""
    if not isinstance(prepared, kind):
        raise ValueError(f"look_up takes what prepare() of the same tables gave, got {type(prepared).__name__}")
    return prepared


def mark_used(prepared: Prepared) -> None:
    """ValueError at the second use."""
    if prepared.used:
        raise ValueError("prepared ids are given to the tables once; prepare the batch again")
    prepared.used = True


def check_learning_rate(lr: float) -> None:
    """Raise ValueError unless lr is a finite number >= 0."""
    if not 0.0 <= lr < float("inf"):
        raise ValueError(f"learning rate must be finite and >= 0, got {lr}")


def check_replicas(replicas: Replicas) -> None:
    """Raise ValueError for an unknown way of keeping copies equal, or one that cannot be."""
    if replicas.sync not in SYNCS:
        raise ValueError(f"replicas.sync must be one of {SYNCS}, got {replicas.sync!r}")
    if replicas.exchange.size < 1 or not 0 <= replicas.exchange.rank < replicas.exchange.size:
        raise ValueError(f"replicas.exchange says rank {replicas.exchange.rank} of {replicas.exchange.size}")
    if replicas.every < 1:
        raise ValueError(f"replicas.every must be >= 1, got {replicas.every}")
    if replicas.every > 1 and (replicas.sync == "gradients" or replicas.fully_sharded):
        raise ValueError(
            f"replicas.every is {replicas.every}: gradients, and fully sharded copies, are exchanged at every step; "
            "use every=1, or sync='average' with whole copies"
        )


def check_cache(share: float | None, device: str, replicas: Replicas | None) -> None:
    """Raise ValueError for a cache that cannot be."""
    if share is None:
        return
    if not 0.0 < share <= 1.0:
        raise ValueError(f"cache_share must be above 0 and at most 1, got {share}")
    if device != "cuda":
        raise ValueError(
            f"cache_share={share}: host memory with a cache on the device needs CUDA, the device is {device!r}"
        )
    if replicas is not None:
        raise ValueError("cache_share does not go with replicas: copies write to rows that may lie in the cache")


def rows_suffice(rows: int, ranks: int) -> bool:
    """Whether every one of `ranks` ranks gets a row when `rows` are cut in equal parts, the last ones smaller.

    Example: 7 rows over 4 ranks are 2, 2, 2 and 1; 5 rows are 2, 2, 1 and none.
    """
    return -(-rows // ranks) * (ranks - 1) < rows


def check_ids(specs: Sequence[TableSpec], ids: KeyedJaggedTensor, *, allow: Collection[str] = ()) -> None:
    """Raise ValueError if a feature is missing or an id lies outside its table; nothing has been looked up by then.

    allow: features whose ids may lie anywhere.

    Example: table item with 13 rows, feature s.item with rows [5, 6] and [13]: the error names feature "s.item",
    table "item", id 13 and row 1 of this rank's batch.
    """
    keys = ids.keys()
    missing = [feature for spec in specs for feature in spec.features if feature not in keys]
    if missing:
        raise ValueError(f"the batch lacks features {missing}; it has {keys}")
    weighted = [feature for spec in specs if spec.weighted for feature in spec.features]
    weights = ids.weights_or_none()
    if weights is None and weighted:
        raise ValueError(f"features {weighted} are weighted: give the KeyedJaggedTensor weights, one an id")
    if weights is not None and not weighted:
        raise ValueError("no table is weighted: build the KeyedJaggedTensor without weights, or set TableSpec.weighted")
    if weights is not None and weights.dtype != torch.float32:
        raise ValueError(f"weights of ids must be float32, got {weights.dtype}")
    if ids.values().dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids must be int64 or int32, got {ids.values().dtype}")
    limits = {feature: spec.rows for spec in specs for feature in spec.features if feature not in allow}
    no_limit = torch.iinfo(ids.values().dtype).max
    limit_of_key = torch.tensor([limits.get(key, no_limit) for key in keys], device=ids.values().device)
    per_key = torch.tensor(ids.length_per_key(), device=ids.values().device)
    values = ids.values()
    known = torch.tensor([key in limits for key in keys], device=values.device)
    limit_N = limit_of_key.repeat_interleave(per_key, output_size=values.numel())
    known_N = known.repeat_interleave(per_key, output_size=values.numel())
    bad_N = ((values < 0) | (values >= limit_N)) & known_N
    if bool(bad_N.any()):
        raise ValueError(_describe_bad_id(specs, ids, int(bad_N.nonzero()[0, 0]), int(bad_N.sum())))


def _describe_bad_id(specs: Sequence[TableSpec], ids: KeyedJaggedTensor, index: int, count: int) -> str:
    key_row = int(torch.searchsorted(ids.offsets(), index, right=True)) - 1
    key, row = divmod(key_row, ids.stride())
    feature = ids.keys()[key]
    spec = next(spec for spec in specs if feature in spec.features)
    return (
        f"feature {feature!r}, row {row} of this rank's batch: id {int(ids.values()[index])} is outside table "
        f"{spec.name!r}, expected 0 <= id < {spec.rows} ({count} such ids in the batch); nothing was trained. "
        f"Check the data with `gemline data verify`, or give the table more rows in schema.json"
    )


def state_shapes(specs: Sequence[TableSpec], parts: Mapping[str, int]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Table name -> shapes of its state. parts: of tables whose columns are cut in several."""
    return {
        spec.name: {
            "weight": (spec.rows, spec.dim),
            "momentum": (spec.rows, cut) if (cut := parts.get(spec.name, 1)) > 1 else (spec.rows,),
        }
        for spec in specs
    }


def check_state(
    specs: Sequence[TableSpec], state: Mapping[str, Mapping[str, Tensor]], parts: Mapping[str, int] | None = None
) -> None:
    """Raise ValueError listing every table that is missing, unknown, or of another shape or dtype."""
    expected = state_shapes(specs, parts or {})
    by_name = {spec.name: spec for spec in specs}
    problems = [f"table {name!r} is missing" for name in by_name if name not in state]
    problems += [f"table {name!r} is not one of this model's tables" for name in state if name not in by_name]
    for name in by_name.keys() & state.keys():
        entry, shapes = state[name], expected[name]
        problems += [f"table {name!r}: unknown entry {key!r}" for key in entry if key not in STATE_KEYS]
        for key in STATE_KEYS:
            if key not in entry:
                problems.append(f"table {name!r}: {key} is missing")
            elif tuple(entry[key].shape) != shapes[key] or entry[key].dtype != torch.float32:
                came = f"{tuple(entry[key].shape)} {entry[key].dtype}"
                why = ""
                if key == "momentum" and entry[key].ndim != len(shapes[key]):
                    why = "; cut columns keep a moment a part, whole rows one a row: give the sharding that was saved"
                problems.append(f"table {name!r}: {key} should be {shapes[key]} torch.float32, got {came}{why}")
    if problems:
        raise ValueError("table state does not fit, nothing was loaded:\n  " + "\n  ".join(sorted(problems)))
