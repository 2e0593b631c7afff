"""What is measured of predictions, in float64, with written rules for the edges.

All functions take probabilities `p_N`, labels `y_N` in {0, 1} and weights `w_N` >= 0 as numpy arrays of one length N.

Rules:
- a row of weight 0 counts nowhere, in no metric and in no count;
- a metric that is not defined is None (null in JSON), never 0, 1 or a huge number: log loss and rate of nothing, NE of
  one class (the entropy of its rate is 0), calibration without a positive, AUC without both classes, GAUC
  without a single user that has both;
- p = 0 and p = 1 are clipped to [2^-40, 1 - 2^-40] for the logarithm, so that a certain and wrong prediction costs
  27.7 nats and not infinity; nothing else is clipped;
- AUC is exact: the weighted probability that a positive scores above a negative, ties counting one half;
- GAUC is the mean over users of the AUC within the user, weighted by the user's total weight; users with only one class
  (after rows of weight 0 are dropped) are excluded, and how many is reported.

Log loss, NE, calibration and rate are functions of five sums (`BinarySums`), which add over rows, steps and ranks.
AUC and GAUC are not sums: they need all predictions in one place.

Sources: NE from He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook" (2014): log loss divided by
the entropy of the mean label. Cost of AUC and GAUC: one sort, O(N log N).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PROBABILITY_MARGIN = 2.0**-40

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class BinarySums:
    """Sums over rows, from which NE, log loss, calibration and rate follow. Adding two gives the sums of both.

    weight     sum of w          positive   sum of w * y
    predicted  sum of w * p      log_loss   sum of w * -(y ln p + (1 - y) ln(1 - p)), nats
    rows       number of rows with w > 0
    """

    weight: float = 0.0
    positive: float = 0.0
    predicted: float = 0.0
    log_loss: float = 0.0
    rows: float = 0.0

    FIELDS = ("weight", "positive", "predicted", "log_loss", "rows")

    @classmethod
    def of(cls, p_N: FloatArray, y_N: FloatArray, w_N: FloatArray) -> BinarySums:
        """Sums of one set of predictions.

        >>> BinarySums.of(np.array([0.5, 0.5]), np.array([1.0, 0.0]), np.array([1.0, 0.0])).rows
        1.0
        """
        p_N, y_N, w_N = (np.asarray(x, dtype=np.float64) for x in (p_N, y_N, w_N))
        return cls(
            weight=float(w_N.sum()),
            positive=float((w_N * y_N).sum()),
            predicted=float((w_N * p_N).sum()),
            log_loss=float((w_N * row_log_loss(p_N, y_N)).sum()),
            rows=float(np.count_nonzero(w_N > 0)),
        )

    def __add__(self, other: BinarySums) -> BinarySums:
        return BinarySums(**{name: getattr(self, name) + getattr(other, name) for name in self.FIELDS})

    def to_list(self) -> list[float]:
        """The five sums in the order of FIELDS."""
        return [float(getattr(self, name)) for name in self.FIELDS]

    @classmethod
    def from_list(cls, values: list[float]) -> BinarySums:
        """Inverse of `to_list`."""
        return cls(**dict(zip(cls.FIELDS, map(float, values), strict=True)))


def row_log_loss(p_N: FloatArray, y_N: FloatArray) -> FloatArray:
    """-(y ln p + (1 - y) ln(1 - p)) of every row, nats, with p clipped to the margin."""
    p_N = np.clip(p_N, PROBABILITY_MARGIN, 1.0 - PROBABILITY_MARGIN)
    return -(y_N * np.log(p_N) + (1.0 - y_N) * np.log1p(-p_N))


def log_loss(sums: BinarySums) -> float | None:
    """Weighted mean log loss, nats; None without weight."""
    return sums.log_loss / sums.weight if sums.weight > 0 else None


def rate(sums: BinarySums) -> float | None:
    """Weighted mean label; None without weight."""
    return sums.positive / sums.weight if sums.weight > 0 else None


def normalized_entropy(sums: BinarySums) -> float | None:
    """Log loss divided by the entropy of the mean label; None where that entropy is 0 (one class, or nothing).

    Predicting the mean of half positives everywhere gives exactly 1:

    >>> normalized_entropy(BinarySums.of(np.array([0.5, 0.5]), np.array([1.0, 0.0]), np.array([1.0, 1.0])))
    1.0
    """
    if not 0.0 < sums.positive < sums.weight:
        return None
    q = sums.positive / sums.weight
    entropy = -(q * math.log(q) + (1.0 - q) * math.log1p(-q))
    return (sums.log_loss / sums.weight) / entropy if entropy > 0.0 else None


def calibration(sums: BinarySums) -> float | None:
    """Sum of predictions over sum of labels: above 1 predicts too much. None without a positive."""
    return sums.predicted / sums.positive if sums.positive > 0 else None


def sum_figures(sums: BinarySums) -> dict[str, float | None]:
    """The four figures that follow from sums.

    >>> sum_figures(BinarySums.of(np.array([0.5, 0.5]), np.array([1.0, 0.0]), np.array([1.0, 1.0])))
    {'log_loss': 0.6931471805599453, 'ne': 1.0, 'calibration': 1.0, 'rate': 0.5}
    """
    return {
        "log_loss": log_loss(sums),
        "ne": normalized_entropy(sums),
        "calibration": calibration(sums),
        "rate": rate(sums),
    }


def auc(p_N: FloatArray, y_N: FloatArray, w_N: FloatArray) -> float | None:
    """Exact weighted area under the ROC curve; None unless both classes have weight.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0.0, 0.0, 1.0, 1.0]), np.ones(4))
    0.875
    """
    keep = np.asarray(w_N) > 0
    user_N = np.zeros(int(keep.sum()), dtype=np.int64)
    areas, _, _ = _auc_by_group(user_N, *(np.asarray(x, dtype=np.float64)[keep] for x in (p_N, y_N, w_N)))
    return None if areas.size == 0 or math.isnan(areas[0]) else float(areas[0])


@dataclass(frozen=True, kw_only=True)
class GroupAuc:
    """GAUC with what it left out. users = users with weight; excluded = those with one class only."""

    gauc: float | None
    users: int
    excluded: int


def grouped_auc(user_N: npt.NDArray[np.int64], p_N: FloatArray, y_N: FloatArray, w_N: FloatArray) -> GroupAuc:
    """AUC within each user, averaged with the users' total weights (see the module's rules).

    User 1 ranks its pair right, user 2 wrong, user 3 has one class: the mean of 1 and 0.

    >>> g = grouped_auc(np.array([1, 1, 2, 2, 3]), np.array([0.1, 0.9, 0.9, 0.1, 0.5]),
    ...                 np.array([0.0, 1.0, 0.0, 1.0, 1.0]), np.ones(5))
    >>> g.gauc, g.users, g.excluded
    (0.5, 3, 1)
    """
    keep = np.asarray(w_N) > 0
    areas, weights, users = _auc_by_group(
        np.asarray(user_N)[keep], *(np.asarray(x, dtype=np.float64)[keep] for x in (p_N, y_N, w_N))
    )
    defined = ~np.isnan(areas)
    total = weights[defined].sum()
    value = float((areas[defined] * weights[defined]).sum() / total) if total > 0 else None
    return GroupAuc(gauc=value, users=users, excluded=users - int(defined.sum()))


def _auc_by_group(
    user_N: npt.NDArray[np.int64], p_N: FloatArray, y_N: FloatArray, w_N: FloatArray
) -> tuple[FloatArray, FloatArray, int]:
    """(AUC or nan, total weight) of each group, and the number of groups. All rows have weight > 0."""
    if p_N.size == 0:
        return np.zeros(0), np.zeros(0), 0
    order = np.lexsort((p_N, user_N))
    user_N, p_N, y_N, w_N = user_N[order], p_N[order], y_N[order], w_N[order]
    new_user_N = np.r_[True, user_N[1:] != user_N[:-1]]
    new_tie_N = new_user_N | np.r_[True, p_N[1:] != p_N[:-1]]
    ties = np.flatnonzero(new_tie_N)
    positive = np.add.reduceat(w_N * y_N, ties)  # per run of equal (user, p)
    negative = np.add.reduceat(w_N * (1.0 - y_N), ties)
    first_tie = np.flatnonzero(new_user_N[ties])  # the first run of each user
    before = np.cumsum(negative) - negative
    below = before - np.repeat(before[first_tie], np.diff(np.r_[first_tie, ties.size]))
    won = np.add.reduceat(positive * (below + 0.5 * negative), first_tie)
    positives, negatives = np.add.reduceat(positive, first_tie), np.add.reduceat(negative, first_tie)
    pairs = positives * negatives
    areas = np.divide(won, pairs, out=np.full_like(won, np.nan), where=pairs > 0)
    return areas, positives + negatives, first_tie.size


class TaskMetrics:
    """Window and lifetime sums of every task over training steps; JSON-able state, so that a resumed run goes on.

    window  how many last steps the window holds. `update` takes sums that are already added over all ranks.
    """

    def __init__(self, tasks: tuple[str, ...], *, window: int) -> None:
        self.tasks = tasks
        self.window = window
        self._steps: deque[dict[str, BinarySums]] = deque(maxlen=window)
        self._lifetime = {task: BinarySums() for task in tasks}

    def update(self, sums: dict[str, BinarySums]) -> None:
        """Add one step."""
        self._steps.append(dict(sums))
        self._lifetime = {task: self._lifetime[task] + sums[task] for task in self.tasks}

    def window_sums(self) -> dict[str, BinarySums]:
        """Sums over the last `window` steps."""
        totals = {task: BinarySums() for task in self.tasks}
        for step in self._steps:  # added anew each time: a running difference would drift
            totals = {task: totals[task] + step[task] for task in self.tasks}
        return totals

    def lifetime_sums(self) -> dict[str, BinarySums]:
        """Sums since the start of the run."""
        return dict(self._lifetime)

    def record(self) -> dict[str, dict[str, Any]]:
        """What a "train" record says of them: all figures as "window" and "lifetime", NE once more by itself."""
        found: dict[str, dict[str, Any]] = {}
        for span, sums in (("window", self.window_sums()), ("lifetime", self.lifetime_sums())):
            figures = {task: sum_figures(sums[task]) for task in self.tasks}
            found[f"{span}_ne"] = {task: figures[task]["ne"] for task in self.tasks}
            found[span] = figures
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; floats survive the round trip bit for bit."""
        return {
            "window": self.window,
            "lifetime": {task: sums.to_list() for task, sums in self._lifetime.items()},
            "steps": [{task: sums.to_list() for task, sums in step.items()} for step in self._steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`. Raises ValueError where tasks differ; nothing is changed then."""
        if set(state["lifetime"]) != set(self.tasks):
            raise ValueError(f"metrics are of tasks {sorted(state['lifetime'])}, this run has {sorted(self.tasks)}")
        steps = [{task: BinarySums.from_list(step[task]) for task in self.tasks} for step in state["steps"]]
        self._lifetime = {task: BinarySums.from_list(state["lifetime"][task]) for task in self.tasks}
        self._steps = deque(steps, maxlen=self.window)


def evaluate_task(
    user_N: npt.NDArray[np.int64], p_N: FloatArray, y_N: FloatArray, w_N: FloatArray
) -> dict[str, float | int | None]:
    """All metrics of one task, as the "eval" record holds them."""
    sums = BinarySums.of(p_N, y_N, w_N)
    groups = grouped_auc(user_N, p_N, y_N, w_N)
    return {
        "ne": normalized_entropy(sums),
        "auc": auc(p_N, y_N, w_N),
        "gauc": groups.gauc,
        "gauc_users": groups.users,
        "gauc_excluded_users": groups.excluded,
        "log_loss": log_loss(sums),
        "calibration": calibration(sums),
        "rate": rate(sums),
        "count": int(sums.rows),
    }
