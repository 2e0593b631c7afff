"""How the copies of a table are kept equal: what happens around the lookup and around FBGEMM's fused update.

    before_lookup -> lookup -> after_lookup -> ... -> before_update -> FBGEMM's backward -> after_update

`guard` ties the last three to autograd, so that for the caller `backward()` still updates the tables: the vectors pass
through one function whose backward runs before FBGEMM's, and which asks autograd to call `after_update` when the whole
backward pass is over. Nothing needs to be called by hand, and every rank exchanges at the same place.

SingleCopy     no other copy: FBGEMM does it all.
SummedCopies   the exact way for whole copies ("gradients"). FBGEMM has no mode that hands out sparse gradients on
               both CPU and CUDA, but a fused update that only subtracts is one: before it, the touched rows are set
               aside and zeroed; with learning rate 1 the fused SGD then leaves minus the summed gradient in them,
               exactly. Rows and gradients are gathered over the copies, added in rank order, and every copy makes the
               same step. Copies thus stay equal to the bit, without ever being compared.
               Sent by a rank and step: (M - 1) * U * (4 * dim + 8) bytes, U the touched rows of its part (the largest
               of the copies': parts are padded to it); memory: the touched rows twice. Averaging weights and moments
               sends about 2 * rows * (dim + 1) * 4 bytes instead, whatever was touched.
Others: averaged.py (each copy its own steps, then the mean) and sliced.py (fully sharded).

Letters: U touched rows, D dim, M copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gem_embeddings.interface import Exchange, Replicas, RowWiseAdagrad
from gem_embeddings.local_tables import LocalTable
from gem_embeddings.rowwise import step_rows_


class Copies(ABC):
    """This rank's part of one copy. Around lookup and update there may be nothing to do, so those five are no-ops here.

    fused_adagrad  FBGEMM makes the whole step; otherwise it is built as SGD with learning rate 1
    """

    fused_adagrad = True

    def __init__(self, tables: Sequence[LocalTable], optimizer: RowWiseAdagrad) -> None:
        self.tables = tuple(tables)
        self.eps = optimizer.eps
        self.lr = optimizer.lr
        self._lookups = 0

    def start_lookup(self) -> None:  # noqa: B027
        """A lookup comes next, whose ids may still be under way."""

    def before_lookup(self) -> None:  # noqa: B027
        """Weights are readable after this."""

    def after_lookup(self, *, training: bool) -> None:  # noqa: B027
        """The lookup is over; `training` says whether a backward will follow."""

    def before_update(self) -> None:  # noqa: B027
        """FBGEMM's backward comes next."""

    def after_update(self) -> None:  # noqa: B027
        """FBGEMM's backward is over."""

    def set_learning_rate(self, lr: float) -> None:
        """From the next forward on."""
        self.lr = lr

    @abstractmethod
    def held(self) -> list[tuple[Tensor, Tensor, int]]:
        """(weight, momentum, first row) of the rows of each local table that this rank keeps between steps."""

    def reset(self, table: int, rows_U: Tensor, values_UD: Tensor) -> None:
        """Rows of a local table, counted from its first, take values, and moments 0. Between steps; on all copies."""
        weight, momentum, first = self.held()[table]
        inside = (rows_U >= first) & (rows_U < first + weight.shape[0])
        own_U = rows_U[inside] - first
        weight.index_copy_(0, own_U, values_UD[inside])
        momentum.index_fill_(0, own_U, 0.0)

    @abstractmethod
    def state(self) -> list[tuple[Tensor, Tensor]]:
        """(weight, momentum) of each local table; momentum in units of one copy. A collective of the copies."""

    def copied(self) -> list[tuple[Tensor, Tensor]]:
        """(weight, momentum) of each local table where the other copies hold the same bits now; else empty."""
        return []

    @abstractmethod
    def load(self, state: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Inverse of `state`. The tensors may be on another device."""

    def guard(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tie before_update and after_update to the backward of `vectors`."""
        self._lookups += 1
        guarded = _Guard.apply(self, self._lookups, *vectors.values())  # type: ignore[no-untyped-call]
        return dict(zip(vectors, guarded, strict=True))

    def check_turn(self, lookup: int) -> None:
        """One forward, one backward: gradients of an earlier forward would go to the wrong rows."""
        if lookup != self._lookups:
            raise RuntimeError(
                f"backward of forward {lookup} came after forward {self._lookups}: tables with copies want one forward "
                "and its backward before the next forward (use torch.no_grad() for evaluation)"
            )


class _Guard(torch.autograd.Function):
    """Identity on all vectors of one lookup; backward runs once, when all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, copies: Copies, lookup: int, *vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.copies, ctx.lookup = copies, lookup
        return tuple(vector.view_as(vector) for vector in vectors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.copies.check_turn(ctx.lookup)
        ctx.copies.before_update()
        torch.autograd.Variable._execution_engine.queue_callback(ctx.copies.after_update)  # type: ignore[attr-defined]
        return (None, None, *grads)


class SingleCopy(Copies):
    """No other copy exists."""

    def guard(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        return vectors

    def set_learning_rate(self, lr: float) -> None:
        set_kernel_rate(self.tables, lr)

    def held(self) -> list[tuple[Tensor, Tensor, int]]:
        return [(table.weight, table.fused_momentum(), 0) for table in self.tables]

    def reset(self, table: int, rows_U: Tensor, values_UD: Tensor) -> None:
        kernel = self.tables[table].kernel
        kernel.flush()
        super().reset(table, rows_U, values_UD)
        kernel.reset_cache_states()

    def state(self) -> list[tuple[Tensor, Tensor]]:
        for kernel in kernels_of(self.tables):
            kernel.flush()  # rows cached on the device go back to host memory; nothing where there is no cache
        return [(table.weight, table.fused_momentum()) for table in self.tables]

    def load(self, state: Sequence[tuple[Tensor, Tensor]]) -> None:
        for table, (weight, momentum) in zip(self.tables, state, strict=True):
            table.weight.copy_(weight)
            table.fused_momentum().copy_(momentum)
        for kernel in kernels_of(self.tables):
            kernel.reset_cache_states()


def kernels_of(tables: Sequence[LocalTable]) -> list[Any]:
    """FBGEMM's modules, each once."""
    return list({id(table.kernel): table.kernel for table in tables}.values())


def set_kernel_rate(tables: Sequence[LocalTable], lr: float) -> None:
    """Learning rate inside FBGEMM; one kernel holds several tables."""
    for kernel in kernels_of(tables):
        kernel.set_learning_rate(lr)


class SummedCopies(Copies):
    """Whole copies, the same sum of gradients on each."""

    fused_adagrad = False

    def __init__(self, tables: Sequence[LocalTable], optimizer: RowWiseAdagrad, replicas: Replicas) -> None:
        super().__init__(tables, optimizer)
        self._exchange = replicas.exchange
        self._momentum = [table.weight.new_zeros(table.weight.shape[0]) for table in self.tables]
        self._touched: dict[tuple[int, int], Tensor] = {}
        self._rows: list[Tensor] = []
        self._aside: list[Tensor] = []
        for kernel in kernels_of(tables):
            kernel.register_forward_pre_hook(self._note_rows, with_kwargs=True)

    def _note_rows(self, kernel: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Which rows of which table this lookup touches, as FBGEMM sees them: after all exchanges, local rows."""
        if not torch.is_grad_enabled():
            return
        indices_N, offsets = kwargs["indices"], kwargs["offsets"]
        features = kernel.feature_table_map
        rows = (offsets.numel() - 1) // len(features)
        bounds = offsets[::rows].tolist()
        for table in range(max(features) + 1):
            parts = [indices_N[bounds[f] : bounds[f + 1]] for f, owner in enumerate(features) if owner == table]
            self._touched[id(kernel), table] = torch.cat(parts).unique().long()

    def before_update(self) -> None:
        self._rows = [self._touched[id(table.kernel), table.index] for table in self.tables]
        self._touched = {}
        self._aside = [table.weight[rows_U] for table, rows_U in zip(self.tables, self._rows, strict=True)]
        for table, rows_U in zip(self.tables, self._rows, strict=True):
            table.weight.index_fill_(0, rows_U, 0.0)

    def after_update(self) -> None:
        grads = []
        for table, rows_U, aside_UD in zip(self.tables, self._rows, self._aside, strict=True):
            grads.append(table.weight[rows_U].neg_())
            table.weight.index_copy_(0, rows_U, aside_UD)
        summed = sum_rows(self._rows, grads, self._exchange)
        self._rows, self._aside = [], []
        for table, momentum_R, (rows_U, grad_UD) in zip(self.tables, self._momentum, summed, strict=True):
            grad_UD /= self._exchange.size
            step_rows_(table.weight, momentum_R, rows_U, grad_UD, lr=self.lr, eps=self.eps)

    def copied(self) -> list[tuple[Tensor, Tensor]]:
        return self.state()

    def held(self) -> list[tuple[Tensor, Tensor, int]]:
        return [(table.weight, own, 0) for table, own in zip(self.tables, self._momentum, strict=True)]

    def state(self) -> list[tuple[Tensor, Tensor]]:
        return [(table.weight, momentum) for table, momentum in zip(self.tables, self._momentum, strict=True)]

    def load(self, state: Sequence[tuple[Tensor, Tensor]]) -> None:
        for table, own, (weight, momentum) in zip(self.tables, self._momentum, state, strict=True):
            table.weight.copy_(weight)
            own.copy_(momentum)


def sum_rows(rows: Sequence[Tensor], grads: Sequence[Tensor], exchange: Exchange) -> list[tuple[Tensor, Tensor]]:
    """For each table: the rows that any copy touched, ascending, and the sum of their gradients.

    rows[t] (U_t,) int64, each row once; grads[t] (U_t, D_t). Three collectives, whatever the number of tables: counts,
    rows, gradients; the last two padded to the fullest copy. Each copy's rows are different ones, so sums are made in
    rank order and are the same bits everywhere.

    Example: copies touch rows [1, 4] and [4] with gradients [a, b] and [c]: both receive rows [1, 4], [a, b + c].
    """
    if not rows:
        return []
    size = exchange.size
    counts_MT = (
        exchange.all_gather(torch.tensor([r.numel() for r in rows], device=rows[0].device)).view(size, -1).tolist()
    )
    dims = [grad_UD.shape[1] for grad_UD in grads]
    widths = [sum(c * d for c, d in zip(counts, dims, strict=True)) for counts in counts_MT]
    rows_M = _gather_flat(torch.cat(list(rows)), max(map(sum, counts_MT)), exchange)
    grads_M = _gather_flat(torch.cat([grad_UD.flatten() for grad_UD in grads]), max(widths), exchange)
    rows_MT = [part.split([*c, part.numel() - sum(c)]) for part, c in zip(rows_M, counts_MT, strict=True)]
    sizes = [[c * d for c, d in zip(counts, dims, strict=True)] for counts in counts_MT]
    grads_MT = [part.split([*s, part.numel() - sum(s)]) for part, s in zip(grads_M, sizes, strict=True)]
    summed = []
    for table, dim in enumerate(dims):
        mine = [parts[table] for parts in rows_MT]
        union_U, place = torch.cat(mine).unique(return_inverse=True)
        total_UD = grads[table].new_zeros(union_U.numel(), dim)
        for copy, at in enumerate(place.split([part.numel() for part in mine])):
            total_UD.index_copy_(0, at, total_UD[at] + grads_MT[copy][table].view(-1, dim))
        summed.append((union_U, total_UD))
    return summed


def _gather_flat(flat: Tensor, length: int, exchange: Exchange) -> Sequence[Tensor]:
    padded = flat.new_zeros(length)
    padded[: flat.numel()] = flat
    return exchange.all_gather(padded).view(exchange.size, length).unbind() if length else [padded] * exchange.size
