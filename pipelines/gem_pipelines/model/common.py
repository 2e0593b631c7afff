"""Small parts that several blocks use unchanged.

**Dtypes.** Activations decide: parameters are float32 and are cast to the dtype of what comes in, where they are used,
so a model whose first tokens are bfloat16 (`ModelConfig.compute`) computes in it; gradients of parameters arrive in
float32. The cast is nothing where the dtypes agree. Norms take their statistics in float32 inside the kernel.

Letters: B rows, N tokens of a row, D width; leading dims are free where "..." stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_pipelines.model.config import ModelConfig

NORM_EPS = 1e-6


class Linear(nn.Linear):
    """nn.Linear in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.elementwise_affine:
            return super().forward(x)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def to_compute(x: Tensor, config: ModelConfig) -> Tensor:
    """`x` in the dtype in which the model computes; as it is where that is float32, or x is float64 (tests)."""
    return x.to(torch.bfloat16) if config.compute == "bfloat16" else x


def linear(in_dim: int, out_dim: int, *, bias: bool = False) -> nn.Linear:
    """A linear layer with Glorot-uniform weights and zero bias."""
    module = Linear(in_dim, out_dim, bias=bias)
    nn.init.xavier_uniform_(module.weight)
    if bias:
        nn.init.zeros_(module.bias)
    return module


def make_norm(dim: int, *, kind: str, affine: bool) -> nn.Module:
    """LayerNorm or RMSNorm over the last dim, with or without learned weights."""
    if kind == "rms":
        return RMSNorm(dim, eps=NORM_EPS, elementwise_affine=affine)
    return LayerNorm(dim, eps=NORM_EPS, elementwise_affine=affine)


class Mlp(nn.Module):
    """Linear layers with GELU between them: (..., dims[0]) -> (..., dims[-1]). `last_bias`: only the last has one;
    `last_wide`: the last computes in float32 at least.
    """

    def __init__(
        self, dims: Sequence[int], *, bias: bool = False, last_bias: bool | None = None, last_wide: bool = False
    ) -> None:
        super().__init__()
        self.last_wide = last_wide
        last = len(dims) - 2
        self.layers = nn.ModuleList(
            linear(a, b, bias=bias if i < last or last_bias is None else last_bias)
            for i, (a, b) in enumerate(pairwise(dims))
        )

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i == 0 else F.gelu(x)
            if self.last_wide and i + 1 == len(self.layers):
                x = x.to(torch.promote_types(x.dtype, torch.float32))
            x = layer(x)
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
        return torch.matmul(self.weight_MN.to(x_BND.dtype), x_BND)


def mlp_flops(dims: Sequence[int], rows: int) -> int:
    """Forward FLOPs of an Mlp on `rows` vectors: 2 per multiply-add. Example: (3, 5), 10 rows: 300."""
    return sum(2 * rows * a * b for a, b in pairwise(dims))
