"""One step of row-wise AdaGrad on rows that are given once each, for tables whose gradients come from outside FBGEMM.

The same formula as `reference.rowwise_adagrad_`, without the search for repeated ids. A row without gradient stays as
it is: its moment grows by 0 and 0 / (sqrt(0) + eps) is 0.
"""

from __future__ import annotations

from torch import Tensor


def step_rows_(
    weight_RD: Tensor, momentum_R: Tensor, rows_U: Tensor, grad_UD: Tensor, *, lr: float, eps: float
) -> None:
    """In place on rows `rows_U`, all different, of weight and momentum."""
    moment_U = momentum_R[rows_U] + grad_UD.square().mean(dim=1)
    momentum_R.index_copy_(0, rows_U, moment_U)
    weight_RD.index_copy_(0, rows_U, weight_RD[rows_U] - (lr / (moment_U.sqrt() + eps))[:, None] * grad_UD)


def step_all_(weight_RD: Tensor, momentum_R: Tensor, grad_RD: Tensor, *, lr: float, eps: float) -> None:
    """In place on every row."""
    momentum_R += grad_RD.square().mean(dim=1)
    weight_RD -= (lr / (momentum_R.sqrt() + eps))[:, None] * grad_RD
