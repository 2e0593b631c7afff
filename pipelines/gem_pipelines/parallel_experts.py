"""Expert parallelism: what takes the place of a model's experts and runs each rank's share on everybody's samples.

    ExpertSum     for Dhen's members, which all read the whole input and are summed:
                  all-gather samples -> own members -> reduce-scatter outputs
    ExpertParts   for WukongExperts, where each expert reads its own tokens and outputs are concatenated:
                  all-to-all of the tokens that an expert reads -> own experts -> all-to-all of its tokens. An
                  all-gather and a reduce-scatter would move E times as much, most of it unread or zeros.

Both keep the names of the parameters, so a checkpoint does not show how experts were placed. The formulas stay in
model/: only how an expert's input comes and its output goes is here.

**Gradients.** A rank's loss is W times its share, and the mean over ranks is the gradient (loss.py). An expert sees the
samples of its whole group of E ranks, so its own gradient is already a sum over E ranks, and only the W / E ranks that
hold it average: E times too much. Its output's gradient is therefore divided by E on the way in, and its input's
multiplied by E on the way out, which leaves what flows to other modules unchanged. It is exact in floating point when E
is a power of two.

Rows differ from rank to rank: their numbers are exchanged once a forward, by `ExpertGroup.note_rows`.

Bytes of one layer, forward (backward is the same), a rank, B rows of N x D in and M x D out on each rank:
    ExpertSum     (E - 1) * B * (N + M) * D * 4
    ExpertParts   (E - 1) / E * B * (N + M) * D * 4

Letters: B rows, S rows of all ranks of the group, N tokens in, M tokens out, D width, E ranks of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gem_comm.differentiable import all_gather_rows, all_to_all, exchange_counts, reduce_scatter_rows
from gem_comm.interface import Collectives
from torch import Tensor, nn

from gem_pipelines.errors import ConfigError
from gem_pipelines.model.dhen import Dhen, MemberSum
from gem_pipelines.model.wukong import TokenParts, WukongExperts


class ExpertGroup:
    """The ranks that share their samples, and how many rows each has in the present forward."""

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.rows: tuple[int, ...] = ()

    def note_rows(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook of the whole model: one small exchange, between hosts, which waits for no device."""
        self.rows = exchange_counts(args[0].timestamps.shape[0], self.comm)

    def own(self, names: Sequence[str], what: str) -> list[str]:
        """This rank's experts: neighbours, equally many on each rank."""
        size = self.comm.size
        if len(names) % size:
            raise ConfigError(
                f"parallel.expert is {size}, which does not divide the {len(names)} experts of {what} "
                f"({', '.join(names)}); use a divisor of {len(names)}, or another number of experts"
            )
        each = len(names) // size
        return list(names[self.comm.rank * each : (self.comm.rank + 1) * each])


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """x; its gradient times `factor`."""
    return _ScaleGradient.apply(x, factor)  # type: ignore[no-any-return,no-untyped-call]


class ExpertSum(MemberSum):
    """x (B, N, D) -> the sum of all members (B, M, D); this rank holds some of the members."""

    def __init__(self, members: MemberSum, group: ExpertGroup, what: str) -> None:
        super().__init__({name: members[name] for name in group.own(list(members), what)})
        self.group = group

    def forward(self, x_BND: Tensor) -> Tensor:
        comm, rows = self.group.comm, self.group.rows
        x_SND = scale_gradient(all_gather_rows(x_BND, comm, rows=rows), comm.size)
        y_SMD = scale_gradient(super().forward(x_SND), 1 / comm.size)
        return reduce_scatter_rows(y_SMD, comm, rows=rows)


class ExpertParts(nn.ModuleDict):
    """x (B, N, D) -> all experts' tokens (B, M, D); this rank holds some of the experts, under their numbers."""

    def __init__(self, experts: TokenParts, group: ExpertGroup, what: str) -> None:
        names = [str(number) for number in range(len(experts))]
        super().__init__({name: experts[int(name)] for name in group.own(names, what)})
        self.group = group
        each = len(experts) // group.comm.size
        self._own_parts = [experts.parts[int(name)] for name in self]
        self._tokens = [sum(experts.parts[i * each : (i + 1) * each]) for i in range(group.comm.size)]

    def forward(self, x_BND: Tensor) -> Tensor:
        comm, rows = self.group.comm, self.group.rows
        mine = rows[comm.rank]
        own_tokens = self._tokens[comm.rank]
        sent = torch.cat([part.flatten(0, 1) for part in x_BND.split(self._tokens, dim=1)])
        received = all_to_all(
            sent,
            comm,
            send_rows=[mine * tokens for tokens in self._tokens],
            receive_rows=[count * own_tokens for count in rows],
        )
        x_SND = scale_gradient(received.view(sum(rows), own_tokens, x_BND.shape[-1]), comm.size)
        parts = x_SND.split(self._own_parts, dim=1)
        y_SMD = torch.cat([expert(part) for expert, part in zip(self.values(), parts, strict=True)], dim=1)
        made = y_SMD.shape[1]  # equal on all ranks: experts make equally many tokens
        back = all_to_all(
            scale_gradient(y_SMD, 1 / comm.size).flatten(0, 1),
            comm,
            send_rows=[count * made for count in rows],
            receive_rows=[mine * made] * comm.size,
        )
        return torch.cat(back.view(comm.size, mine, made, x_BND.shape[-1]).unbind(), dim=1)


def place_experts(model: nn.Module, group: ExpertGroup) -> dict[str, int]:
    """Swap the experts of every layer's interaction; returns canonical prefix -> position of the rank that owns it.

    Raises ConfigError where a layer has no experts, or a number that `group` does not divide.
    """
    owners: dict[str, int] = {}
    for index, layer in enumerate(model.layers):
        interaction, where = layer.interaction, f"layers.{index}.interaction"
        if isinstance(interaction, Dhen):
            names = [f"{where}.members.{name}" for name in interaction.members]
            interaction.members = ExpertSum(interaction.members, group, where)
        elif isinstance(interaction, WukongExperts):
            names = [f"{where}.experts.{number}" for number in range(len(interaction.experts))]
            interaction.experts = ExpertParts(interaction.experts, group, where)
        else:
            raise ConfigError(
                f"parallel.expert is {group.comm.size}, but {where} is a {type(interaction).__name__}, which has no "
                "experts; use model.interaction.kind 'dhen' or 'experts', or parallel.expert 1"
            )
        each = len(names) // group.comm.size
        owners |= {f"{name}.": number // each for number, name in enumerate(names)}
    model.register_forward_pre_hook(group.note_rows)
    return owners


def experts_in(model: nn.Module) -> list[nn.Module]:
    """This rank's experts, in forward order."""
    found = [module for module in model.modules() if isinstance(module, ExpertSum | ExpertParts)]
    return [expert for module in found for expert in module.values()]
