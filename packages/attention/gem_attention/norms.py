"""The norms around attention, as plain functions: the definitions that fused versions are compared with.

No affine weights (they cost bandwidth and the published models saw almost no effect on quality). Statistics in
float32 (float64 for float64 input), results in the input's dtype. Sources: the output stage of HSTU (arXiv
2402.17152): y = u * norm(attention), then a projection; RMSNorm (arXiv 1910.07467).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Norm = Literal["layer", "rms"]


def normalize(x: Tensor, *, norm: Norm = "layer", eps: float = 1e-5) -> Tensor:
    """Over the last dim. "layer": (x - mean) / sqrt(var + eps), biased variance; "rms": x / sqrt(mean(x^2) + eps).

    Example, "rms", eps 0: (3, 4) -> (3, 4) / sqrt(12.5) = (0.8485, 1.1314).
    """
    if norm not in ("layer", "rms"):
        raise ValueError(f"norm={norm!r}: expected 'layer' or 'rms'")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if norm == "layer":
        wide = wide - wide.mean(dim=-1, keepdim=True)
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def gated_norm(
    attention_THE: Tensor, u_TC: Tensor, *, norm: Norm = "layer", per_head: bool = False, eps: float = 1e-5
) -> Tensor:
    """u * norm(attention) -> (T, C), C = H * E: what an HSTU block projects and adds to its input.

    per_head: statistics over each head's E values instead of over all C. u is used as given (apply SiLU before, where
    the model wants it: the public variants differ in that).
    """
    tokens, heads, dim = attention_THE.shape
    if u_TC.shape != (tokens, heads * dim):
        raise ValueError(
            f"u: expected {(tokens, heads * dim)} for attention {tuple(attention_THE.shape)}, got {tuple(u_TC.shape)}"
        )
    rows = attention_THE if per_head else attention_THE.flatten(1)
    return u_TC * normalize(rows, norm=norm, eps=eps).reshape(tokens, heads * dim)
