from __future__ import annotations

import dataclasses
import json

import gem_datasets
import pytest


def test_every_name_has_options_with_defaults():
    assert gem_datasets.names() == ("ml-100k", "openbandit", "parity", "synthetic")
    for name in gem_datasets.names():
        kind = gem_datasets.options_type(name)
        assert dataclasses.asdict(kind()).keys() == {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("name", "hint"), [("ml100k", "did you mean 'ml-100k'"), ("syntetic", "did you mean 'synthetic'"), ("x", "known:")]
)
def test_an_unknown_name_is_answered_with_the_nearest(name, hint):
    with pytest.raises(ValueError, match=hint):
        gem_datasets.load(name)


def test_an_unknown_option_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"'synthetic' has no option 'row' \(did you mean 'rows'\?\).*max_length"):
        gem_datasets.load("synthetic", row=10)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("synthetic", {"rows": 1}, "rows must be at least 100, got 1"),
        ("synthetic", {"streams": 5}, r"streams must lie in 1\.\.4, got 5"),
        ("synthetic", {"click_rate": 1.0}, r"click_rate must lie in \(0, 1\), got 1.0"),
        ("synthetic", {"delay_hours": 0.0}, "delay_hours must be positive, got 0.0"),
        ("parity", {"items": 1}, "items must be at least 2, got 1"),
        ("ml-100k", {"train_fraction": 0.0}, r"train_fraction must lie in \(0, 1\), got 0.0"),
        ("ml-100k", {"max_length": 0}, "max_length must be at least 1, got 0"),
        ("openbandit", {"campaign": "kids"}, "campaign must be one of all, men, women or every, got 'kids'"),
        ("openbandit", {"policy": "greedy"}, "policy must be one of random, bts or every, got 'greedy'"),
        ("openbandit", {"max_length": 0}, "max_length must be at least 1, got 0"),
    ],
)
def test_an_option_out_of_range_names_itself_and_its_range(name, options, message):
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        gem_datasets.load(name, **options)


@pytest.mark.parametrize("name", ["movielens", "openbandit"])
def test_importers_keep_the_promises_of_the_native_layout(name, check_native, request):
    check_native(request.getfixturevalue(name))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("synthetic", {"rows": 400, "users": 30, "items": 50, "streams": 4, "max_length": 5, "user_ids": True}),
        ("synthetic", {"rows": 100, "users": 1, "items": 1, "streams": 1, "max_length": 1}),
        ("parity", {"rows": 300, "max_length": 6}),
    ],
)
def test_generators_keep_the_promises_of_the_native_layout(name, options, check_native):
    prepared = gem_datasets.load(name, **options)
    check_native(prepared)
    assert prepared.train.num_rows + prepared.eval.num_rows == options["rows"]


def test_the_schema_is_json(movielens, openbandit):
    for prepared in (movielens, openbandit, gem_datasets.load("parity", rows=100)):
        assert json.loads(json.dumps(prepared.schema)) == prepared.schema
