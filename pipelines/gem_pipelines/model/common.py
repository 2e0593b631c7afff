"""Small parts that several blocks use unchanged.

Letters: B rows, N tokens of a row, D width; leading dims are free where "..." stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-6


def linear(in_dim: int, out_dim: int, *, bias: bool = False) -> nn.Linear:
    """A linear layer with Glorot-uniform weights and zero bias."""
    module = nn.Linear(in_dim, out_dim, bias=bias)
    nn.init.xavier_uniform_(module.weight)
    if bias:
        nn.init.zeros_(module.bias)
    return module


def make_norm(dim: int, *, kind: str, affine: bool) -> nn.Module:
    """LayerNorm or RMSNorm over the last dim, with or without learned weights."""
    if kind == "rms":
        return nn.RMSNorm(dim, eps=NORM_EPS, elementwise_affine=affine)
    return nn.LayerNorm(dim, eps=NORM_EPS, elementwise_affine=affine)


class Mlp(nn.Module):
    """Linear layers with GELU between them: (..., dims[0]) -> (..., dims[-1]). `last_bias`: only the last has one."""

    def __init__(self, dims: Sequence[int], *, bias: bool = False, last_bias: bool | None = None) -> None:
        super().__init__()
        last = len(dims) - 2
        self.layers = nn.ModuleList(
            linear(a, b, bias=bias if i < last or last_bias is None else last_bias)
            for i, (a, b) in enumerate(pairwise(dims))
        )

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x if i == 0 else F.gelu(x))
        return x


class Gate(nn.Module):
    """z * sigmoid(linear(z)) over the last dim.

    InterFormer prints Gate(z) = sigmoid(z * MLP(z)); its public re-implementations multiply z by the gate, which lets
    magnitudes through. That form is used here.
    """

    def __init__(self, dim: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = linear(dim, dim, bias=bias)

    def forward(self, z: Tensor) -> Tensor:
        return z * torch.sigmoid(self.gate(z))


class TokenMix(nn.Module):
    """A linear map over the token dim: (B, N, D) -> (B, M, D), out_bmd = sum_n weight_mn x_bnd. Wukong's LCB."""

    def __init__(self, tokens_in: int, tokens_out: int) -> None:
        super().__init__()
        self.weight_MN = nn.Parameter(torch.empty(tokens_out, tokens_in))
        nn.init.xavier_uniform_(self.weight_MN)

    def forward(self, x_BND: Tensor) -> Tensor:
        return torch.matmul(self.weight_MN, x_BND)


def mlp_flops(dims: Sequence[int], rows: int) -> int:
    """Forward FLOPs of an Mlp on `rows` vectors: 2 per multiply-add. Example: (3, 5), 10 rows: 300."""
    return sum(2 * rows * a * b for a, b in pairwise(dims))
