"""The activations of the family, as plain differentiable functions of a score."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def gelu_poly(x: Tensor) -> Tensor:
    """The first terms of the series of x * Phi(x); see AttentionSpec for where it may be used."""
    x2 = x.square()
    return x * 0.5 + x2 * (0.3989423 + x2 * (-0.0664904 + x2 * 0.0099736))


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def identity(x: Tensor) -> Tensor:
    return x


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_poly": gelu_poly,
    "relu": F.relu,
    "relu2": relu2,
    "identity": identity,
}
