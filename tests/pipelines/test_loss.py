"""The loss: its value, its gradient, and that the number of processes does not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gem_pipelines.loss import bce_by_task, mean_by_task, metric_sums, scaled_loss
from gem_pipelines.metrics import BinarySums

TASKS = 2


def batch(rows: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, TASKS, generator=generator) * 2
    labels = (torch.rand(rows, TASKS, generator=generator) < 0.4).float()
    return logits, labels, torch.randint(0, 3, (rows, TASKS), generator=generator).float()


def loss_of(logits, labels, weights, *, world_size: int = 1, total=None, task_weights=(1.0, 0.5)):
    total = weights.double().sum(0) if total is None else total
    return scaled_loss(bce_by_task(logits, labels, weights), total, task_weights=task_weights, world_size=world_size)


def test_value_by_hand():
    logits, labels = torch.tensor([[0.0, 2.0], [1.0, -1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    weights = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    first = (np.log(2) + 3 * np.log1p(np.exp(1.0))) / 4
    second = np.log1p(np.exp(2.0))
    assert float(loss_of(logits, labels, weights)) == pytest.approx(first + 0.5 * second, rel=1e-12)


@pytest.mark.parametrize("cut", [0, 1, 5, 12])
def test_average_of_the_ranks_gradients_is_the_gradient_of_the_whole(cut):
    logits, labels, weights = batch(12)
    total = weights.double().sum(0)
    whole = logits.clone().requires_grad_()
    loss_of(whole, labels, weights).backward()
    gradients, losses = [], []
    for part in (slice(0, cut), slice(cut, 12)):
        mine = logits[part].clone().requires_grad_()
        loss = loss_of(mine, labels[part], weights[part], world_size=2, total=total)
        loss.backward()
        gradients.append(mine.grad / 2)  # what averaging over two ranks leaves of a row that only one of them has
        losses.append(loss.item())
    torch.testing.assert_close(torch.cat(gradients), whole.grad, rtol=1e-6, atol=1e-9)
    assert sum(losses) / 2 == pytest.approx(float(loss_of(logits, labels, weights)), rel=1e-12)


def test_a_row_of_weight_zero_has_no_value_and_no_gradient():
    logits = torch.tensor([[float("inf"), 1e30], [0.3, 0.2]], requires_grad=True)
    labels, weights = torch.zeros(2, TASKS), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    loss = loss_of(logits, labels, weights)
    loss.backward()
    assert loss.item() == pytest.approx(float(loss_of(logits[1:].detach(), labels[1:], weights[1:])), rel=1e-12)
    assert logits.grad[0].tolist() == [0.0, 0.0]


def test_a_task_without_weight_drops_out():
    logits, labels, weights = batch(6)
    weights[:, 1] = 0
    logits.requires_grad_()
    loss = loss_of(logits, labels, weights)
    loss.backward()
    expected = loss_of(logits.detach()[:, :1], labels[:, :1], weights[:, :1], task_weights=(1.0,))
    assert loss.item() == pytest.approx(float(expected), rel=1e-12)
    assert bool((logits.grad[:, 1] == 0).all())
    assert mean_by_task(torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0])).tolist() == [0.25, 0.0]


def test_metric_sums_are_those_of_the_metrics():
    logits, labels, weights = batch(40)
    found = metric_sums(logits, labels, weights, bce_by_task(logits, labels, weights))
    for task in range(TASKS):
        p_N = torch.sigmoid(logits[:, task].double()).numpy()
        expected = BinarySums.of(p_N, labels[:, task].double().numpy(), weights[:, task].double().numpy())
        assert found[task].tolist() == pytest.approx(expected.to_list(), rel=1e-9)
