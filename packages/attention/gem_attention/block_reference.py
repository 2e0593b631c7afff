"""The block around attention, as its definition: plain, differentiable PyTorch.

`dtype` says in which precision every step is computed; the result has the input's dtype. The reference computes in
float32 (float64 for float64) and rounds once; the eager implementation and the yardstick of errors compute in the
input's own dtype. Sources: HSTU (arXiv 2402.17152) for projection, gate and block; rotary as in `rotary`.

Letters: T tokens, D width of the model, N width of an output, H heads, K head dim of q and k, E head dim of v and u.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gem_attention.interface import GateSpec, NormKind, ProjectionSpec
from gem_attention.norms import normalize


def wide_dtype(x: Tensor) -> torch.dtype:
    """In what the reference computes."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rotary_table(angles_TK2: Tensor) -> Tensor:
    """(T, K): cosines, then sines, of rotary.rotary_angles (T, K / 2). One a batch serves all heads and layers.

    Example: angles [[0, pi / 2]] -> [[1, 0, 0, 1]].
    """
    return torch.cat([angles_TK2.cos(), angles_TK2.sin()], dim=-1)


def turn(x_TN: Tensor, table_TK: Tensor, pairing: Literal["interleaved", "halves"]) -> Tensor:
    """rotary.apply_rotary on heads side by side, angles given as their table; computed in the wider of the two dtypes.

    Example, "halves", K = 2, a table of a quarter turn [0, 1]: (1, 0, 5, 6) -> (0, 1, -6, 5).
    """
    dim = table_TK.shape[1]
    wide = x_TN.to(torch.promote_types(x_TN.dtype, table_TK.dtype)).unflatten(-1, (-1, dim))
    cos, sin = (part[:, None] for part in table_TK.chunk(2, dim=-1))
    if pairing == "interleaved":
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    joined = torch.stack(turned, dim=-1).flatten(-2) if pairing == "interleaved" else torch.cat(turned, dim=-1)
    return joined.flatten(1).to(x_TN.dtype)


def products(normed_TD: Tensor, weight_ND: Tensor, spec: ProjectionSpec) -> tuple[Tensor, ...]:
    """norm(x) @ weight_i^T, not yet activated or turned."""
    return (normed_TD @ weight_ND.T).split(spec.widths, dim=-1)


def finish(product: Tensor, index: int, table: Tensor | None, spec: ProjectionSpec) -> Tensor:
    """act and turn of output `index`."""
    y = F.silu(product) if index in spec.silu else product
    if index in spec.turned and table is not None and spec.rotary is not None:
        y = turn(y, table, spec.rotary.pairing)
    return y


def norm_linear(
    x_TD: Tensor, weight_ND: Tensor, *, spec: ProjectionSpec, table: Tensor | None = None, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The outputs of a projection, each (T, width)."""
    normed_TD = normalize(x_TD.to(dtype), norm=spec.norm, eps=spec.eps)
    parts = products(normed_TD, weight_ND.to(dtype), spec)
    return tuple(finish(part, i, table, spec).to(x_TD.dtype) for i, part in enumerate(parts))


def library_norm(x: Tensor, *, norm: NormKind, eps: float) -> Tensor:
    """norms.normalize by torch's own functions, which keep x and two numbers a row instead of several copies of x."""
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], eps=eps)
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def gated(
    attention_THE: Tensor,
    u_TC: Tensor,
    *,
    spec: GateSpec,
    dtype: torch.dtype,
    normalize: Callable[..., Tensor] = normalize,
) -> Tensor:
    """act(u) * norm(attention), (T, H * E)."""
    rows = attention_THE if spec.per_head else attention_THE.flatten(1)
    normed = normalize(rows.to(dtype), norm=spec.norm, eps=spec.eps).reshape(u_TC.shape)
    u = u_TC.to(dtype)
    gate = {"none": lambda: u, "silu": lambda: F.silu(u), "sigmoid": lambda: u.sigmoid()}[spec.activation]()
    return (gate * normed).to(attention_THE.dtype)


def gated_linear(
    attention_THE: Tensor, u_TC: Tensor, weight_DC: Tensor, residual_TD: Tensor | None, *, spec: GateSpec,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """residual + (act(u) * norm(attention)) @ weight^T, (T, D)."""
    out = gated(attention_THE.to(dtype), u_TC.to(dtype), spec=spec, dtype=dtype) @ weight_DC.to(dtype).T
    return (out if residual_TD is None else residual_TD.to(dtype) + out).to(attention_THE.dtype)
