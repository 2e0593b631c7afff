from __future__ import annotations

import gem_datasets
import numpy as np
from gem_datasets.scores import auc


def test_the_label_is_the_parity_of_the_last_item():
    prepared = gem_datasets.load("parity", rows=2000, seed=1)
    rows = prepared.train.to_pylist()
    assert [row["label.parity"] for row in rows] == [float(row["stream.history.item"][-1] % 2) for row in rows]
    lengths = [len(row["stream.history.item"]) for row in rows]
    assert min(lengths) == 1
    assert max(lengths) == 32
    assert 0.45 < np.mean([row["label.parity"] for row in rows]) < 0.55


def test_nothing_else_gives_the_label_away():
    """Candidate, noise, the share of odd items before the last and the length: all near AUC 0.5."""
    rows = gem_datasets.load("parity", rows=20_000).train.to_pylist()
    label = np.array([row["label.parity"] for row in rows])
    scores = {
        "candidate": [row["id.item"] % 2 for row in rows],
        "noise": [row["dense.noise"] for row in rows],
        "earlier items": [np.mean([i % 2 for i in row["stream.history.item"][:-1]] or [0.5]) for row in rows],
        "length": [len(row["stream.history.item"]) for row in rows],
    }
    for name, score in scores.items():
        # One standard error of an AUC of 0.5 with 16,000 rows is 0.0046.
        assert abs(auc(label, np.array(score, dtype=np.float64)) - 0.5) < 0.02, name
    assert auc(label, np.array([row["stream.history.item"][-1] % 2 for row in rows], dtype=np.float64)) == 1.0


def test_the_same_seed_gives_the_same_rows():
    first, again, other = (gem_datasets.load("parity", rows=500, seed=seed) for seed in (1, 1, 2))
    assert first.train.equals(again.train)
    assert not first.train.equals(other.train)
