from __future__ import annotations

import numpy as np
import pytest
from gem_datasets.prepared import DatasetError, Ragged, build, feature, split_rows, standardize, stream


@pytest.mark.parametrize(
    ("times", "fraction", "cut"),
    [
        ([10, 20, 20, 20, 30], 0.5, 1),  # 1 is nearer to 2 than 4 is
        ([10, 20, 20, 20, 30], 0.6, 4),  # 4 is nearer to 3 than 1 is
        ([1, 2, 3, 4, 5], 0.8, 4),
        ([1, 1, 1, 2], 0.5, 3),  # no cut before the first group
        ([1, 2, 2, 2], 0.75, 1),  # nor after the last one
    ],
)
def test_the_cut_never_splits_a_second(times, fraction, cut):
    assert split_rows(np.array(times), fraction) == cut


@pytest.mark.parametrize("times", [[5, 5, 5], [5]])
def test_one_second_cannot_be_cut(times):
    with pytest.raises(DatasetError, match="cannot be cut by time"):
        split_rows(np.array(times), 0.5)


def test_standardize_measures_training_rows_only():
    values, scaling = standardize(np.array([1.0, 3.0, 100.0]), 2)
    assert values.tolist() == [-1.0, 1.0, 98.0]
    assert values.dtype == np.float32
    assert scaling == [2.0, 1.0]
    assert standardize(np.array([4.0, 4.0]), 2)[0].tolist() == [0.0, 0.0]
    assert standardize(np.array([1.0, 3.0]), 2, least_std=4.0)[0].tolist() == [-0.25, 0.25]


def schema_and_columns():
    schema = {
        "tables": [{"name": "item", "rows": 5}],
        "labels": [{"name": "y", "weighted": False}],
        "scalars": [feature("item")],
        "lists": [],
        "dense": [],
        "streams": [stream("s", [feature("item")], action_bits=1, max_length=2)],
    }
    lists = Ragged(values=np.array([1, 2, 3]), offsets=np.array([0, 2, 2, 3]))
    columns = {name: np.array([1, 2, 3]) for name in ("sample_id", "user_id", "timestamp", "id.item")}
    columns |= {"label.y": np.array([0, 1, 0])}
    columns |= {f"stream.s.{name}": lists for name in ("item", "action", "time")}
    return schema, columns


def test_build_cuts_one_table_in_two():
    prepared = build(*schema_and_columns(), 2)
    assert prepared.train["stream.s.item"].to_pylist() == [[1, 2], []]
    assert prepared.eval["stream.s.item"].to_pylist() == [[3]]
    assert prepared.eval["label.y"].to_pylist() == [0.0]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("id.item", np.array([1, 2, 5]), r"id.item: ids 1..5, table item 5"),
        ("stream.s.item", Ragged(values=np.array([1, -1, 3]), offsets=np.array([0, 2, 2, 3])), "ids -1..3"),
        ("stream.s.action", Ragged(values=np.array([1, 1, 1]), offsets=np.array([0, 1, 2, 3])), "unequal lists"),
        ("dense.x", np.zeros(3), "columns differ from the schema"),
    ],
)
def test_build_refuses_our_own_mistakes(column, value, message):
    schema, columns = schema_and_columns()
    with pytest.raises(AssertionError, match=message):
        build(schema, columns | {column: value}, 2)
