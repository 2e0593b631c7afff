"""What gem_embeddings promises: embedding tables with the optimizer fused into backward. Nothing else is public.

1.0  first version
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

INTERFACE_VERSION = (1, 0)

Pooling = Literal["none", "sum", "mean"]


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


class Tables(Protocol):
    """A module that holds all tables.

    __call__(ids) -> feature -> Tensor
        pooling "none":        (N, dim), N = ids of that feature in the batch, in row order
        pooling "sum", "mean": (B, dim); the mean of an empty bag is 0
    backward() updates the tables in place; no dense gradient of a table exists.

    table_state() -> table name -> {"weight": (rows, dim) float32, "momentum": (rows,) float32}, whole (unsharded),
        on CPU, on every rank that asks for it together (a collective).
    load_table_state(state)   the inverse; a missing or extra table, or another shape, is a ValueError listing all
        mismatches, and nothing is applied.
    set_learning_rate(lr)     for schedules.
    """

    def __call__(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]: ...

    def table_state(self) -> dict[str, dict[str, Tensor]]: ...

    def load_table_state(self, state: dict[str, dict[str, Tensor]]) -> None: ...

    def set_learning_rate(self, lr: float) -> None: ...
