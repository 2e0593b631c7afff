"""MovieLens against loops over the fixture's own lines; the real files in the slow test."""

from __future__ import annotations

import shutil

import gem_datasets
import numpy as np
import pytest
from gem_datasets.floors import logistic_floor, running_rate_floor


def read(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    names = [cell.split(":")[0] for cell in lines[0].split("\t")]
    return [dict(zip(names, line.split("\t"), strict=True)) for line in lines[1:]]


@pytest.fixture(scope="module")
def events(request):
    folder = request.config.rootpath / "datasets" / "fixtures" / "ml-100k"
    lines = [{key: int(value) for key, value in line.items()} for line in read(folder / "ml-100k.inter")]
    for number, line in enumerate(lines):
        line["line"] = number
        line["like"] = int(line["rating"] >= 4)
        line["mask"] = (line["rating"] >= 4) + 2 * (line["rating"] == 5) + 4 * (line["rating"] <= 2)
    items = {int(line["item_id"]): line for line in read(folder / "ml-100k.item")}
    users = {int(line["user_id"]): line for line in read(folder / "ml-100k.user")}
    for line in lines:
        line |= {"genres": items[line["item_id"]]["class"].split(), **users[line["user_id"]], **line}
    return sorted(lines, key=lambda line: line["timestamp"])


@pytest.fixture(scope="module")
def rows(movielens):
    return movielens.train.to_pylist() + movielens.eval.to_pylist()


def earlier(events, row, **wanted):
    return [
        e for e in events if e["timestamp"] < row["timestamp"] and all(e[key] == value for key, value in wanted.items())
    ]


def test_rows_are_the_events_in_stable_time_order(events, rows):
    assert [row["sample_id"] for row in rows] == [event["line"] for event in events]
    for row, event in zip(rows, events, strict=True):
        assert (row["user_id"], row["id.item"], row["timestamp"]) == (
            event["user_id"],
            event["item_id"],
            event["timestamp"],
        )
        assert row["label.like"] == event["like"]


def test_histories_are_the_strictly_earlier_events(events, rows):
    shared_seconds = 0
    for row, event in zip(rows, events, strict=True):
        own = earlier(events, row, user_id=event["user_id"])[-4:]
        assert row["stream.history.item"] == [e["item_id"] for e in own]
        assert row["stream.history.rating"] == [e["rating"] for e in own]
        assert row["stream.history.action"] == [e["mask"] for e in own]
        assert row["stream.history.time"] == [e["timestamp"] for e in own]
        others = earlier(events, row, item_id=event["item_id"])[-3:]
        assert row["stream.audience.user"] == [e["user_id"] for e in others]
        assert row["stream.audience.rating"] == [e["rating"] for e in others]
        shared_seconds += sum(
            e["timestamp"] == row["timestamp"] and e["user_id"] == row["user_id"] and e is not event for e in events
        )
    assert shared_seconds > 20, "the fixture has ties, without which this test proves little"


def test_a_user_is_named_after_enough_training_events(movielens, events, rows):
    train_lines = set(movielens.train["sample_id"].to_pylist())
    named = 0
    for row, event in zip(rows, events, strict=True):
        known = [e for e in earlier(events, row, user_id=event["user_id"]) if e["line"] in train_lines]
        assert row["id.user"] == (event["user_id"] if len(known) >= 2 else 0)
        named += row["id.user"] > 0
    assert 0 < named < len(rows)


def unscale(prepared, rows, name):
    mean, std = prepared.schema["facts"]["dense_mean_std"][name]
    return np.array([row[f"dense.{name}"] for row in rows], dtype=np.float64) * std + mean


def test_rates_and_counts_equal_loops(movielens, events, rows):
    expected = {name: [] for name in ("user_like_rate", "item_mean_rating", "user_log_count", "user_genre_rate")}
    for row, event in zip(rows, events, strict=True):
        everyone = earlier(events, row)
        own = earlier(events, row, user_id=event["user_id"])
        others = earlier(events, row, item_id=event["item_id"])
        base = (sum(e["like"] for e in everyone) + 1) / (len(everyone) + 2)
        base_rating = (sum(e["rating"] for e in everyone) + 3) / (len(everyone) + 1)
        rate = (sum(e["like"] for e in own) + 5 * base) / (len(own) + 5)
        expected["user_like_rate"].append(rate)
        rating = (sum(e["rating"] for e in others) + 5 * base_rating) / (len(others) + 5)
        expected["item_mean_rating"].append(rating)
        expected["user_log_count"].append(np.log1p(len(own)))
        by_genre = [[e["like"] for e in own if genre in e["genres"]] for genre in event["genres"]]
        expected["user_genre_rate"].append(np.mean([(sum(g) + 5 * rate) / (len(g) + 5) for g in by_genre]))
    for name, values in expected.items():
        assert unscale(movielens, rows, name) == pytest.approx(np.array(values), abs=1e-5), name


def test_the_item_rate_among_the_rows_profile_equals_a_loop(movielens, events, rows):
    def bucket(age):
        return sum(int(age) >= edge for edge in (18, 25, 35, 45, 50, 56))

    expected = []
    for row, event in zip(rows, events, strict=True):
        everyone, others = earlier(events, row), earlier(events, row, item_id=event["item_id"])
        base = (sum(e["like"] for e in everyone) + 1) / (len(everyone) + 2)
        rate = (sum(e["like"] for e in others) + 5 * base) / (len(others) + 5)
        alike = [e for e in others if e["gender"] == event["gender"] and bucket(e["age"]) == bucket(event["age"])]
        expected.append((sum(e["like"] for e in alike) + 5 * rate) / (len(alike) + 5))
    assert unscale(movielens, rows, "item_profile_rate") == pytest.approx(np.array(expected), abs=1e-5)


def test_side_ids_of_one_row(movielens, rows):
    row = next(row for row in rows if row["user_id"] == 3 and row["id.item"] == 2)
    # 880004000 s = 1997-11-20 (Thursday) 05:33:20 UTC; user 3: age 61, F, retired, V3N4P; item 2: 1940, Adventure Drama
    assert {name: row[f"id.{name}"] for name in ("gender", "age", "occupation", "zip", "year", "hour", "weekday")} == {
        "gender": 1,
        "age": 7,
        "occupation": 2,
        "zip": 4,
        "year": 41,
        "hour": 6,
        "weekday": 4,
    }
    assert row["ids.genres"] == [1, 3]  # of Adventure Comedy Drama Film-Noir Horror unknown
    assert row["ids.title"] == [2, 3]  # "red sails"; words in two titles: door, red, sails, the
    unknown_year = next(row for row in rows if row["id.item"] == 4)
    assert unknown_year["id.year"] == 0


def test_the_audience_can_be_left_out(fixture_folder, check_native):
    prepared = gem_datasets.load("ml-100k", source_dir=fixture_folder / "ml-100k", audience_length=0)
    check_native(prepared)
    assert [stream["name"] for stream in prepared.schema["streams"]] == ["history"]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("ml-100k.inter", "rating:float", "stars:float", r"ml-100k.inter: header .*expected user_id item_id rating"),
        (
            "ml-100k.inter",
            "5\t8\t2\t880009775",
            "5\t8\t7\t880009775",
            r"ml-100k.inter: ratings 1\.\.7, expected 1\.\.5",
        ),
        ("ml-100k.inter", "5\t8\t2\t880009775", "5\tx\t2\t880009775", r"column item_id must hold integers: .*'x'"),
        ("ml-100k.inter", "5\t8\t2\t880009775", "5\t8\t2", r"ml-100k.inter: not a tab-separated table with 4 columns"),
        ("ml-100k.user", "5\t50\tF\tdoctor\t10019\n", "", "user 5 occurs in ml-100k.inter, not in ml-100k.user"),
        ("ml-100k.item", "8\tQuiet\t1994\tDrama\n", "", "item 8 occurs in ml-100k.inter, not in ml-100k.item"),
    ],
)
def test_a_malformed_file_is_named(fixture_folder, tmp_path, file, old, new, message):
    shutil.copytree(fixture_folder / "ml-100k", tmp_path, dirs_exist_ok=True)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message):
        gem_datasets.load("ml-100k", source_dir=tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"ml-100k.inter does not exist; expected a tab-separated file"):
        gem_datasets.load("ml-100k", source_dir=tmp_path)


@pytest.mark.slow
def test_the_real_data_and_its_floors(tmp_path):
    prepared = gem_datasets.load("ml-100k", cache_dir=tmp_path)
    # Four events share the second at row 80,000; three of them lie after the wanted cut, so all go to evaluation.
    assert (prepared.train.num_rows, prepared.eval.num_rows) == (79_999, 20_001)
    assert prepared.train["timestamp"][-1].as_py() < prepared.eval["timestamp"][0].as_py() == 889_237_269
    logistic = logistic_floor(prepared.train, prepared.eval, "like")
    running = running_rate_floor(prepared.train, prepared.eval, "like")
    assert logistic == pytest.approx({"auc": 0.7057, "ne": 0.9086}, abs=2e-4)
    assert running == pytest.approx({"auc": 0.7374, "ne": 0.8685}, abs=2e-4)
