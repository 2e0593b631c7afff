"""What gem_embeddings promises: embedding tables with the optimizer fused into backward. Nothing else is public.

1.0  first version
1.1  copies of the tables (`Replicas`, `Exchange`); what happens to ids outside their table (`Policy`), counted
1.2  weighted ids (`TableSpec.weighted`); a feature may look up several tables; `Tables.prepare`: ids travel ahead;
     `PlannerInputs`: TorchRec's planner places the tables; `Tables.placement`: which rank holds what;
     `Exchange.begin`: slices of fully sharded tables travel beside other work
1.3  `Tables.copied_parts`: what a rank holds in copy, so that copies can be compared
1.4  `ManagedIds`: ids earn their rows, `Tables.id_state` and `load_id_state` and `id_shapes`; `Tables.state_shapes`
1.5  `build_tables(timeout=...)`
1.6  the suite compares what is held in copy: `Quirks.copied`, `check_copies`
1.7  `check_copies(world=...)` and `check_averages(world=...)`: some rank holds something in copy, not every one
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

INTERFACE_VERSION = (1, 7)

Pooling = Literal["none", "sum", "mean"]
Policy = Literal["error", "drop", "hash"]
Sync = Literal["gradients", "average"]


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One embedding table.

    name       unique; also the canonical checkpoint key, whatever the sharding
    rows, dim  shape; valid ids are 0 <= id < rows
    features   KeyedJaggedTensor keys that look up this table. A feature that looks up several tables comes out once
               for each, as "<feature>@<table>"; its policy, if any, is applied in each
    pooling    "none": one vector per id (sequences and scalars); "sum" or "mean": one vector per row of the batch
    init_std   standard deviation of the normal initialisation, drawn from `seed` and the table's name, so that the
               same table has the same start values under every sharding and world size
    weighted   pooling "sum" only: the sum of weight * row, with the float32 weights that the KeyedJaggedTensor carries;
               they are data and get no gradient. Weights of other tables' features are not read

    Example: weights [0.5, 2] for ids [3, 3] give 2.5 * row 3, and row 3 receives 2.5 times the bag's gradient.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: Pooling = "none"
    init_std: float = 0.01
    weighted: bool = False


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad:
    """Exact row-wise AdaGrad: per row r, v_r += mean_d(g_rd^2), w_r -= lr * g_r / (sqrt(v_r) + eps).

    Gradients of one id that occurs several times in a batch are summed before the update ("exact").
    """

    lr: float = 0.05
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class ManagedIds:
    """How the ids of one table earn its rows: any int64 may be an id of the features that look it up (managed.py).

    policy          "lfu": ids seen most often stay; "lru": those seen last; "distance_lfu": count over age, the steps
                    since an id was last seen, to the power decay_exponent. TorchRec's eviction policies
    interval        trained lookups between two rounds, in which new ids may take rows
    decay_exponent  of "lru" and "distance_lfu"

    Of a table of R rows the first R - 1 can be earned; the last is shared by all ids that have none. A row whose id is
    evicted goes back to its start value, and its moment to 0.

    Example: rows 3, "lfu", interval 1; steps with ids [7, 7], [8], [9, 9, 9]: 7 takes row 1 and 8 takes row 0, then 9,
    seen three times, takes the row of 8, seen once.
    """

    policy: Literal["lfu", "lru", "distance_lfu"] = "lfu"
    interval: int = 100
    decay_exponent: float = 1.0


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """The result; call once."""
        ...


class Exchange(Protocol):
    """Collectives over the ranks that hold copies of the same part of the tables; whoever composes passes them in.

    rank, size  this process's position among the copies, and their number
    all_gather      (r, ...) -> (size * r, ...), in the order of ranks; integers and floats
    reduce_scatter  (size * r, ...) -> (r, ...), the sum; floats
    all_reduce      a new tensor of the same shape, the sum; floats
    begin           starts an all_gather or reduce_scatter that other work may run beside
    Sums must be the same bits on every rank that receives them.
    """

    rank: int
    size: int

    def all_gather(self, x: Tensor) -> Tensor: ...

    def reduce_scatter(self, x: Tensor) -> Tensor: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def begin(self, kind: Literal["all_gather", "reduce_scatter"], x: Tensor) -> Pending: ...


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Copies of all tables, and how they are kept equal. M = exchange.size copies, N ranks each.

    sync     "gradients": all copies apply the same sum of gradients: the model of one process, whatever M is.
             "average": every copy applies its own gradients; weights and optimizer state are averaged every `every`
             backwards. Another model than that of one process, see gem_embeddings/averaged.py for what is equal.
    every    backwards between two averages
    fully_sharded   between steps each rank keeps 1 / M of the rows of its part; needs every == 1
    moment_scaling  "average" only: divide the second moment by M, which is lr' = lr * sqrt(M), eps' = eps * sqrt(M)
    """

    exchange: Exchange
    sync: Sync = "gradients"
    every: int = 1
    fully_sharded: bool = False
    moment_scaling: bool = True


