"""AdamW against its formula, the schedule by hand, clipping, decay, and the state."""

from __future__ import annotations

import math

import pytest
import torch
from gem_pipelines.config import OptimizerConfig
from gem_pipelines.optimizer import DenseOptimizer, GradientError, learning_rate_factor
from torch import nn


def factors(schedule: str, *, warmup: int, total: int, floor: float = 0.0) -> list[float]:
    return [
        learning_rate_factor(step, warmup_steps=warmup, total_steps=total, schedule=schedule, floor=floor)
        for step in range(total + 2)
    ]


def test_schedules_by_hand():
    assert factors("constant", warmup=4, total=5) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    half = 0.5 * (1 + math.cos(math.pi * 0.25))
    cosine = factors("cosine", warmup=2, total=6, floor=0.1)
    assert cosine == pytest.approx([0.5, 1.0, 1.0, 0.1 + 0.9 * half, 0.55, 0.1 + 0.9 * (1 - half), 0.1, 0.1])
    with pytest.raises(ValueError, match=r"'linear'.*'constant', 'cosine'"):
        factors("linear", warmup=0, total=3)


def make(config: OptimizerConfig, *, seed: int = 0) -> tuple[nn.Module, DenseOptimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    return model, DenseOptimizer(model.named_parameters(), config, total_steps=10)


def set_gradients(model: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def test_one_step_is_adamw_with_decay_of_matrices_only():
    config = OptimizerConfig(lr=0.1, weight_decay=0.5, max_grad_norm=None, warmup_steps=2, schedule="constant")
    model, optimizer = make(config)
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    set_gradients(model, 1)
    gradients = {name: p.grad.double().clone() for name, p in model.named_parameters()}
    lr, norm = optimizer.step(0)
    assert lr == 0.05
    assert norm == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in gradients.values())), rel=1e-6)
    for name, parameter in model.named_parameters():
        g, w = gradients[name], before[name]
        decayed = w * (1 - lr * config.weight_decay) if w.ndim >= 2 else w
        expected = decayed - lr * g / (g.abs() + config.eps)  # first step: both moments are g and g^2 after correction
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)
        assert parameter.grad is None


def test_clipping_scales_to_the_limit():
    config = OptimizerConfig(
        lr=0.1, max_grad_norm=0.5, weight_decay=0.0, schedule="constant", betas=(0.0, 0.0), eps=1.0
    )
    model, optimizer = make(config)
    before = [p.detach().clone() for p in model.parameters()]
    set_gradients(model, 2, scale=10.0)
    gradients = [p.grad.clone() for p in model.parameters()]
    _, norm = optimizer.step(0)
    assert norm > 5
    for parameter, w, g in zip(model.parameters(), before, gradients, strict=True):
        clipped = g * 0.5 / norm
        torch.testing.assert_close(parameter.detach(), w - 0.1 * clipped / (clipped.abs() + 1.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("limit", [1.0, None])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, limit):
    model, optimizer = make(OptimizerConfig(lr=0.1, warmup_steps=0, max_grad_norm=limit))
    set_gradients(model, 1)
    optimizer.step(0)
    before = [value.clone() for value in [*model.parameters(), *optimizer.state_tensors().values()]]
    set_gradients(model, 2)
    model[0].weight.grad[1, 2] = bad
    with pytest.raises(GradientError, match=r"step 2: the norm of the dense gradients is (nan|inf)"):
        optimizer.step(1)
    after = [*model.parameters(), *optimizer.state_tensors().values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_state_continues_bit_for_bit():
    config = OptimizerConfig(lr=0.01, warmup_steps=3)
    model, optimizer = make(config)
    for step in range(3):
        set_gradients(model, step)
        optimizer.step(step)
    copy, resumed = make(config, seed=9)
    copy.load_state_dict(model.state_dict())
    resumed.load_state_tensors({key: value.clone() for key, value in optimizer.state_tensors().items()})
    assert set(optimizer.state_tensors()) == set(optimizer.expected_shapes())
    for step in range(3, 6):
        set_gradients(model, step)
        set_gradients(copy, step)
        assert optimizer.step(step) == resumed.step(step)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))


def test_the_fused_update_is_the_plain_one_up_to_rounding_and_can_be_left_out():
    config = OptimizerConfig(lr=0.05, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2)
    (plain, first), (fused, second) = make(config), make(config)
    second = DenseOptimizer(fused.named_parameters(), config, total_steps=10, fused=True)
    for step in range(5):
        for model, optimizer in ((plain, first), (fused, second)):
            set_gradients(model, step)
            optimizer.step(step)
    torch.testing.assert_close(fused.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)
    before = {key: value.clone() for key, value in (fused.state_dict() | second.state_tensors()).items()}
    set_gradients(fused, 9, scale=float("nan"))
    second.update(5, skipped=torch.tensor(True))
    after = fused.state_dict() | second.state_tensors()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    set_gradients(fused, 9)
    second.update(5, skipped=torch.tensor(False))
    assert int(second.state_tensors()["0.weight.step"]) == 6
    resumed = DenseOptimizer(make(config)[0].named_parameters(), config, total_steps=10, fused=True)
    resumed.load_state_tensors(second.state_tensors())
    assert all(torch.equal(resumed.state_tensors()[key], value) for key, value in second.state_tensors().items())
