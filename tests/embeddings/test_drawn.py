"""Tables as hypothesis draws them: shared tables, shared features, weighted, empty, whole ranks without rows.

What a set of ranks trains is compared with the reference in float64; allowed is three times the error of the reference
in float32. All ranks must run the same cases, so they are drawn here, before the ranks start.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gem_embeddings.api import build_tables
from gem_embeddings.interface import RowWiseAdagrad, TableSpec
from gem_embeddings.layout import check_sharding
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

FEATURES = ["a", "b", "c", "d", "e"]


@st.composite
def cases(draw):
    """One to four tables over five features; a feature may be in several of them."""
    tables = []
    for number in range(draw(st.integers(1, 4))):
        pooling = draw(st.sampled_from(["none", "sum", "mean"]))
        tables.append(
            {
                "name": f"t{number}",
                "rows": draw(st.sampled_from([1, 2, 7, 40])),
                "dim": draw(st.sampled_from([4, 8])),
                "features": draw(st.lists(st.sampled_from(FEATURES), min_size=1, max_size=3, unique=True)),
                "pooling": pooling,
                "weighted": pooling == "sum" and draw(st.booleans()),
                "init_std": 0.5,
            }
        )
    return {
        "tables": tables,
        "rows": draw(st.lists(st.sampled_from([0, 0, 1, 3]), min_size=8, max_size=8)),
        "most": draw(st.sampled_from([0, 1, 4])),
        "sharding": draw(
            st.lists(
                st.sampled_from(["table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", "grid"]),
                min_size=4,
                max_size=4,
            )
        ),
        "copies": draw(st.sampled_from([1, 2, 4])),
        "sliced": draw(st.booleans()),
    }


def drawn(count: int) -> list[dict]:
    found: list[dict] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def collect(case):
        found.append(case)

    collect()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "count"),
    [
        (2, 4),
        pytest.param(2, 12, marks=pytest.mark.slow),
        pytest.param(4, 40, marks=pytest.mark.slow),
        pytest.param(8, 25, marks=pytest.mark.slow),
    ],
)
def test_drawn_tables(run_ranks, tmp_path, world_size, count):
    found = drawn(count)
    features = [[f for table in case["tables"] for f in table["features"]] for case in found]
    assert any(len(set(own)) < len(own) for own in features), "no shared feature was drawn"
    assert any(table["weighted"] for case in found for table in case["tables"]), "no weighted table was drawn"
    assert any(case["most"] == 0 for case in found), "no batch without ids was drawn"
    assert any(case["copies"] > 1 and case["sliced"] for case in found)
    file = tmp_path / "cases.json"
    file.write_text(json.dumps(found))
    run_ranks(Path(__file__).with_name("drawn_worker.py"), world_size, str(file), timeout_s=400)


def two_tables(**changes):
    return [
        TableSpec(name="one", rows=4, dim=4, features=("x", "y"), pooling="sum", **changes),
        TableSpec(name="two", rows=6, dim=4, features=("x",)),
    ]


def batch(weights=None):
    return KeyedJaggedTensor(
        keys=["x", "y"], values=torch.tensor([3, 3, 1]), lengths=torch.tensor([2, 0, 0, 1]), weights=weights
    )


def test_weighted_worked_example():
    """Weights [0.5, 2] for ids [3, 3] give 2.5 * row 3; the row receives 2.5 times the bag's gradient."""
    tables = build_tables(two_tables(weighted=True), optimizer=RowWiseAdagrad(lr=0.1), seed=0, impl="reference")
    row = tables.table_state()["one"]["weight"][3]
    out = tables(batch(torch.tensor([0.5, 2.0, 1.0])))
    torch.testing.assert_close(out["x@one"][0], 2.5 * row)
    assert out["x@two"].shape == (2, 4)
    out["x@one"].sum().backward()
    assert float(tables.table_state()["one"]["momentum"][3]) == 2.5**2


@pytest.mark.parametrize(
    ("changes", "weights", "words"),
    [
        ({"weighted": True}, None, r"\['x@one', 'y'\] are weighted"),
        ({}, torch.ones(3), "no table is weighted"),
        ({"weighted": True}, torch.ones(3).double(), "must be float32"),
    ],
)
def test_weights_must_fit(changes, weights, words):
    tables = build_tables(two_tables(**changes), optimizer=RowWiseAdagrad(), seed=0, impl="reference")
    with pytest.raises(ValueError, match=words):
        tables(batch(weights))


def test_a_policy_of_a_shared_feature_acts_in_each_table():
    """Id 5 is outside table one (4 rows) and inside table two (6 rows)."""
    tables = build_tables(two_tables(), optimizer=RowWiseAdagrad(), seed=0, impl="reference", policies={"x": "drop"})
    ids = KeyedJaggedTensor(keys=["x", "y"], values=torch.tensor([5]), lengths=torch.tensor([1, 0]))
    out = tables(ids)
    assert not out["x@one"].any()
    torch.testing.assert_close(out["x@two"][0], tables.table_state()["two"]["weight"][5])
    assert tables.policy_counts() == {"x@one": {"ids": 1, "outside": 1}, "x@two": {"ids": 1, "outside": 0}}


@pytest.mark.parametrize(
    ("rows", "ranks", "fits"), [(4, 4, True), (3, 4, False), (5, 4, False), (7, 4, True), (1, 1, True)]
)
def test_row_wise_leaves_no_rank_without_rows(rows, ranks, fits):
    specs = [TableSpec(name="t", rows=rows, dim=4, features=("x",))]
    if fits:
        check_sharding(specs, {"t": "row_wise"}, ranks=ranks, host=ranks)
    else:
        with pytest.raises(ValueError, match="table 't': row_wise cuts"):
            check_sharding(specs, {"t": "row_wise"}, ranks=ranks, host=ranks)
    check_sharding(specs, {}, ranks=ranks, host=ranks)


def test_only_pooled_sums_can_be_weighted():
    with pytest.raises(ValueError, match="weighted ids need pooling 'sum'"):
        build_tables(
            [TableSpec(name="t", rows=3, dim=4, features=("x",), pooling="mean", weighted=True)],
            optimizer=RowWiseAdagrad(),
            seed=0,
            impl="reference",
        )
