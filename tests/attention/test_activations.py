"""Activations against their formulas in Python floats, and the stated reach of the polynomial GELU."""

import math

import pytest
import torch
from gem_attention.activations import POINTWISE
from gem_attention.eager_backward import POINTWISE_BACKWARD


def phi(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


FORMULAS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * phi(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_poly": lambda x: 0.5 * x + 0.3989423 * x**2 - 0.0664904 * x**4 + 0.0099736 * x**6,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "identity": lambda x: x,
}


@pytest.mark.parametrize("name", POINTWISE)
def test_values_and_slopes(name):
    x = torch.linspace(-3.05, 3.05, 62, dtype=torch.float64, requires_grad=True)  # never 0, where relu has no slope
    y = POINTWISE[name](x)
    expected = torch.tensor([FORMULAS[name](float(value)) for value in x.detach()], dtype=torch.float64)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(POINTWISE[name], (x,))
    upstream = torch.cos(x.detach())
    (slope,) = torch.autograd.grad(y, x, upstream)
    torch.testing.assert_close(POINTWISE_BACKWARD[name](upstream, x.detach()), slope, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", POINTWISE)
def test_zero_stays_zero(name):
    # eager hides a pair by setting its score to 0
    assert POINTWISE[name](torch.zeros(1)).item() == 0.0


@pytest.mark.parametrize(("reach", "error"), [(1.0, 1.1e-3), (1.5, 2.5e-2), (2.0, 0.22)])
def test_reach_of_the_polynomial(reach, error):
    x = torch.linspace(-reach, reach, 10_001, dtype=torch.float64)
    worst = (POINTWISE["gelu_poly"](x) - torch.nn.functional.gelu(x)).abs().max().item()
    assert 0.9 * error < worst <= error
