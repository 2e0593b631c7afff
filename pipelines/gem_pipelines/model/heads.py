"""From the last tokens to one logit per task.

"separate": an MLP per task. "shared_bottom": one MLP below them. "mmoe": experts shared by the tasks, mixed by a
softmax gate of each task. Only the last layer of a task always has a bias: it holds the base rate.
Letters: B rows, C input width, T tasks, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_pipelines.model.common import Mlp, linear, mlp_flops
from gem_pipelines.model.config import HeadsConfig, ModelConfig


class TaskHeads(nn.Module):
    """x (B, C) -> logits (B, T)."""

    def __init__(self, in_dim: int, tasks: Sequence[str], config: ModelConfig) -> None:
        super().__init__()
        own = config.heads
        self.kind = own.kind
        shared = (in_dim, *own.shared)
        if own.kind == "shared_bottom":
            self.shared = Mlp(shared, bias=config.bias)
        elif own.kind == "mmoe":
            self.experts = nn.ModuleList(Mlp(shared, bias=config.bias) for _ in range(own.experts))
            self.gates = nn.ModuleList(linear(in_dim, own.experts) for _ in tasks)
        head_in = in_dim if own.kind == "separate" else own.shared[-1]
        self.tasks = nn.ModuleList(
            Mlp((head_in, *own.hidden, 1), bias=config.bias, last_bias=True, last_wide=True) for _ in tasks
        )

    def forward(self, x_BC: Tensor) -> Tensor:
        if self.kind == "separate":
            inputs = [x_BC] * len(self.tasks)
        elif self.kind == "shared_bottom":
            inputs = [F.gelu(self.shared(x_BC))] * len(self.tasks)
        else:
            experts_BEC = torch.stack([F.gelu(expert(x_BC)) for expert in self.experts], dim=1)
            inputs = [(F.softmax(gate(x_BC), dim=-1)[:, None] @ experts_BEC)[:, 0] for gate in self.gates]
        return torch.cat([task(x) for task, x in zip(self.tasks, inputs, strict=True)], dim=1)


def heads_flops(in_dim: int, tasks: int, own: HeadsConfig, rows: int) -> int:
    """Forward FLOPs of TaskHeads: matrix products only."""
    shared = mlp_flops((in_dim, *own.shared), rows)
    head_in = in_dim if own.kind == "separate" else own.shared[-1]
    flops = tasks * mlp_flops((head_in, *own.hidden, 1), rows)
    if own.kind == "shared_bottom":
        return flops + shared
    if own.kind == "mmoe":
        mixing = tasks * 2 * rows * own.experts * (in_dim + own.shared[-1])
        return flops + own.experts * shared + mixing
    return flops
