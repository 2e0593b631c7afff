"""AUC and NE for floors and planted bounds: exact, float64, a dozen lines (the job's metrics live with the job)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gem_datasets.prepared import DatasetError, Floats


def auc(label: npt.NDArray[np.generic], score: Floats) -> float:
    """Share of (positive, negative) pairs in which the positive scores higher; ties count one half.

    Labels 1 0 1 0 with scores 0.9 0.8 0.8 0.1: pairs 1, 1, 1/2, 1 of 4, so 0.875.
    """
    positive = label.astype(bool)
    count = int(positive.sum())
    if count in (0, len(positive)):
        raise DatasetError(f"AUC needs both classes, got {count} positives in {len(positive)} rows")
    _, place, ties = np.unique(score, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(ties) - (ties - 1) / 2.0
    rank_sum = float(mean_rank[place][positive].sum())
    return (rank_sum - count * (count + 1) / 2.0) / (count * (len(positive) - count))


def normalized_entropy(label: npt.NDArray[np.generic], probability: Floats) -> float:
    """Mean log loss over the entropy of the labels' mean; 1 = no better than predicting the mean.

    Probabilities are kept 1e-12 away from 0 and 1.
    """
    y = label.astype(np.float64)
    p = np.clip(probability.astype(np.float64), 1e-12, 1.0 - 1e-12)
    base = float(binary_entropy(np.array([y.mean()]))[0])
    if base == 0.0:
        raise DatasetError(f"NE needs both classes, got a label mean of {y.mean()} in {len(y)} rows")
    return float(-(y * np.log(p) + (1.0 - y) * np.log1p(-p)).mean()) / base


def binary_entropy(probability: Floats) -> Floats:
    """-p log p - (1 - p) log(1 - p) in nats; 0 at 0 and 1."""
    p = probability.astype(np.float64)
    inside = (p > 0.0) & (p < 1.0)
    q = np.where(inside, p, 0.5)
    return np.where(inside, -q * np.log(q) - (1.0 - q) * np.log1p(-q), 0.0)