@dataclass(frozen=True, kw_only=True)
class PlannerInputs:
    """What TorchRec's planner needs to know to place tables.

    rows_per_rank        rows of the batch that one rank brings
    mean_ids             feature -> ids a row; 1 where it is not named
    memory_bytes         of one rank's device, that tables may fill; host_memory_bytes: of its host's part
    ranks_per_host       how many share a host
    host_bytes_per_s, network_bytes_per_s   of one rank in one direction, within a host and between hosts
    """

    rows_per_rank: int
    mean_ids: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: float = 32e9
    host_memory_bytes: float = 128e9
    ranks_per_host: int = 8
    host_bytes_per_s: float = 300e9
    network_bytes_per_s: float = 50e9


class Prepared(Protocol):
    """Ids of one batch on their way to the ranks that own their rows; given once to the tables that prepared them."""

    used: bool


class Tables(Protocol):
    """A module that holds all tables.

    __call__(ids) -> feature -> Tensor
        pooling "none":        (N, dim), N = ids of that feature in the batch, in row order
        pooling "sum", "mean": (B, dim); the mean of an empty bag is 0
    backward() updates the tables in place; no dense gradient of a table exists. An id outside its table is treated by
    its feature's policy: "error" raises before anything is looked up; "drop" gives no vector to a bag, and zeros in
    place of a single vector; "hash" looks up another row, never row 0. With copies: one forward, one backward, in turn.

    prepare(ids) -> Prepared: checks ids, applies policies and starts their exchange; reads no weight, so it may run
        while another batch is computed, before its update. look_up(prepared) goes on as __call__(ids) would. A
        collective: all ranks prepare the same batches in the same order. On CUDA the work is on a stream of its own;
        ids that are still on the CPU are copied there, and wait for nothing else.
    table_state() -> table name -> {"weight": (rows, dim) float32, "momentum": (rows,) float32}, whole (unsharded),
        on CPU, on every rank that asks for it together (a collective). Tables whose columns are cut in n parts have
        n moments a row: (rows, n).
    state_shapes() -> table name -> {"weight", "momentum"} -> shape of that.
    load_table_state(state)   the inverse; a missing or extra table, or another shape, is a ValueError listing all
        mismatches, and nothing is applied.
    set_learning_rate(lr)     for schedules.
    placement() -> table name -> how it lies on the ranks of one copy: "whole on rank 1", "rows over 4 ranks".
    copied_parts() -> name -> this rank's memory of what other copies hold too, bit for bit at this moment: the same
        names on all of them. Weights and moments, not where slices are held, nor between two averages; without copies
        those of data_parallel tables, which all ranks hold; id maps, which all ranks hold always. To be read only.
    policy_counts() -> feature -> {"ids": n, "outside": n}, of this rank since it was built, for features whose policy
        is not "error". Features of managed tables too: outside counts ids without a row of their own, and "inserted"
        and "evicted" those of the feature's table, on all ranks together. Evaluations count, but insert nothing.
    id_state() -> table name -> int64 tensors: the map of a managed table, and what is counted for its next round; the
        same for every sharding and number of ranks. A collective. id_shapes() -> their shapes, -1 for any length.
    load_id_state(state)      the inverse; as load_table_state.
    """

    def __call__(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]: ...

    def prepare(self, ids: KeyedJaggedTensor) -> Prepared: ...

    def look_up(self, prepared: Prepared) -> dict[str, Tensor]: ...

    def table_state(self) -> dict[str, dict[str, Tensor]]: ...

    def load_table_state(self, state: dict[str, dict[str, Tensor]]) -> None: ...

    def state_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]: ...

    def id_state(self) -> dict[str, dict[str, Tensor]]: ...

    def load_id_state(self, state: dict[str, dict[str, Tensor]]) -> None: ...

    def id_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]: ...

    def set_learning_rate(self, lr: float) -> None: ...

    def placement(self) -> dict[str, str]: ...

    def copied_parts(self) -> dict[str, Tensor]: ...

    def policy_counts(self) -> dict[str, dict[str, int]]: ...
