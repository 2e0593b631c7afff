"""S4 and D4: whatever a configuration, a schema or a batch holds, only our named errors come out of it.

Hypothesis draws changes to sound values; the fast count by default, the full one with --full.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
import torch
from gem_data.api import build_loader, read_schema, schema_from_dict, schema_to_dict
from gem_data.interface import DataError, LoaderConfig, Schema
from gem_data.testing import tiny_schema, write_tiny
from gem_pipelines.batches import BatchError, check_batch
from gem_pipelines.config import RunConfig
from gem_pipelines.config_codec import flatten, from_json, to_json
from gem_pipelines.config_overrides import apply_overrides
from gem_pipelines.errors import ConfigError
from gem_pipelines.recipes.debug import debug
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

QUIET = tuple(HealthCheck)
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=20)
    | st.sampled_from(["", "../x", "None", "nan", "1e400", "\0", "x" * 500]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Path of every value in nested objects and lists."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += places(item, (*path, index))
    return found


def change(value: Any, path: tuple[Any, ...], how: str, junk: Any) -> Any:
    changed = copy.deepcopy(value)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    if how == "remove":
        del holder[path[-1]]
    elif how == "rename" and isinstance(holder, dict):
        holder[str(path[-1]) + "x"] = holder.pop(path[-1])
    elif how == "add" and isinstance(holder, dict):
        holder[str(junk)[:50]] = junk
    else:
        holder[path[-1]] = junk
    return changed


def run(test: Any, examples: int, number: int) -> None:
    """Run a hypothesis test with a count and seed that the session chose."""
    seed(number)(settings(max_examples=examples, deadline=None, database=None, suppress_health_check=QUIET)(test))()


HOWS = st.sampled_from(["replace", "replace", "remove", "rename", "add"])


def test_s4_configurations(rng, count, counted):
    sound = to_json(debug())
    paths = places(sound)
    outcomes = {"refused": 0, "taken": 0}

    @given(st.sampled_from(paths), HOWS, JUNK)
    def check(path, how, junk):
        try:
            config = from_json(RunConfig, change(sound, path, how, junk))
        except ConfigError:
            outcomes["refused"] += 1
            return
        assert isinstance(config, RunConfig)
        assert from_json(RunConfig, json.loads(json.dumps(to_json(config)))) == config
        outcomes["taken"] += 1

    run(check, count(fast=100, full_count=50_000), rng.randrange(2**32))
    counted("configurations", outcomes)
    assert min(outcomes.values()) > 0


def test_s4_overrides(rng, count, counted):
    keys = sorted(flatten(debug()))
    outcomes = {"refused": 0, "taken": 0}

    @given(
        st.sampled_from(keys) | st.text(max_size=12), st.text(max_size=10) | st.sampled_from(["1", "-1", "nan", "True"])
    )
    def check(key, value):
        try:
            apply_overrides(debug(), [f"--{key}", value])
            outcomes["taken"] += 1
        except ConfigError:
            outcomes["refused"] += 1

    run(check, count(fast=10, full_count=2_000), rng.randrange(2**32))
    counted("overrides", outcomes)
    assert outcomes["refused"] > 0


def test_s4_schemas(rng, count, counted, tmp_path):
    write_tiny(tmp_path / "d")
    sound = schema_to_dict(read_schema(tmp_path / "d"))
    paths = [path for path in places(sound) if path[0] != "facts"]
    outcomes = {"refused": 0, "taken": 0}

    @given(st.sampled_from(paths), HOWS, JUNK)
    def check(path, how, junk):
        try:
            schema = schema_from_dict(change(sound, path, how, junk))
        except DataError:
            outcomes["refused"] += 1
            return
        assert isinstance(schema, Schema)
        outcomes["taken"] += 1

    run(check, count(fast=100, full_count=50_000), rng.randrange(2**32))
    counted("schemas", outcomes)
    assert min(outcomes.values()) > 0


def test_s4_loader_states(rng, count, counted, tmp_path):
    """A changed loader state is refused, or is the state of another step: never another order, never an exception."""
    write_tiny(tmp_path / "d")
    config = LoaderConfig(global_batch_size=16, prefetch=0)
    loader = build_loader(tmp_path / "d", split="train", config=config)
    batches = loader.epoch()
    loader.mark_trained(next(batches))
    sound = loader.state_dict()
    paths = places(sound)
    outcomes = {"refused": 0, "taken": 0}

    @given(st.sampled_from(paths), HOWS, JUNK)
    def check(path, how, junk):
        changed = change(sound, path, how, junk)
        try:
            loader.load_state_dict(changed)
        except DataError:
            outcomes["refused"] += 1
            return
        assert loader.state_dict() == sound
        outcomes["taken"] += 1

    run(check, count(fast=60, full_count=20_000), rng.randrange(2**32))
    counted("loader states", outcomes)
    assert outcomes["refused"] > 0


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """A sound batch of the tiny data set and its schema."""
    directory = tmp_path_factory.mktemp("batch") / "d"
    write_tiny(directory)
    loader = build_loader(directory, split="train", config=LoaderConfig(global_batch_size=16, prefetch=0))
    return next(iter(loader.epoch())), loader.schema


def with_ids(batch, *, values=None, lengths=None, **more):
    ids = batch.ids
    made = KeyedJaggedTensor(
        keys=more.pop("keys", ids.keys()),
        values=ids.values() if values is None else values,
        lengths=ids.lengths() if lengths is None else lengths,
        **more,
    )
    return dataclasses.replace(batch, ids=made)


def with_offsets(batch, stream, change):
    offsets = batch.streams[stream].offsets.clone()
    changed = dataclasses.replace(batch.streams[stream], offsets=change(offsets))
    return dataclasses.replace(batch, streams={**batch.streams, stream: changed})


def _set(tensor, index, value):
    changed = tensor.clone()
    changed[index % max(1, changed.numel())] = value
    return changed


BREAKS = {
    "negative length": lambda b, n: with_ids(b, lengths=_set(b.ids.lengths(), n, -1 - n)),
    "length too long": lambda b, n: with_ids(
        b, lengths=_set(b.ids.lengths(), n, int(b.ids.lengths()[n % b.ids.lengths().numel()]) + 1)
    ),
    "lengths past int32": lambda b, n: with_ids(b, lengths=_set(b.ids.lengths(), n, 2**31 - 1)),
    "values cut": lambda b, n: with_ids(b, values=b.ids.values()[: -1 - n % 5]),
    "values added": lambda b, n: with_ids(
        b, values=torch.cat([b.ids.values(), torch.zeros(1 + n % 5, dtype=torch.int64)])
    ),
    "float ids": lambda b, n: with_ids(b, values=b.ids.values().float()),
    "half ids": lambda b, n: with_ids(b, values=b.ids.values().half()),
    "bool ids": lambda b, n: with_ids(b, values=b.ids.values().bool()),
    "weights of ids": lambda b, n: with_ids(b, weights=torch.ones(b.ids.values().numel())),
    "weights of wrong length": lambda b, n: with_ids(b, weights=torch.ones(1 + n % 7)),
    "keys twice": lambda b, n: with_ids(b, keys=[b.ids.keys()[0], *b.ids.keys()[:-1]]),
    "keys in another order": lambda b, n: with_ids(b, keys=[*b.ids.keys()[1:], b.ids.keys()[0]]),
    "key missing": lambda b, n: with_ids(b, keys=b.ids.keys()[:-1], lengths=b.ids.lengths()[: -b.sample_ids.numel()]),
    "offsets from 1": lambda b, n: with_offsets(b, "views", lambda o: _set(o, 0, 1)),
    "offsets that go down": lambda b, n: with_offsets(b, "views", lambda o: _set(o, 1 + n % (o.numel() - 1), -1)),
    "offsets too far": lambda b, n: with_offsets(b, "views", lambda o: _set(o, o.numel() - 1, int(o[-1]) + 1 + n)),
    "offsets too few": lambda b, n: with_offsets(b, "views", lambda o: o[: -1 - n % 3]),
    "offsets of floats": lambda b, n: with_offsets(b, "views", lambda o: o.double()),
    "no offsets": lambda b, n: with_offsets(b, "views", lambda o: o[:0]),
    "stream missing": lambda b, n: dataclasses.replace(b, streams={"views": b.streams["views"]}),
    "stream too many": lambda b, n: dataclasses.replace(b, streams={**b.streams, "more": b.streams["views"]}),
    "labels of fewer rows": lambda b, n: dataclasses.replace(b, labels=b.labels[: n % b.labels.shape[0]]),
    "labels of integers": lambda b, n: dataclasses.replace(b, labels=b.labels.long()),
    "weights transposed": lambda b, n: dataclasses.replace(b, weights=b.weights.t()),
    "sample ids in two dims": lambda b, n: dataclasses.replace(b, sample_ids=b.sample_ids.view(-1, 1)),
    "times of fewer rows": lambda b, n: dataclasses.replace(b, timestamps=b.timestamps[:-1]),
    "origins of fewer rows": lambda b, n: dataclasses.replace(b, row_index=b.row_index[:-1]),
}


def test_d4_jagged_invariants(batch, rng, count, counted):
    """Every way of breaking a batch is refused with a BatchError; the sound batch passes."""
    sound, schema = batch
    check_batch(sound, schema)
    refused = dict.fromkeys(BREAKS, 0)

    @given(st.sampled_from(sorted(BREAKS)), st.integers(0, 1000))
    def check(name, number):
        try:
            broken = BREAKS[name](sound, number)
        except (RuntimeError, AssertionError, ValueError):
            return  # the tensor library refuses to make it
        with pytest.raises(BatchError):
            check_batch(broken, schema)
        refused[name] += 1

    run(check, count(fast=150, full_count=2_000), rng.randrange(2**32))
    for name in BREAKS:  # each at least once, whatever was drawn
        with pytest.raises((BatchError, RuntimeError, AssertionError)):
            check_batch(BREAKS[name](sound, 3), schema)
    counted("broken batches refused", sum(refused.values()))
    assert tiny_schema().labels == schema.labels
