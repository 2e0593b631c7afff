"""What the block's specs and calls refuse; the same words for every implementation. Host numbers only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gem_attention.interface import GateSpec, HstuSpec, ProjectionSpec

NORMS = ("layer", "rms")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def _eps(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value!r}: expected a finite number >= 0")


def _whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a whole number >= 1")


def check_projection_spec(spec: ProjectionSpec) -> None:
    """Widths, and indices that point at outputs which can be activated or turned."""
    _one_of("projection.norm", spec.norm, NORMS)
    _eps("projection.eps", spec.eps)
    if not isinstance(spec.widths, tuple) or not spec.widths:
        raise ValueError(f"projection.widths={spec.widths!r}: expected a tuple with the width of each output")
    for index, width in enumerate(spec.widths):
        _whole(f"projection.widths[{index}]", width)
    for name in ("silu", "turned"):
        chosen = getattr(spec, name)
        if not isinstance(chosen, tuple) or sorted(set(chosen) & set(range(len(spec.widths)))) != sorted(chosen):
            raise ValueError(
                f"projection.{name}={chosen!r}: expected a tuple of different outputs among 0..{len(spec.widths) - 1}"
            )
    if bool(spec.turned) != (spec.rotary is not None):
        raise ValueError(
            f"projection.turned={spec.turned!r} with rotary={spec.rotary!r}: name both what is turned and how, or none"
        )
    if spec.turned and (spec.head_dim < 2 or spec.head_dim % 2):
        raise ValueError(f"projection.head_dim={spec.head_dim!r}: rotary turns pairs; expected an even number >= 2")
    for index in spec.turned:
        if spec.widths[index] % spec.head_dim:
            raise ValueError(
                f"projection.widths[{index}]={spec.widths[index]} is turned in heads of {spec.head_dim}: expected a "
                "multiple of head_dim"
            )


def check_gate_spec(spec: GateSpec) -> None:
    """Names and eps."""
    _one_of("gate.activation", spec.activation, ("none", "silu", "sigmoid"))
    _one_of("gate.norm", spec.norm, NORMS)
    _eps("gate.eps", spec.eps)


def check_hstu_spec(spec: HstuSpec) -> None:
    """Sizes; the rest is checked by the projection and the gate that the block is made of."""
    _one_of("hstu.activated", spec.activated, ("u", "all"))
    for name in ("dim", "heads", "qk_dim", "v_dim"):
        _whole(f"hstu.{name}", getattr(spec, name))


def _check_tensor(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    if x.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    if x.dtype != like.dtype or x.device != like.device:
        raise ValueError(
            f"{name}: {x.dtype} on {x.device}, expected {like.dtype} on {like.device} as the first tensor has: cast or "
            "move one of them"
        )


def check_norm_linear(x: Tensor, weight: Tensor, table: Tensor | None, spec: ProjectionSpec) -> None:
    """x (T, D), weight (sum of widths, D), table (T, head_dim) float32 (float64 with float64) if and only if turned."""
    if x.dim() != 2 or x.shape[1] < 1:
        raise ValueError(f"x: expected (tokens, dim) with dim >= 1, got shape {tuple(x.shape)}")
    _one_of("dtype of x", x.dtype, _DTYPES)
    _check_tensor("weight", weight, (sum(spec.widths), x.shape[1]), x)
    if (table is None) == bool(spec.turned):
        raise ValueError(
            f"the spec turns outputs {spec.turned!r}, the rotary table is {'missing' if table is None else 'given'}: "
            "make one with block_api.rotary_table, or leave it out"
        )
    if table is not None:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if table.shape != (x.shape[0], spec.head_dim) or table.dtype != wide or table.device != x.device:
            raise ValueError(
                f"table: expected {(x.shape[0], spec.head_dim)} {wide} on {x.device}, got {tuple(table.shape)} "
                f"{table.dtype} on {table.device}"
            )


def check_gate(attention: Tensor, u: Tensor) -> None:
    """attention (T, H, E), u (T, H * E)."""
    if attention.dim() != 3 or min(attention.shape[1:]) < 1:
        raise ValueError(f"attention: expected (tokens, heads, dim), got shape {tuple(attention.shape)}")
    _one_of("dtype of attention", attention.dtype, _DTYPES)
    _check_tensor("u", u, (attention.shape[0], attention.shape[1] * attention.shape[2]), attention)


def check_gated_linear(attention: Tensor, u: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    """weight (D, H * E), residual (T, D) or None."""
    check_gate(attention, u)
    if weight.dim() != 2:
        raise ValueError(f"weight: expected (dim, heads * head dim), got shape {tuple(weight.shape)}")
    _check_tensor("weight", weight, (weight.shape[0], u.shape[1]), attention)
    if residual is not None:
        _check_tensor("residual", residual, (attention.shape[0], weight.shape[0]), attention)
