"""Fully sharded copies: between steps a rank keeps 1 / M of the rows of each of its tables, and nothing else.

    start_lookup    the gather of all slices begins; ids that are still under way travel beside it
    before_lookup   weights come into being and take the slices
    lookup
    after_lookup    ...

SlicedSums ("gradients", exact). After the lookup the weights are not needed again: the backward of a lookup reads none.
Their memory is given back; before FBGEMM's backward it comes back as zeros and takes the summed gradients (see
copies.py: a fused SGD that only subtracts), which are reduce-scattered; each rank then makes the row-wise AdaGrad step
on its own slice, with moments that exist nowhere else. The reduce-scatter is begun when backward is over, and waited
for when the slices are needed again (lookup, state): the dense optimizer runs beside it. One all-gather and one
reduce-scatter of the weights a step: less than keeping the copies' own steps and averaging them, which also moves
moments, or gathers weights twice.

SlicedAverages ("average", every step). Weights and moments are gathered, every copy's fused step changes its own, the
mean is reduce-scattered. Weights stay in memory from lookup to update.

Slices are cut between rows, table by table: slice m of a table of R rows holds rows m * C to (m + 1) * C with
C = ceil(R / M). So a row and its moment never lie on two ranks, and slices do not depend on which tables lie beside
them. A flat cut of the bytes would save at most M - 1 rows of padding a table.

Sent by a rank and step, L = bytes of its slice: (M - 1) * L for each of the two collectives.
Memory: 1 / M of weights and moments between steps; whole weights (and once more for packing, one table group at a time)
around lookup and update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gem_embeddings.averaged import moment_scale
from gem_embeddings.copies import Copies, set_kernel_rate
from gem_embeddings.interface import Exchange, Pending, Replicas, RowWiseAdagrad
from gem_embeddings.local_tables import LocalTable
from gem_embeddings.rowwise import step_all_


class Slices:
    """This rank's slices of tensors of R_t rows, in one flat buffer; `own[t]` is (C_t, D_t), rows beyond R_t are 0."""

    def __init__(self, whole: Sequence[Tensor], exchange: Exchange) -> None:
        self._exchange = exchange
        self.shapes = [tuple(part.shape) for part in whole]
        self.rows = [-(-rows // exchange.size) for rows, _ in self.shapes]
        self._sizes = [count * dim for count, (_, dim) in zip(self.rows, self.shapes, strict=True)]
        like = whole[0] if whole else torch.zeros(0)
        self.flat = like.new_zeros(sum(self._sizes))
        self.own = self.views(self.flat)
        self.cut(whole)

    def views(self, flat: Tensor) -> list[Tensor]:
        """(C_t, D_t) views of a buffer like `flat`."""
        parts = flat.split(self._sizes)
        return [part.view(count, dim) for part, count, (_, dim) in zip(parts, self.rows, self.shapes, strict=True)]

    def cut(self, whole: Sequence[Tensor]) -> None:
        """Take this rank's rows out of whole tensors."""
        for own, part, count in zip(self.own, whole, self.rows, strict=True):
            mine = part[self._exchange.rank * count : (self._exchange.rank + 1) * count]
            own[: mine.shape[0]].copy_(mine)

    def start_gather(self) -> Pending | None:
        """Begin to send this rank's slices; None: there are none."""
        return self._exchange.begin("all_gather", self.flat) if self.flat.numel() else None

    def gather(self, whole: Sequence[Tensor], pending: Pending | None = None) -> None:
        """Write everybody's slices into whole tensors. pending: what `start_gather` gave."""
        if not self.flat.numel():
            return
        every_ML = (pending or self._exchange.begin("all_gather", self.flat)).wait().view(self._exchange.size, -1)
        for part, piece in zip(whole, every_ML.split(self._sizes, dim=1), strict=True):
            part.copy_(piece.reshape(-1, part.shape[1])[: part.shape[0]])

    def sum(self, whole: Sequence[Tensor]) -> Tensor:
        """The sum over copies of this rank's rows, as a buffer like `flat`."""
        pending = self.start_sum(whole)
        return self.flat.clone() if pending is None else pending.wait().view(-1)

    def start_sum(self, whole: Sequence[Tensor]) -> Pending | None:
        """Begin `sum`; `whole` may change after this. None: there are no rows."""
        if not self.flat.numel():
            return None
        packed_ML = self.flat.new_zeros(self._exchange.size, self.flat.numel())
        for part, piece in zip(whole, packed_ML.split(self._sizes, dim=1), strict=True):
            padded = part.new_zeros(self._exchange.size * (piece.shape[1] // part.shape[1]), part.shape[1])
            padded[: part.shape[0]] = part
            piece.copy_(padded.view(self._exchange.size, -1))
        return self._exchange.begin("reduce_scatter", packed_ML.view(-1))


class Memory:
    """The storages behind some tensors, given back to the allocator and taken again."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._storages = {s.data_ptr(): s for s in (tensor.untyped_storage() for tensor in tensors) if s.nbytes()}
        self._sizes = {key: storage.nbytes() for key, storage in self._storages.items()}

    def give_back(self) -> None:
        for storage in self._storages.values():
            storage.resize_(0)

    def take(self) -> None:
        """Content is undefined after this, unless it was there."""
        for key, storage in self._storages.items():
            if not storage.nbytes():
                storage.resize_(self._sizes[key])

    @property
    def held_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


class SlicedSums(Copies):
    """Slices of weights and moments; gradients summed over the copies."""

    fused_adagrad = False

    def __init__(self, tables: Sequence[LocalTable], optimizer: RowWiseAdagrad, replicas: Replicas) -> None:
        super().__init__(tables, optimizer)
        self._exchange = replicas.exchange
        self._whole = [table.weight for table in self.tables]
        self._weight = Slices(self._whole, self._exchange)
        moments = [weight.new_zeros(weight.shape[0], 1) for weight in self._whole]
        self._momentum = Slices(moments, self._exchange)
        self.memory = Memory(self._whole)
        self.memory.give_back()
        self._gathering: Pending | None = None
        self._summing: tuple[Pending, float] | None = None  # and the learning rate of its step

    def start_lookup(self) -> None:
        self._finish()
        self._gathering = self._weight.start_gather()

    def before_lookup(self) -> None:
        self._finish()
        pending, self._gathering = self._gathering, None
        self.memory.take()
        self._weight.gather(self._whole, pending)

    def after_lookup(self, *, training: bool) -> None:
        self.memory.give_back()

    def before_update(self) -> None:
        self.memory.take()
        for weight in self._whole:
            weight.zero_()

    def after_update(self) -> None:
        pending = self._weight.start_sum(self._whole)
        self._summing = None if pending is None else (pending, self.lr)
        self.memory.give_back()

    def _finish(self) -> None:
        """The step of the last backward on this rank's slices, once its gradients are here."""
        if self._summing is None:
            return
        (pending, lr), self._summing = self._summing, None
        grads = self._weight.views(pending.wait().view(-1).div_(-self._exchange.size))
        for weight, momentum, grad in zip(self._weight.own, self._momentum.own, grads, strict=True):
            step_all_(weight, momentum.view(-1), grad, lr=lr, eps=self.eps)

    def held(self) -> list[tuple[Tensor, Tensor, int]]:
        self._finish()
        pairs = zip(self._weight.own, self._momentum.own, self._weight.rows, strict=True)
        return [(weight, momentum.view(-1), self._exchange.rank * count) for weight, momentum, count in pairs]

    def state(self) -> list[tuple[Tensor, Tensor]]:
        self.before_lookup()
        weights = [weight.clone() for weight in self._whole]
        self.memory.give_back()
        moments = [weight.new_empty(weight.shape[0], 1) for weight in weights]
        self._momentum.gather(moments)
        return [(weight, momentum.view(-1)) for weight, momentum in zip(weights, moments, strict=True)]

    def load(self, state: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._finish()
        self._weight.cut([weight for weight, _ in state])
        self._momentum.cut([momentum.view(-1, 1) for _, momentum in state])


class SlicedAverages(Copies):
    """Slices of weights and moments; each copy makes its own fused step, then the mean."""

    def __init__(self, tables: Sequence[LocalTable], optimizer: RowWiseAdagrad, replicas: Replicas) -> None:
        super().__init__(tables, optimizer)
        self._exchange, self._scale = replicas.exchange, moment_scale(replicas)
        self._whole = [table.weight for table in self.tables]
        self._moments = [table.fused_momentum().view(-1, 1) for table in self.tables]
        self._slices = Slices([*self._whole, *self._moments], self._exchange)
        self.memory = Memory([*self._whole, *self._moments])
        self.memory.give_back()
        self._gathering: Pending | None = None
        self._summing: Pending | None = None

    def start_lookup(self) -> None:
        self._finish()
        self._gathering = self._slices.start_gather()

    def before_lookup(self) -> None:
        self._finish()
        pending, self._gathering = self._gathering, None
        self.memory.take()
        self._slices.gather([*self._whole, *self._moments], pending)

    def after_lookup(self, *, training: bool) -> None:
        if not training:
            self.memory.give_back()

    def after_update(self) -> None:
        self._summing = self._slices.start_sum([*self._whole, *self._moments])
        self.memory.give_back()

    def _finish(self) -> None:
        """The mean of the last step, once it is here."""
        if self._summing is not None:
            pending, self._summing = self._summing, None
            self._slices.flat.copy_(pending.wait().view(-1).div_(self._exchange.size))

    def set_learning_rate(self, lr: float) -> None:
        set_kernel_rate(self.tables, lr * math.sqrt(self._scale))

    def held(self) -> list[tuple[Tensor, Tensor, int]]:
        self._finish()
        number, own = len(self.tables), self._slices.own
        pairs = zip(own[:number], own[number:], self._slices.rows, strict=False)
        return [(weight, momentum.view(-1), self._exchange.rank * count) for weight, momentum, count in pairs]

    def state(self) -> list[tuple[Tensor, Tensor]]:
        self.before_lookup()
        pairs = zip(self._whole, self._moments, strict=True)
        found = [(weight.clone(), momentum.view(-1) / self._scale) for weight, momentum in pairs]
        self.memory.give_back()
        return found

    def load(self, state: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._finish()
        weights = [weight for weight, _ in state]
        self._slices.cut([*weights, *(momentum.view(-1, 1) * self._scale for _, momentum in state)])
