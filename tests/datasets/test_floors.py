from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from gem_datasets.floors import logistic_floor, running_rate_floor
from gem_datasets.prepared import DatasetError
from gem_datasets.scores import auc, normalized_entropy
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import OneHotEncoder


def make_table(rows, rng, *, first_time, users=12, items=15):
    user, item = rng.integers(0, users, rows) * 1000, rng.integers(0, items, rows)
    truth = np.sin(user + 1.0) + np.cos(item * 2.0)
    return pa.table(
        {
            "user_id": user,
            "id.item": item,
            "timestamp": np.sort(first_time + rng.integers(0, rows // 3, rows)),
            "label.y": (rng.random(rows) < 1 / (1 + np.exp(-truth))).astype(np.float32),
        }
    )


@pytest.fixture
def tables():
    rng = np.random.default_rng(3)
    # Evaluation rows have users and items that training rows lack.
    return make_table(600, rng, first_time=100), make_table(200, rng, first_time=900, users=15, items=18)


def ids(table):
    return np.stack([table["user_id"].to_numpy(), table["id.item"].to_numpy()], axis=1)


@pytest.mark.parametrize("l2", [0.3, 1.0])
def test_the_logistic_floor_equals_scikit_learn(tables, l2):
    train, test = tables
    encoder = OneHotEncoder(handle_unknown="ignore").fit(ids(train))
    model = LogisticRegression(C=1 / l2, tol=1e-10, max_iter=5000)
    model.fit(encoder.transform(ids(train)).toarray(), train["label.y"].to_numpy())
    p = model.predict_proba(encoder.transform(ids(test)).toarray())[:, 1]
    label = test["label.y"].to_numpy()
    floor = logistic_floor(train, test, "y", l2=l2)
    assert floor["auc"] == pytest.approx(auc(label, p), abs=2e-4)
    assert floor["ne"] == pytest.approx(normalized_entropy(label, p), rel=1e-5)


def past_rates(train, test, strength):
    """The two rates of every row, by two loops."""
    rows = train.to_pylist() + test.to_pylist()
    features = []
    for row in rows:
        earlier = [other for other in rows if other["timestamp"] < row["timestamp"]]
        base = (sum(e["label.y"] for e in earlier) + 1) / (len(earlier) + 2)
        rates = []
        for column in ("user_id", "id.item"):
            own = [e["label.y"] for e in earlier if e[column] == row[column]]
            rates.append((sum(own) + strength * base) / (len(own) + strength))
        features.append(rates)
    return np.array(features)


def test_the_running_rate_floor_equals_loops_and_scikit_learn(tables):
    train, test = tables
    features = past_rates(train, test, strength=4.0)
    model = LogisticRegression(C=np.inf, tol=1e-12, max_iter=10000)
    model.fit(features[: train.num_rows], train["label.y"].to_numpy())
    p = model.predict_proba(features[train.num_rows :])[:, 1]
    label = test["label.y"].to_numpy()
    floor = running_rate_floor(train, test, "y", strength=4.0)
    assert floor["auc"] == pytest.approx(auc(label, p), abs=2e-4)
    assert floor["ne"] == pytest.approx(normalized_entropy(label, p), rel=1e-5)


@pytest.mark.parametrize("floor", [logistic_floor, running_rate_floor])
def test_rows_of_weight_zero_are_left_out(tables, floor):
    train, test = tables
    rng = np.random.default_rng(0)
    extra = make_table(300, rng, first_time=100)
    mixed = pa.concat_tables([train, extra])
    order = pa.array(np.argsort(mixed["timestamp"].to_numpy(), kind="stable"))
    weight = pa.array(np.r_[np.ones(train.num_rows), np.zeros(300)].astype(np.float32))
    weighted = mixed.append_column("weight.y", weight).take(order)
    assert floor(weighted, test, "y") == pytest.approx(floor(train, test, "y"), rel=1e-7)
    assert floor(mixed.take(order), test, "y")["ne"] != pytest.approx(floor(train, test, "y")["ne"], rel=1e-4)


def test_what_is_missing_is_named(tables):
    train, test = tables
    with pytest.raises(DatasetError, match=r"missing: label\.click"):
        logistic_floor(train, test, "click")
    constant = test.set_column(3, "label.y", pa.array(np.zeros(test.num_rows, dtype=np.float32)))
    with pytest.raises(DatasetError, match=r"both classes of label\.y: 0 positives in 200 rows"):
        running_rate_floor(train, constant, "y")
