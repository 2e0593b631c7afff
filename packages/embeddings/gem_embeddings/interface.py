"""What gem_embeddings promises: embedding tables with the optimizer fused into backward. Nothing else is public.

1.0  first version
1.1  copies of the tables (`Replicas`, `Exchange`); what happens to ids outside their table (`Policy`), counted
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

INTERFACE_VERSION = (1, 1)

Pooling = Literal["none", "sum", "mean"]
Policy = Literal["error", "drop", "hash"]
Sync = Literal["gradients", "average"]


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One embedding table.

    name       unique; also the canonical checkpoint key, whatever the sharding
    rows, dim  shape; valid ids are 0 <= id < rows
    features   KeyedJaggedTensor keys that look up this table
    pooling    "none": one vector per id (sequences and scalars); "sum" or "mean": one vector per row of the batch
    init_std   standard deviation of the normal initialisation, drawn from `seed` and the table's name, so that the
               same table has the same start values under every sharding and world size
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: Pooling = "none"
    init_std: float = 0.01


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad:
    """Exact row-wise AdaGrad: per row r, v_r += mean_d(g_rd^2), w_r -= lr * g_r / (sqrt(v_r) + eps).

    Gradients of one id that occurs several times in a batch are summed before the update ("exact").
    """

    lr: float = 0.05
    eps: float = 1e-8


class Exchange(Protocol):
    """Collectives over the ranks that hold copies of the same part of the tables; whoever composes passes them in.

    rank, size  this process's position among the copies, and their number
    all_gather      (r, ...) -> (size * r, ...), in the order of ranks; integers and floats
    reduce_scatter  (size * r, ...) -> (r, ...), the sum; floats
    all_reduce      a new tensor of the same shape, the sum; floats
    Sums must be the same bits on every rank that receives them.
    """

    rank: int
    size: int

    def all_gather(self, x: Tensor) -> Tensor: ...

    def reduce_scatter(self, x: Tensor) -> Tensor: ...

    def all_reduce(self, x: Tensor) -> Tensor: ...


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


class Tables(Protocol):
    """A module that holds all tables.

    __call__(ids) -> feature -> Tensor
        pooling "none":        (N, dim), N = ids of that feature in the batch, in row order
        pooling "sum", "mean": (B, dim); the mean of an empty bag is 0
    backward() updates the tables in place; no dense gradient of a table exists. An id outside its table is treated by
    its feature's policy: "error" raises before anything is looked up; "drop" gives no vector to a bag, and zeros in
    place of a single vector; "hash" looks up another row, never row 0. With copies: one forward, one backward, in turn.

    table_state() -> table name -> {"weight": (rows, dim) float32, "momentum": (rows,) float32}, whole (unsharded),
        on CPU, on every rank that asks for it together (a collective).
    load_table_state(state)   the inverse; a missing or extra table, or another shape, is a ValueError listing all
        mismatches, and nothing is applied.
    set_learning_rate(lr)     for schedules.
    policy_counts() -> feature -> {"ids": n, "outside": n}, of this rank since it was built, for features whose policy
        is not "error".
    """

    def __call__(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]: ...

    def table_state(self) -> dict[str, dict[str, Tensor]]: ...

    def load_table_state(self, state: dict[str, dict[str, Tensor]]) -> None: ...

    def set_learning_rate(self, lr: float) -> None: ...

    def policy_counts(self) -> dict[str, dict[str, int]]: ...
