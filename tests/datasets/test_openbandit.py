from __future__ import annotations

import csv
import datetime
import shutil

import gem_datasets
import numpy as np
import pytest


@pytest.fixture(scope="module")
def lines(request):
    """All lines of the fixture in stable time order, with whole seconds and the policy's number."""
    folder = request.config.rootpath / "datasets" / "fixtures" / "openbandit"
    found = []
    for number, policy in enumerate(("random", "bts")):
        with (folder / policy / "men" / "men.csv").open() as file:
            for place, line in enumerate(csv.DictReader(file)):
                time = datetime.datetime.fromisoformat(line["timestamp"])
                second = int((time - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)).total_seconds())
                line |= {"second": second, "policy": number + 1}
                line["sample"] = (3 * number + 1) * 1_000_000 + place
                line["profile"] = tuple(line[f"user_feature_{i}"] for i in range(4))
                found.append(line)
    return sorted(found, key=lambda line: line["second"])


@pytest.fixture(scope="module")
def rows(openbandit):
    return openbandit.train.to_pylist() + openbandit.eval.to_pylist()


def test_rows_are_the_lines(lines, rows):
    for row, line in zip(rows, lines, strict=True):
        assert row["sample_id"] == line["sample"]
        assert row["timestamp"] == line["second"]
        assert row["label.click"] == float(line["click"])
        assert row["id.item"] == int(line["item_id"]) + 1
        assert row["id.position"] == int(line["position"])
        assert (row["id.campaign"], row["id.policy"]) == (2, line["policy"])
        affinity = [i + 1 for i in range(3) if float(line[f"user-item_affinity_{i}"])]
        assert row["ids.affinity"] == affinity


def test_hashes_become_one_id_each(lines, rows):
    for name in (f"user_feature_{i}" for i in range(4)):
        pairs = {(line[name], row[f"id.{name}"]) for row, line in zip(rows, lines, strict=True)}
        assert len(pairs) == len({p[0] for p in pairs}) == len({p[1] for p in pairs})
        assert min(p[1] for p in pairs) == 1
    # Items 0 and 2 share item_feature_1, items 0 and 1 share item_feature_2, under both policies' hashes.
    kinds = {row["id.item"]: (row["id.item_feature_1"], row["id.item_feature_2"]) for row in rows}
    assert kinds == {1: (1, 1), 2: (2, 1), 3: (1, 2)}


def test_the_profile_stream_is_the_profiles_strictly_earlier_impressions(lines, rows):
    for row, line in zip(rows, lines, strict=True):
        own = [e for e in lines if e["profile"] == line["profile"] and e["second"] < line["second"]][-3:]
        assert row["stream.profile.item"] == [int(e["item_id"]) + 1 for e in own]
        assert row["stream.profile.position"] == [int(e["position"]) for e in own]
        assert row["stream.profile.action"] == [int(e["click"]) for e in own]


def test_dense_columns_equal_loops(openbandit, lines, rows):
    expected = {"log_propensity": [], "affinity_shown": [], "item_rate": [], "item_value": []}
    for line in lines:
        earlier = [e for e in lines if e["second"] < line["second"]]
        base = (sum(int(e["click"]) for e in earlier) + 1) / (len(earlier) + 200)
        own = [int(e["click"]) for e in earlier if e["item_id"] == line["item_id"]]
        expected["item_rate"].append((sum(own) + 200 * base) / (len(own) + 200))
        expected["log_propensity"].append(np.log(float(line["propensity_score"])))
        expected["affinity_shown"].append(np.log1p(float(line[f"user-item_affinity_{line['item_id']}"])))
        expected["item_value"].append((-0.5, 0.25, 1.5)[int(line["item_id"])])
    for name, values in expected.items():
        mean, std = openbandit.schema["facts"]["dense_mean_std"][name]
        found = np.array([row[f"dense.{name}"] for row in rows]) * std + mean
        assert found == pytest.approx(np.array(values), abs=1e-5), name


def test_one_policy_alone(fixture_folder, check_native, lines):
    prepared = gem_datasets.load(
        "openbandit", source_dir=fixture_folder / "openbandit", campaign="men", policy="bts", train_fraction=0.5
    )
    check_native(prepared)
    samples = prepared.train["sample_id"].to_pylist() + prepared.eval["sample_id"].to_pylist()
    assert samples == [line["sample"] for line in lines if line["policy"] == 2]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("propensity_score", "score", r"random/men/men.csv: 15 rows, missing columns: propensity_score"),
        (",0.333333,", ",0.0,", r"men.csv: propensity_score must be positive, got 0.0"),
        (",0.333333,", ",much,", r"men.csv: a column has the wrong type: .*much"),
        (",1,0,0.333333,", ",9,0,0.333333,", r"men.csv: position \d\.\.9, expected 1\.\.3"),
    ],
)
def test_a_malformed_file_is_named(fixture_folder, tmp_path, old, new, message):
    shutil.copytree(fixture_folder / "openbandit", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "random" / "men" / "men.csv"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message):
        gem_datasets.load("openbandit", source_dir=tmp_path, campaign="men")


@pytest.mark.slow
def test_the_real_data(tmp_path):
    prepared = gem_datasets.load("openbandit", cache_dir=tmp_path)
    assert (prepared.train.num_rows, prepared.eval.num_rows) == (48_000, 12_000)
    clicks = [int(table["label.click"].to_numpy().sum()) for table in (prepared.train, prepared.eval)]
    assert clicks == [222, 65]
