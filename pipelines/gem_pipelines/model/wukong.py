"""Wukong (arXiv 2403.02545): factorization machines and linear compression, stacked.

    FM(X)   = X (X^T Y), Y learned n x k: the pairwise products X X^T, compressed, in O(n k d) instead of O(n^2 d)
    FMB(X)  = reshape(MLP(norm(flatten(FM(X))))) -> n_F tokens
    LCB(X)  = W X -> n_L tokens
    X'      = norm(concat(FMB(X), LCB(X)) + X)      the residual through a linear map of the tokens where counts differ

Layer l thus reaches interactions of order 2^l. WukongExperts is Kunlun's global interaction: the tokens are split over
experts, each a Wukong module on its part, and their outputs are concatenated.
Letters: B rows, N tokens in, M tokens out, D width, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from gem_pipelines.model.common import Mlp, TokenMix, make_norm
from gem_pipelines.model.config import InteractionConfig, ModelConfig


class FactorizationMachineBlock(nn.Module):
    """x (B, N, D) -> (B, tokens_out, D)."""

    def __init__(self, tokens_in: int, tokens_out: int, config: ModelConfig) -> None:
        super().__init__()
        own = config.interaction
        self.dim = config.dim
        self.y_NR = nn.Parameter(torch.empty(tokens_in, own.rank).normal_(std=tokens_in**-0.5))
        self.norm = make_norm(tokens_in * own.rank, kind=config.norm, affine=config.norm_affine)
        self.mlp = Mlp((tokens_in * own.rank, *own.hidden, tokens_out * config.dim), bias=config.bias)

    def forward(self, x_BND: Tensor) -> Tensor:
        fm_BNR = x_BND @ (x_BND.transpose(1, 2) @ self.y_NR.to(x_BND.dtype))
        return self.mlp(self.norm(fm_BNR.flatten(1))).unflatten(1, (-1, self.dim))


class Wukong(nn.Module):
    """x (B, N, D) -> (B, fm_tokens + linear_tokens, D)."""

    def __init__(self, tokens_in: int, config: ModelConfig, *, fm_tokens: int, linear_tokens: int) -> None:
        super().__init__()
        tokens_out = fm_tokens + linear_tokens
        self.fmb = FactorizationMachineBlock(tokens_in, fm_tokens, config)
        self.lcb = TokenMix(tokens_in, linear_tokens)
        self.residual = nn.Identity() if tokens_in == tokens_out else TokenMix(tokens_in, tokens_out)
        self.norm = make_norm(config.dim, kind=config.norm, affine=config.norm_affine)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.norm(torch.cat([self.fmb(x_BND), self.lcb(x_BND)], dim=1) + self.residual(x_BND))


class TokenParts(nn.ModuleList):
    """Experts on parts of the tokens, of parts[i] tokens each; outputs concatenated: x (B, N, D) -> (B, M, D)."""

    def __init__(self, experts: Iterable[nn.Module], *, parts: Sequence[int]) -> None:
        super().__init__(experts)
        self.parts = list(parts)

    def forward(self, x_BND: Tensor) -> Tensor:
        parts = x_BND.split(self.parts, dim=1)
        return torch.cat([expert(part) for expert, part in zip(self, parts, strict=True)], dim=1)


class WukongExperts(nn.Module):
    """Wukong modules on parts of the tokens, each part as even as it can be."""

    def __init__(self, tokens_in: int, config: ModelConfig) -> None:
        super().__init__()
        own = config.interaction
        parts = split_evenly(tokens_in, own.experts)
        fm_tokens, linear_tokens = own.fm_tokens // own.experts, own.linear_tokens // own.experts
        made = [Wukong(part, config, fm_tokens=fm_tokens, linear_tokens=linear_tokens) for part in parts]
        self.experts = TokenParts(made, parts=parts)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.experts(x_BND)


def split_evenly(count: int, parts: int) -> list[int]:
    """Sizes of `parts` parts of `count`, larger ones first. Example: 7 in 3 parts: 3, 2, 2. Raises ValueError if 0."""
    if count < parts:
        raise ValueError(f"{count} tokens cannot be split over {parts} experts: use fewer experts")
    return [count // parts + (i < count % parts) for i in range(parts)]


def fm_flops(tokens_in: int, tokens_out: int, config: ModelConfig, rows: int) -> int:
    """Forward FLOPs of a FactorizationMachineBlock: two products with Y's rank, then the MLP."""
    own = config.interaction
    products = 2 * 2 * rows * tokens_in * config.dim * own.rank
    widths = (tokens_in * own.rank, *own.hidden, tokens_out * config.dim)
    return products + sum(2 * rows * a * b for a, b in pairwise(widths))


def wukong_flops(tokens_in: int, fm_tokens: int, linear_tokens: int, config: ModelConfig, rows: int) -> int:
    """Forward FLOPs of a Wukong module."""
    tokens_out = fm_tokens + linear_tokens
    residual = 0 if tokens_in == tokens_out else tokens_in * tokens_out
    return fm_flops(tokens_in, fm_tokens, config, rows) + 2 * rows * config.dim * (tokens_in * linear_tokens + residual)


def experts_flops(tokens_in: int, own: InteractionConfig, config: ModelConfig, rows: int) -> int:
    """Forward FLOPs of WukongExperts."""
    fm, lin = own.fm_tokens // own.experts, own.linear_tokens // own.experts
    return sum(wukong_flops(part, fm, lin, config, rows) for part in split_evenly(tokens_in, own.experts))
