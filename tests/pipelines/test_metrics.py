"""Metrics against scikit-learn, against their definitions, and at the edges."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gem_pipelines.metrics import (
    BinarySums,
    TaskMetrics,
    auc,
    calibration,
    evaluate_task,
    grouped_auc,
    log_loss,
    normalized_entropy,
    rate,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score


def arrays(seed: int, size: int = 500, *, levels: int | None = None):
    """Predictions (with `levels`: tied), labels, weights (some 0) and users."""
    rng = np.random.default_rng(seed)
    p_N = rng.random(size) if levels is None else rng.integers(0, levels, size) / levels
    return p_N, (rng.random(size) < 0.3).astype(float), rng.integers(0, 4, size) * 0.7, rng.integers(0, 40, size)


@pytest.mark.parametrize("levels", [None, 3, 20])
def test_equals_scikit_learn(levels):
    p_N, y_N, w_N, _ = arrays(1, levels=levels)
    p_N = np.clip(p_N, 1e-6, 1 - 1e-6)
    sums = BinarySums.of(p_N, y_N, w_N)
    expected = sklearn_log_loss(y_N, p_N, sample_weight=w_N)
    q = np.average(y_N, weights=w_N)
    entropy = -(q * np.log(q) + (1 - q) * np.log(1 - q))
    assert log_loss(sums) == pytest.approx(expected, rel=1e-12)
    assert normalized_entropy(sums) == pytest.approx(expected / entropy, rel=1e-12)
    assert calibration(sums) == pytest.approx(np.average(p_N, weights=w_N) / q, rel=1e-12)
    assert rate(sums) == pytest.approx(q, rel=1e-12)
    assert sums.rows == np.count_nonzero(w_N)
    assert auc(p_N, y_N, w_N) == pytest.approx(roc_auc_score(y_N, p_N, sample_weight=w_N), rel=1e-12)


def test_gauc_equals_scikit_learn_user_by_user():
    p_N, y_N, w_N, user_N = arrays(2, levels=7)
    areas, weights = [], []
    for user in np.unique(user_N[w_N > 0]):
        own = (user_N == user) & (w_N > 0)
        if 0 < y_N[own].sum() < own.sum():
            areas.append(roc_auc_score(y_N[own], p_N[own], sample_weight=w_N[own]))
            weights.append(w_N[own].sum())
    found = grouped_auc(user_N, p_N, y_N, w_N)
    assert found.gauc == pytest.approx(np.average(areas, weights=weights), rel=1e-12)
    assert found.users - found.excluded == len(areas)
    assert found.excluded > 0


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 1), st.sampled_from([0.0, 0.5, 1.0, 3.0])), min_size=1, max_size=30
    )
)
@settings(max_examples=200, deadline=None)
def test_auc_is_the_weighted_share_of_pairs_in_order(rows):
    won = total = 0.0
    for p, y, w in rows:
        for other_p, other_y, other_w in rows:
            if y == 1 and other_y == 0:
                total += w * other_w
                won += w * other_w * (1.0 if p > other_p else 0.5 if p == other_p else 0.0)
    p_N, y_N, w_N = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    found = auc(p_N, y_N, w_N)
    assert found == (pytest.approx(won / total, rel=1e-12) if total else None)


def test_without_weight_everything_is_undefined():
    found = evaluate_task(np.array([1, 2, 3]), np.array([0.2, 0.5, 0.9]), np.array([0.0, 1.0, 1.0]), np.zeros(3))
    assert found.pop("count") == 0
    assert found.pop("gauc_users") == found.pop("gauc_excluded_users") == 0
    assert set(found.values()) == {None}
    assert json.loads(json.dumps(found)) == found


def test_no_rows():
    empty = np.zeros(0)
    found = evaluate_task(np.zeros(0, dtype=np.int64), empty, empty, empty)
    assert found["auc"] is None
    assert found["ne"] is None
    assert found["count"] == 0


def test_certain_predictions_stay_finite():
    right = BinarySums.of(np.array([0.0, 1.0]), np.array([0.0, 1.0]), np.ones(2))
    wrong = BinarySums.of(np.array([1.0, 0.0]), np.array([0.0, 1.0]), np.ones(2))
    assert 0 <= log_loss(right) < 1e-11
    assert log_loss(wrong) == pytest.approx(40 * np.log(2), rel=1e-9)


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_has_no_ne_and_no_auc(label):
    p_N, y_N = np.array([0.3, 0.6]), np.full(2, label)
    sums = BinarySums.of(p_N, y_N, np.ones(2))
    assert normalized_entropy(sums) is None
    assert auc(p_N, y_N, np.ones(2)) is None
    assert calibration(sums) == (None if label == 0 else pytest.approx(0.45))
    assert log_loss(sums) > 0


def test_rows_of_weight_zero_count_nowhere():
    user_N = np.array([7, 7, 7, 8, 8])
    p_N, y_N = np.array([0.2, 0.9, 0.8, 0.1, 0.5]), np.array([0.0, 0.0, 1.0, 0.0, 1.0])
    w_N = np.array([1.0, 0.0, 1.0, 1.0, 1.0])
    keep = w_N > 0
    assert evaluate_task(user_N, p_N, y_N, w_N) == evaluate_task(user_N[keep], p_N[keep], y_N[keep], w_N[keep])
    assert evaluate_task(user_N, p_N, y_N, w_N)["gauc"] == 1.0  # with the second row it would be below


def test_all_ties_are_a_coin():
    assert auc(np.full(6, 0.4), np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0]), np.ones(6)) == 0.5


def test_sums_of_parts_are_the_sums_of_the_whole():
    p_N, y_N, w_N, _ = arrays(3)
    whole = BinarySums.of(p_N, y_N, w_N)
    parts = BinarySums.of(p_N[:123], y_N[:123], w_N[:123]) + BinarySums.of(p_N[123:], y_N[123:], w_N[123:])
    assert parts.to_list() == pytest.approx(whole.to_list(), rel=1e-13)


def steps(seed: int, count: int) -> list[dict[str, BinarySums]]:
    found = []
    for step in range(count):
        p_N, y_N, w_N, _ = arrays(seed + step, size=20)
        found.append({"click": BinarySums.of(p_N, y_N, w_N)})
    return found


def test_window_forgets_and_lifetime_does_not():
    metrics = TaskMetrics(("click",), window=3)
    history = steps(10, 7)
    for sums in history:
        metrics.update(sums)
    last_three = history[4]["click"] + history[5]["click"] + history[6]["click"]
    everything = history[0]["click"]
    for sums in history[1:]:
        everything = everything + sums["click"]
    assert metrics.window_sums()["click"].to_list() == pytest.approx(last_three.to_list(), rel=1e-13)
    assert metrics.lifetime_sums()["click"] == everything


def test_state_goes_through_json_bit_for_bit():
    metrics, history = TaskMetrics(("click",), window=3), steps(20, 9)
    for sums in history[:5]:
        metrics.update(sums)
    resumed = TaskMetrics(("click",), window=3)
    resumed.load_state_dict(json.loads(json.dumps(metrics.state_dict())))
    for sums in history[5:]:
        metrics.update(sums)
        resumed.update(sums)
    assert resumed.window_sums() == metrics.window_sums()
    assert resumed.lifetime_sums() == metrics.lifetime_sums()


def test_state_of_other_tasks_is_refused_and_changes_nothing():
    metrics = TaskMetrics(("click",), window=3)
    metrics.update(steps(1, 1)[0])
    before = metrics.state_dict()
    with pytest.raises(ValueError, match=r"\['buy'\].*\['click'\]"):
        metrics.load_state_dict(TaskMetrics(("buy",), window=3).state_dict())
    assert metrics.state_dict() == before
