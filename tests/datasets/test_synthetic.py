"""The planted truth: probabilities recomputed from the columns alone, labels that follow them, the delayed label."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json

import gem_datasets
import numpy as np
import pyarrow as pa
import pytest
from gem_datasets import synthetic
from gem_datasets.scores import auc, normalized_entropy
from gem_datasets.synthetic_world import STREAMS, make_world

SMALL = {"rows": 1500, "users": 60, "items": 80, "streams": 4, "max_length": 9, "seed": 3}
DAY_S = 86400
GOLDEN_TRAIN, GOLDEN_SCHEMA = "70d98bb5e9ed925a", "20c19407114d5de1"


@pytest.fixture(scope="module")
def options():
    return synthetic.SyntheticOptions(**SMALL)


@pytest.fixture(scope="module")
def prepared():
    return gem_datasets.load("synthetic", **SMALL)


@pytest.fixture(scope="module")
def rows(prepared):
    return prepared.train.to_pylist() + prepared.eval.to_pylist()


def planted_click_logit(world, row):
    """The module docstring's formula, read from one row's own columns (up to the intercept)."""
    kind_u = world.profile_type[row["id.profile"] - 1]
    kind_i = world.campaign_type[row["id.campaign"] - 1]
    logit = world.click_affinity[kind_u, kind_i] + world.item_bias[row["id.item"] - 1]
    logit += world.placement_bias[row["id.placement"] - 1]
    for spec in STREAMS:
        total = 0.0
        columns = [row[f"stream.{spec.name}.{name}"] for name in ("topic", "action", "time")]
        for topic, action, time in zip(*columns, strict=True):
            if topic == row["id.topic"]:
                value = sum(w for bit, w in enumerate(spec.action_weights) if action >> bit & 1)
                age_days = (row["timestamp"] - time) / DAY_S
                total += value / (1 + age_days / spec.half_life_days)
        logit += spec.click_weight * np.tanh(total)
    hour = row["timestamp"] % DAY_S / 3600
    logit += 0.4 * row["dense.price"] - 0.3 * row["dense.quality"] ** 2 + 0.4 * row["dense.bid"]
    return logit + 0.3 * np.cos(2 * np.pi * (hour - 20) / 24)


def test_the_planted_probability_is_a_function_of_the_rows_own_columns(options, prepared, rows):
    world = make_world(options.users, options.items, np.random.default_rng([options.seed, 0]))
    logit = np.array([planted_click_logit(world, row) for row in rows])
    low, high = -20.0, 20.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 / (1 + np.exp(-logit - middle))).mean() < 0.2 else (low, middle)
    p = 1 / (1 + np.exp(-logit - low))
    label = prepared.eval["label.click"].to_numpy()
    p_eval = p[prepared.train.num_rows :]
    facts = prepared.schema["facts"]
    assert facts["best_ne"]["click"] == pytest.approx(normalized_entropy(label, p_eval), rel=1e-5)
    assert facts["best_auc"]["click"] == pytest.approx(auc(label, p_eval), abs=1e-4)
    entropy = -(p_eval * np.log(p_eval) + (1 - p_eval) * np.log(1 - p_eval)).mean()
    assert facts["entropy_floor_nats"]["click"] == pytest.approx(entropy, rel=1e-5)


def test_labels_follow_the_planted_probabilities():
    """With p planted, sum(label - p) / sqrt(sum p (1 - p)) is a standard normal: overall and by tenths of p."""
    options = synthetic.SyntheticOptions(rows=60_000, users=300, items=200, streams=1, max_length=4)
    world = make_world(options.users, options.items, synthetic._rng(options, 0))
    start, stop = synthetic.START_TIME, synthetic.START_TIME + options.days * DAY_S
    events = [
        synthetic.make_events(
            world, STREAMS[0], start - synthetic.HISTORY_DAYS * DAY_S, stop, synthetic._rng(options, 10)
        )
    ]
    planted = synthetic.plant(world, synthetic._impressions(world, events, options), options)
    prepared = synthetic.prepare(options)
    assert planted.click.mean() == pytest.approx(0.2, abs=1e-9)
    for name, p in (("click", planted.click), ("conversion", planted.conversion)):
        label = np.concatenate([t[f"label.{name}"].to_numpy() for t in (prepared.train, prepared.eval)])
        known = np.concatenate([t["weight.conversion"].to_numpy() for t in (prepared.train, prepared.eval)]) > 0
        label, p = label[known], p[known]
        tenths = np.argsort(np.argsort(p)) * 10 // len(p)
        for rows in [np.full(len(p), True), *(tenths == k for k in range(10))]:
            z = (label - p)[rows].sum() / np.sqrt((p * (1 - p))[rows].sum())
            assert abs(z) < 4.0, (name, z)


def test_the_streams_are_needed():
    """Without the interests, everything else known, the planted probability scores 2 % worse than the best."""
    options = synthetic.SyntheticOptions(rows=60_000, users=1000, items=200, max_length=16)
    world = make_world(options.users, options.items, synthetic._rng(options, 0))
    start, stop = synthetic.START_TIME, synthetic.START_TIME + options.days * DAY_S
    events = [
        synthetic.make_events(
            world, spec, start - synthetic.HISTORY_DAYS * DAY_S, stop, synthetic._rng(options, 10 + k)
        )
        for k, spec in enumerate(STREAMS[: options.streams])
    ]
    rows = synthetic._impressions(world, events, options)
    label = np.random.default_rng(0).random(options.rows) < synthetic.plant(world, rows, options).click
    best = normalized_entropy(label, synthetic.plant(world, rows, options).click)
    blind = dataclasses.replace(rows, interests=np.zeros_like(rows.interests))
    assert normalized_entropy(label, synthetic.plant(world, blind, options).click) > 1.02 * best


def test_no_model_beats_the_planted_probability_and_the_facts_agree(prepared):
    facts = prepared.schema["facts"]
    for name in ("click", "conversion"):
        assert 0.5 < facts["expected_best_ne"][name] < 1.0
        assert facts["best_ne"][name] == pytest.approx(facts["expected_best_ne"][name], rel=0.25)


def test_a_conversion_needs_a_click_and_open_windows_have_weight_zero(options, prepared, rows):
    freeze = prepared.eval["timestamp"][0].as_py()
    still_open = 0
    for number, row in enumerate(rows):
        assert row["label.conversion"] <= row["label.click"]
        is_open = number < prepared.train.num_rows and row["timestamp"] + options.window_hours * 3600 > freeze
        assert row["weight.conversion"] == (0.0 if is_open else 1.0)
        assert not (is_open and row["label.conversion"])
        still_open += is_open
    assert still_open == prepared.schema["facts"]["conversion_rows_open_at_freeze"] > 0
    assert sum(row["label.conversion"] for row in rows) > 10


def test_a_longer_delay_lets_fewer_conversions_arrive():
    rates = []
    for delay_hours in (1.0, 72.0):
        table = gem_datasets.load("synthetic", rows=20_000, users=50, streams=1, max_length=2, delay_hours=delay_hours)
        rates.append(table.eval["label.conversion"].to_numpy().mean())
    # 1 - exp(-24 / 72) = 0.283 of the conversions that 1 - exp(-24) lets in
    assert rates[1] / rates[0] == pytest.approx(0.283, abs=0.08)


def table_bytes(table):
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return sink.getvalue()


def test_the_seed_decides_every_byte(prepared):
    again = gem_datasets.load("synthetic", **SMALL)
    other = gem_datasets.load("synthetic", **SMALL | {"seed": 4})
    assert again.schema == prepared.schema
    for split in ("train", "eval"):
        assert table_bytes(getattr(again, split)) == table_bytes(getattr(prepared, split))
    assert table_bytes(other.eval) != table_bytes(prepared.eval)


def test_one_more_stream_changes_no_impression_and_no_other_stream(prepared):
    fewer = gem_datasets.load("synthetic", **SMALL | {"streams": 2})
    kept = [name for name in fewer.train.column_names if name.split(".")[0] in ("sample_id", "id", "stream")]
    assert fewer.train.select(kept).equals(prepared.train.select(kept))


def test_users_items_and_lengths_follow_power_laws():
    prepared = gem_datasets.load("synthetic", rows=20_000, users=1000, items=500, streams=1, max_length=200)
    for column in ("user_id", "id.item"):
        counts = np.sort(np.bincount(prepared.train[column].to_numpy()))[::-1]
        assert counts[:50].sum() > 3 * counts[200:250].sum()
    lengths = np.diff(prepared.train["stream.organic.time"].combine_chunks().offsets.to_numpy())
    assert lengths.max() > 8 * np.median(lengths)


def test_user_ids_are_a_choice(prepared):
    assert "id.user" not in prepared.train.column_names
    named = gem_datasets.load("synthetic", **SMALL | {"user_ids": True})
    assert named.train["id.user"].equals(named.train["user_id"])


def test_impressions_of_a_request_share_the_user_the_second_and_the_history():
    shown = gem_datasets.load("synthetic", **SMALL, impressions=4)
    rows = shown.train.to_pylist() + shown.eval.to_pylist()
    own = {"sample_id", "weight.conversion", "label.click", "label.conversion", *synthetic.IMPRESSION}
    starts = [0]
    for number in range(1, len(rows)):
        before, row = rows[number - 1], rows[number]
        if any(row[name] != before[name] for name in row if name not in own):
            starts.append(number)
    sizes = np.diff([*starts, len(rows)])
    assert 3.5 < sizes.mean() < 4.5
    assert sizes.max() <= 7
    assert len({row["id.item"] for row in rows[starts[1] : starts[2]]}) > 1 or sizes[1] == 1
    assert shown.schema["facts"]["options"]["impressions"] == 4


def test_requests_as_rows_hold_the_same_samples():
    plain = gem_datasets.load("synthetic", **SMALL, impressions=4)
    grouped = gem_datasets.load("synthetic", **SMALL, impressions=4, requests=True)
    assert "impression" not in plain.schema
    assert grouped.schema["impression"] == list(synthetic.IMPRESSION)
    for split in ("train", "eval"):
        samples, requests = getattr(plain, split), getattr(grouped, split)
        for name in samples.column_names:
            held = requests.column(name).to_pylist()
            if name in ("sample_id", *synthetic.IMPRESSION) or name.startswith(("label.", "weight.")):
                came = [value for values in held for value in values]
            else:
                counts = [len(ids) for ids in requests.column("sample_id").to_pylist()]
                came = [value for value, count in zip(held, counts, strict=True) for _ in range(count)]
            assert came == samples.column(name).to_pylist(), name


def test_without_requests_the_bytes_are_those_of_before():
    """Written down from the generator as it was before it knew requests."""
    prepared = gem_datasets.load("synthetic", **SMALL)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, prepared.train.schema) as writer:
        writer.write_table(prepared.train.combine_chunks())
    assert hashlib.sha256(sink.getvalue()).hexdigest()[:16] == GOLDEN_TRAIN
    facts = json.dumps(prepared.schema, sort_keys=True)
    assert hashlib.sha256(facts.encode()).hexdigest()[:16] == GOLDEN_SCHEMA
