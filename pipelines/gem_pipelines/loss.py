"""Weighted binary cross entropy of several tasks, normalised so that the number of processes does not matter.

    loss = sum over tasks t of task_weight_t * ( sum_b w_bt * BCE(logit_bt, y_bt) ) / W_t,

W_t being the weight sum of the whole optimizer step, over all ranks and accumulated batches. It is known before the
forward pass, since labels and weights are data. A task without weight in a step contributes 0.

Both the dense all-reduce (DDP) and TorchRec's backward exchange average over ranks, so each rank back-propagates
`world_size` times its share of the loss: the average of the ranks' gradients is then exactly the gradient of the loss
above. Dividing by the local weight sum instead would weigh a rank with few rows too much.

Sums are taken in float64: T x B numbers, and the loss of one and of two processes then differ by the rounding of the
logits only.

Legend: B rows, T tasks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bce_by_task(logits_BT: Tensor, labels_BT: Tensor, weights_BT: Tensor) -> Tensor:
    """(T,) float64: sum over rows of weight * cross entropy, nats.

    A row of weight 0 gives exactly 0, and no gradient, whatever its logit.
    """
    bce_BT = F.binary_cross_entropy_with_logits(logits_BT.double(), labels_BT.double(), reduction="none")
    weights_BT = weights_BT.double()
    return torch.where(weights_BT > 0, weights_BT * bce_BT, 0.0).sum(0)


def scaled_loss(
    loss_sum_T: Tensor, global_weight_T: Tensor, *, task_weights: tuple[float, ...] | Tensor, world_size: int
) -> Tensor:
    """This rank's scalar to back-propagate: world_size * sum_t task_weight_t * loss_sum_t / global_weight_t.

    Two tasks with loss sums (3, 1), global weights (6, 0) and task weights (1, 1) on one process: 0.5; the second
    task has no weight anywhere and drops out.
    """
    weight_T = task_weights if isinstance(task_weights, Tensor) else loss_sum_T.new_tensor(task_weights)
    return world_size * mean_by_task(loss_sum_T, global_weight_T).mul(weight_T).sum()


def mean_by_task(loss_sum_T: Tensor, global_weight_T: Tensor) -> Tensor:
    """loss_sum / global_weight, 0 where the weight is 0."""
    present_T = global_weight_T > 0
    return torch.where(present_T, loss_sum_T / torch.where(present_T, global_weight_T, 1.0), 0.0)


def metric_sums(logits_BT: Tensor, labels_BT: Tensor, weights_BT: Tensor, loss_sum_T: Tensor) -> Tensor:
    """(T, 5) float64 sums of one batch, columns as `metrics.BinarySums.FIELDS`; without gradient.

    The log loss comes from the logits, so that it stays exact where the probability rounds to 0 or 1.
    """
    with torch.no_grad():
        w_BT, y_BT = weights_BT.double(), labels_BT.double()
        p_BT = torch.sigmoid(logits_BT.double())
        columns = [w_BT.sum(0), (w_BT * y_BT).sum(0), (w_BT * p_BT).sum(0), loss_sum_T, (w_BT > 0).double().sum(0)]
        return torch.stack([column.detach() for column in columns], dim=1)
