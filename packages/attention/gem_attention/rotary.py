"""Rotary embedding with log time gaps, on packed tensors: plain, differentiable, the definition for fused versions.

Source of the idea: rotary embedding, and in Kunlun's layer (arXiv 2602.10016) its phase extended by
tau = log(1 + dt / t_scale). The public notes leave open which gap dt is and how the two phases combine; here dt is the
age of the event at its sample's reference time, a coordinate of each token, so that scores depend on differences of
it as they do for positions; and the phases add. Letters: T packed tokens, H heads, D head dim, B samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_attention.interface import RotarySpec


def packed_positions(offsets: Tensor, total: int) -> Tensor:
    """(T,) int64 position of each token in its sample. Example: offsets [0, 2, 2, 5] -> 0 1 0 1 2."""
    token = torch.arange(total, device=offsets.device)
    return token - offsets[:-1][packed_samples(offsets, total)]


def packed_samples(offsets: Tensor, total: int) -> Tensor:
    """(T,) int64 sample of each token. Example: offsets [0, 2, 2, 5] -> 0 0 2 2 2."""
    token = torch.arange(total, device=offsets.device)
    return torch.searchsorted(offsets, token, right=True) - 1


def packed_ages(timestamps: Tensor, offsets: Tensor, reference: Tensor | None = None) -> Tensor:
    """(T,) int64 seconds, >= 0, from each event to its sample's reference time (B,), by default its last timestamp.

    Example: timestamps [10, 40, 7], offsets [0, 2, 3] -> [30, 0, 0]; events after the reference get 0.
    """
    if reference is None:
        if timestamps.shape[0] == 0:
            return timestamps
        reference = timestamps[(offsets[1:] - 1).clamp(min=0)]
    sample = packed_samples(offsets, timestamps.shape[0])
    return (reference[sample] - timestamps).clamp(min=0)


def rotary_angles(
    spec: RotarySpec, positions: Tensor, ages_s: Tensor | None, *, dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(T, D/2) angles in radians, dtype float32 or float64; shared by q and k, by all heads and by all layers.

    positions (T,) whole numbers; ages_s (T,) seconds >= 0, given if and only if spec.time_scale_s is.
    """
    if dim % 2 or dim <= 0:
        raise ValueError(f"dim={dim}: rotary turns pairs, so the head dim must be even and > 0")
    if (ages_s is None) != (spec.time_scale_s is None):
        raise ValueError(
            f"spec.time_scale_s is {spec.time_scale_s}, ages_s {'missing' if ages_s is None else 'given'}: "
            "give both or neither"
        )
    exponent = torch.arange(0, dim, 2, dtype=dtype, device=positions.device) / -dim
    angles = positions.to(dtype)[:, None] * spec.base**exponent
    if ages_s is not None and spec.time_scale_s is not None:
        if ages_s.shape != positions.shape:
            raise ValueError(f"ages_s {tuple(ages_s.shape)} and positions {tuple(positions.shape)} must agree in shape")
        gap = torch.log1p(ages_s.to(dtype) / spec.time_scale_s)
        angles = angles + gap[:, None] * spec.time_base**exponent
    return angles


def apply_rotary(x: Tensor, angles: Tensor, spec: RotarySpec) -> Tensor:
    """Turn the pairs of x (T, H, D) by angles (T, D/2); computed in the angles' dtype, returned in x's, contiguous.

    The gradient turns back by the same angles. Example, "interleaved", D = 2, angle pi/2: (1, 0) -> (0, 1).
    """
    if x.dim() != 3 or angles.shape != (x.shape[0], x.shape[2] // 2) or x.shape[2] % 2:
        raise ValueError(
            f"x (T, H, D) with even D needs angles (T, D/2); got {tuple(x.shape)} and {tuple(angles.shape)}"
        )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    wide = x.to(torch.promote_types(x.dtype, angles.dtype))
    if spec.pairing == "interleaved":
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    if spec.pairing == "interleaved":
        return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
    return torch.cat(turned, dim=-1).to(x.dtype)
