"""The definition: tables as plain tensors, lookups by indexing, row-wise AdaGrad in a few lines of torch.

Each table is one autograd function, so that the gradients of all features that share the table arrive together; its
backward updates the table in place and hands no gradient on. With several processes every rank holds every table
whole, gathers all ranks' ids and gradients, divides by the world size as TorchRec does, and applies the same update:
correct for any world size, and as slow as it sounds. Float64 works too (`dtype`), for use as an oracle.

Shape letters: N ids of a feature, U distinct ids, D dim, B rows of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.initial import initial_rows, initial_values
from gem_embeddings.interface import ManagedIds, Policy, Prepared, RowWiseAdagrad, TableSpec
from gem_embeddings.managed import ManagedTables, Mapped, check_id_state
from gem_embeddings.policies import IdPolicies
from gem_embeddings.sharing import SharedFeatures
from gem_embeddings.validation import check_learning_rate, check_state, mark_used, own_prepared, state_shapes


def rowwise_adagrad_(weight: Tensor, momentum: Tensor, ids: Tensor, grad: Tensor, *, lr: float, eps: float) -> None:
    """Exact row-wise AdaGrad, in place: weight (R, D), momentum (R,), ids (N,), grad (N, D).

    momentum (R, P): the columns are cut in P equal parts that keep a moment each, as tables cut by columns do.
    Gradients of equal ids are summed first. Example: ids [3, 3], grad [[1, 1], [2, 0]], momentum[3] = 0, lr 0.1:
    the sum is [3, 1], momentum[3] = (9 + 1) / 2 = 5 and weight[3] falls by 0.1 * [3, 1] / sqrt(5).
    """
    unique_U, inverse_N = torch.unique(ids, return_inverse=True)
    grad_UD = torch.zeros(unique_U.numel(), weight.shape[1], dtype=grad.dtype, device=grad.device)
    grad_UD.index_add_(0, inverse_N, grad)
    parts = 1 if momentum.ndim == 1 else momentum.shape[1]
    grad_UPD = grad_UD.view(-1, parts, weight.shape[1] // parts)
    moments = momentum.view(-1, parts)
    moments[unique_U] += grad_UPD.square().mean(dim=2)
    step_UP = lr / (moments[unique_U].sqrt() + eps)
    weight[unique_U] -= (step_UP[:, :, None] * grad_UPD).view_as(grad_UD)


class _Table(nn.Module):
    """One table: start values, momentum, and the lookup whose backward is the update."""

    weight: Tensor
    momentum: Tensor

    def __init__(self, spec: TableSpec, *, seed: int, group: Any, device: Any, dtype: torch.dtype, parts: int) -> None:
        super().__init__()
        start = initial_rows(spec, seed=seed, start=0, stop=spec.rows)
        self.register_buffer("weight", start.to(device=device, dtype=dtype))
        shape = (spec.rows, parts) if parts > 1 else (spec.rows,)
        self.register_buffer("momentum", torch.zeros(shape, device=device, dtype=dtype))
        self.group = group
        self.lr = 0.0
        self.eps = 0.0

    def apply_gradient(self, ids: Tensor, grad: Tensor) -> None:
        if self.group is not None:
            ids, grad = _gather_rows(ids, self.group), _gather_rows(grad, self.group)
            grad = grad / dist.get_world_size(self.group)
        rowwise_adagrad_(self.weight, self.momentum, ids, grad, lr=self.lr, eps=self.eps)


class _LookUp(torch.autograd.Function):
    """table[ids]; `anchor` only makes autograd call backward, since no tensor that needs a gradient goes in."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, table: _Table) -> Tensor:
        ctx.table = table
        ctx.save_for_backward(ids)
        return table.weight[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        ctx.table.apply_gradient(ids, grad)
        return None, None, None


class PreparedIds:
    """See `interface.Prepared`."""

    def __init__(self, ids: KeyedJaggedTensor, kept: dict[str, Tensor]) -> None:
        self._ids, self._kept, self.used = ids, kept, False
        self.given: KeyedJaggedTensor | None = None
        self.mapped: Mapped | None = None

    def take(self) -> tuple[KeyedJaggedTensor, dict[str, Tensor]]:
        mark_used(self)
        return self._ids, self._kept


class ReferenceTables(nn.Module):
    """See `gem_embeddings.interface.Tables`."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        *,
        optimizer: RowWiseAdagrad,
        seed: int,
        process_group: Any = None,
        device: Any = "cpu",
        dtype: torch.dtype = torch.float32,
        alone: bool = False,
        policies: Mapping[str, Policy] | None = None,
        column_parts: Mapping[str, int] | None = None,
        managed: Mapping[str, ManagedIds] | None = None,
    ) -> None:
        """`alone`: look at no process group, so that each process of a job can hold its own oracle.

        column_parts: table -> parts that its columns are cut in, 1 where not named
        """
        super().__init__()
        group = process_group
        if not alone and group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None and dist.get_world_size(group) == 1:
            group = None
        self._sharing = SharedFeatures(specs)
        self.specs = self._sharing.specs
        self._policies = IdPolicies(self.specs, self._sharing.policies(policies))
        self._parts = dict(column_parts or {})
        self.tables = nn.ModuleDict(
            {
                spec.name: _Table(
                    spec, seed=seed, group=group, device=device, dtype=dtype, parts=self._parts.get(spec.name, 1)
                )
                for spec in specs
            }
        )
        for table in self.tables.values():
            table.lr, table.eps = optimizer.lr, optimizer.eps
        self._seed, self._managed = seed, None
        if managed:
            self._managed = ManagedTables(self.specs, managed, group=group, exchange=None, device=torch.device(device))
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def prepare(self, ids: KeyedJaggedTensor) -> PreparedIds:
        """Checks and policies; nothing travels."""
        return self._prepare(ids, count=True)

    def _prepare(self, ids: KeyedJaggedTensor, *, count: bool) -> PreparedIds:
        self._settle()
        if self._managed is None:
            return PreparedIds(*self._policies.apply(self._sharing.spread(ids), count=count))
        mapped = self._managed.apply(self._sharing.spread(ids))
        prepared = PreparedIds(*self._policies.apply(mapped.ids, count=count))
        prepared.given, prepared.mapped = ids, mapped
        return prepared

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        """Feature -> (N, dim) or (B, dim); see the interface."""
        return self.look_up(self.prepare(ids))

    def look_up(self, prepared: Prepared) -> dict[str, Tensor]:
        """What `forward` gives for the ids that were prepared."""
        own = own_prepared(prepared, PreparedIds)
        ids, kept = own.take()
        self._settle()
        if self._managed is not None and own.mapped is not None:
            if own.mapped.version != self._managed.version:  # a round ended since: ids may have other rows
                assert own.given is not None
                own = self._prepare(own.given, count=False)
                ids, kept = own.take()
            assert own.mapped is not None
            self._managed.taken(own.mapped)
        features = _split(ids)
        weights = ids.weights_or_none()
        weight_of = {} if weights is None else dict(zip(ids.keys(), weights.split(ids.length_per_key()), strict=True))
        out: dict[str, Tensor] = {}
        for spec in self.specs:
            values = [features[feature][0] for feature in spec.features]
            rows_ND = _LookUp.apply(self._anchor, torch.cat(values), self.tables[spec.name])
            for feature, part_ND in zip(spec.features, rows_ND.split([v.numel() for v in values]), strict=True):
                lengths_B = features[feature][1]
                if spec.weighted:
                    part_ND = part_ND * weight_of[feature].to(part_ND.dtype)[:, None]
                out[feature] = part_ND if spec.pooling == "none" else _pool(part_ND, lengths_B, spec.pooling)
        if self._managed is not None and own.mapped is not None and torch.is_grad_enabled():
            out = self._managed.guard(out, own.mapped)
        return self._policies.fill_in(out, kept)

    def table_state(self) -> dict[str, dict[str, Tensor]]:
        """Table name -> {"weight", "momentum"}, copies on CPU."""
        self._settle()
        return {
            name: {key: getattr(table, key).detach().to("cpu", copy=True) for key in ("weight", "momentum")}
            for name, table in self.tables.items()
        }

    def load_table_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Inverse of `table_state`; ValueError and no change if anything does not fit."""
        check_state(self.specs, state, self._parts)
        for name, entry in state.items():
            self.tables[name].weight.copy_(entry["weight"])
            self.tables[name].momentum.copy_(entry["momentum"])

    def state_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Table name -> {"weight", "momentum"} -> shape."""
        return state_shapes(self.specs, self._parts)

    def placement(self) -> dict[str, str]:
        """Every table is whole on every rank."""
        return dict.fromkeys(self.tables, "whole on every rank")

    def copied_parts(self) -> dict[str, Tensor]:
        """The id maps, which every rank holds; copies of tables are another implementation's."""
        return {} if self._managed is None else self._managed.copied_parts()

    def policy_counts(self) -> dict[str, dict[str, int]]:
        """Feature -> {"ids", "outside"} where the policy is not "error"; see the interface."""
        return self._policies.counts() | ({} if self._managed is None else self._managed.counts())

    def id_state(self) -> dict[str, dict[str, Tensor]]:
        """Table name -> the map of a managed table; see the interface."""
        self._settle()
        return {} if self._managed is None else self._managed.state()

    def id_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Table name -> shapes of `id_state`, -1: any length."""
        return {} if self._managed is None else self._managed.shapes()

    def load_id_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Inverse of `id_state`; ValueError and no change if anything does not fit."""
        if self._managed is not None:
            self._managed.load(state)
        elif state:
            check_id_state({}, state)

    def _settle(self) -> None:
        for name, rows_U in () if self._managed is None else self._managed.settle():
            self._reset(name, rows_U)

    def _reset(self, name: str, rows_U: Tensor) -> None:
        spec = next(spec for spec in self.specs if spec.name == name)
        table = self.tables[name]
        table.weight[rows_U] = initial_values(spec, rows_U, seed=self._seed).to(table.weight)
        table.momentum[rows_U] = 0.0

    def set_learning_rate(self, lr: float) -> None:
        """Learning rate of every table from the next backward on."""
        check_learning_rate(lr)
        for table in self.tables.values():
            table.lr = lr


def _split(ids: KeyedJaggedTensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Feature -> (values (N,), lengths (B,)); unlike KeyedJaggedTensor.to_dict it works for zero rows."""
    keys = ids.keys()
    values = ids.values().split(ids.length_per_key())
    lengths = ids.lengths().view(len(keys), -1) if ids.stride() else ids.lengths().new_zeros(len(keys), 0)
    return {key: (values[i], lengths[i]) for i, key in enumerate(keys)}


def _pool(rows_ND: Tensor, lengths_B: Tensor, pooling: str) -> Tensor:
    row_of_N = torch.repeat_interleave(lengths_B, output_size=rows_ND.shape[0])
    pooled_BD = rows_ND.new_zeros(lengths_B.numel(), rows_ND.shape[1]).index_add(0, row_of_N, rows_ND)
    if pooling == "sum":
        return pooled_BD
    return pooled_BD / lengths_B.clamp(min=1).to(pooled_BD.dtype)[:, None]


def _gather_rows(tensor: Tensor, group: Any) -> Tensor:
    """All ranks' tensors, of unequal length in dim 0, one after the other in rank order."""
    size = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([tensor.shape[0]], device=tensor.device), group=group)
    longest = max(int(count) for count in counts)
    padded = tensor.new_zeros((longest, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts, strict=True)])
