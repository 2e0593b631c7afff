"""DHEN (arXiv 2203.11014): several kinds of interaction in parallel, X' = norm(sum_i Interaction_i(X) + shortcut(X)).

Members, each (B, N, D) -> (B, M, D):
    fm         Wukong's factorization machine block
    linear     a linear map of the tokens
    dcn        DCN-v2's cross layer on the flattened tokens, low rank: x * (U V x) + x, then a linear map of the tokens
    mlp        an MLP on the flattened tokens
    attention  softmax attention between the tokens of a row, then a linear map of the tokens
The members are the experts that an expert-parallel run puts on different ranks: they share nothing but input and sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_pipelines.model.common import Mlp, TokenMix, linear, make_norm, mlp_flops
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.wukong import FactorizationMachineBlock, fm_flops


class CrossMember(nn.Module):
    """DCN-v2: x0 * (U V x0) + x0 over all N * D values of a row, then N -> M tokens."""

    def __init__(self, tokens_in: int, tokens_out: int, config: ModelConfig) -> None:
        super().__init__()
        width = tokens_in * config.dim
        self.down = linear(width, config.interaction.dcn_rank)
        self.up = linear(config.interaction.dcn_rank, width, bias=config.bias)
        self.mix = TokenMix(tokens_in, tokens_out)

    def forward(self, x_BND: Tensor) -> Tensor:
        flat = x_BND.flatten(1)
        crossed = flat * self.up(self.down(flat)) + flat
        return self.mix(crossed.view_as(x_BND))


class MlpMember(nn.Module):
    """An MLP on the flattened tokens."""

    def __init__(self, tokens_in: int, tokens_out: int, config: ModelConfig) -> None:
        super().__init__()
        self.dim = config.dim
        self.mlp = Mlp((tokens_in * config.dim, *config.interaction.hidden, tokens_out * config.dim), bias=config.bias)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.mlp(x_BND.flatten(1)).unflatten(1, (-1, self.dim))


class AttentionMember(nn.Module):
    """Single-head softmax attention between a row's tokens, then N -> M tokens."""

    def __init__(self, tokens_in: int, tokens_out: int, config: ModelConfig) -> None:
        super().__init__()
        self.qkv = linear(config.dim, 3 * config.dim, bias=config.bias)
        self.mix = TokenMix(tokens_in, tokens_out)

    def forward(self, x_BND: Tensor) -> Tensor:
        q_BND, k_BND, v_BND = self.qkv(x_BND).chunk(3, dim=-1)
        weights_BNN = F.softmax(q_BND @ k_BND.transpose(1, 2) * x_BND.shape[-1] ** -0.5, dim=-1)
        return self.mix(weights_BNN @ v_BND)


def _fm(tokens_in: int, tokens_out: int, config: ModelConfig) -> nn.Module:
    return FactorizationMachineBlock(tokens_in, tokens_out, config)


def _linear(tokens_in: int, tokens_out: int, config: ModelConfig) -> nn.Module:
    return TokenMix(tokens_in, tokens_out)


MEMBERS = {"fm": _fm, "linear": _linear, "dcn": CrossMember, "mlp": MlpMember, "attention": AttentionMember}


class MemberSum(nn.ModuleDict):
    """The sum of all members' outputs: x (B, N, D) -> (B, M, D)."""

    def forward(self, x_BND: Tensor) -> Tensor:
        return torch.stack([member(x_BND) for member in self.values()]).sum(dim=0)


class Dhen(nn.Module):
    """x (B, N, D) -> (B, fm_tokens + linear_tokens, D)."""

    def __init__(self, tokens_in: int, config: ModelConfig) -> None:
        super().__init__()
        tokens_out = config.interaction.tokens
        self.members = MemberSum(
            {name: MEMBERS[name](tokens_in, tokens_out, config) for name in config.interaction.members}
        )
        self.shortcut = nn.Identity() if tokens_in == tokens_out else TokenMix(tokens_in, tokens_out)
        self.norm = make_norm(config.dim, kind=config.norm, affine=config.norm_affine)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.norm(self.members(x_BND) + self.shortcut(x_BND))


def dhen_flops(tokens_in: int, config: ModelConfig, rows: int) -> int:
    """Forward FLOPs of a Dhen module: matrix products only."""
    own, n, m, d = config.interaction, tokens_in, config.interaction.tokens, config.dim
    mix = 2 * rows * n * m * d
    count = {
        "fm": lambda: fm_flops(n, m, config, rows),
        "linear": lambda: mix,
        "dcn": lambda: 2 * 2 * rows * n * d * own.dcn_rank + mix,
        "mlp": lambda: mlp_flops((n * d, *own.hidden, m * d), rows),
        "attention": lambda: 2 * rows * n * d * 3 * d + 2 * 2 * rows * n * n * d + mix,
    }
    return sum(count[name]() for name in own.members) + (0 if n == m else mix)
