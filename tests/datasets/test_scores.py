from __future__ import annotations

import numpy as np
import pytest
from gem_datasets.prepared import DatasetError
from gem_datasets.scores import auc, binary_entropy, normalized_entropy
from sklearn.metrics import log_loss, roc_auc_score


def test_auc_by_hand():
    assert auc(np.array([1, 0, 1, 0]), np.array([0.9, 0.8, 0.8, 0.1])) == 0.875


@pytest.mark.parametrize("levels", [3, 50, 10**6])
def test_scores_equal_scikit_learn(levels):
    rng = np.random.default_rng(levels)
    score = rng.integers(1, levels, 2000) / levels
    label = (rng.random(2000) < score).astype(np.float32)
    assert auc(label, score) == pytest.approx(roc_auc_score(label, score), abs=1e-12)
    base = label.mean(dtype=np.float64)
    entropy = log_loss(label, np.full(2000, base))
    assert normalized_entropy(label, score) == pytest.approx(log_loss(label, score) / entropy, rel=1e-9)


def test_predicting_the_mean_is_one():
    label = np.array([1, 0, 0, 0])
    assert normalized_entropy(label, np.full(4, 0.25)) == pytest.approx(1.0, rel=1e-12)


def test_one_class_is_an_error():
    with pytest.raises(DatasetError, match="both classes, got 2 positives in 2 rows"):
        auc(np.ones(2), np.zeros(2))
    with pytest.raises(DatasetError, match="both classes"):
        normalized_entropy(np.zeros(2), np.full(2, 0.5))


def test_entropy_at_its_ends():
    assert binary_entropy(np.array([0.0, 0.5, 1.0])) == pytest.approx([0.0, np.log(2.0), 0.0], rel=1e-12)
