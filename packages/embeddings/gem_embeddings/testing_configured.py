"""What policies and managed ids must do (public through testing.py)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.interface import ManagedIds, Policy, Tables
from gem_embeddings.testing_compare import (
    ConfiguredFactory,
    Quirks,
    State,
    assert_close_to_oracle,
    assert_equal,
    assert_rounded,
    assert_same_ids,
    assert_same_state,
    error_of,
    held,
    look_up,
    make_oracles,
    overwrite,
)
from gem_embeddings.testing_inputs import KEYS, OPTIMIZER, SEED, SHARED_SPECS, SPECS, make_ids, train_step

POLICIES: dict[str, Policy] = {"item": "drop", "tags": "drop", "words": "drop", "s.item": "hash"}


def _span(ids: KeyedJaggedTensor, feature: str) -> slice:
    start, stop = ids.offset_per_key()[KEYS.index(feature) :][:2]
    return slice(start, stop)


def _outside(ids: KeyedJaggedTensor, features: Iterable[str]) -> dict[str, int]:
    """Put every third id of these features outside its table, and none on row 0; how many, by feature."""
    ids.values().clamp_(min=1)
    count = {}
    for feature in features:
        span = _span(ids, feature)
        some = torch.arange(span.start, span.stop)[::3]
        ids.values()[span.start : span.stop : 3] = some * 7 % 5 * 1_000_003 - 4  # -4 and far outside
        count[feature] = some.numel()
    return count


def check_policies(factory: ConfiguredFactory, quirks: Quirks) -> None:
    """Ids outside: dropped from bags, zeros for single vectors, or another row than 0; counted, and only they.

    Training goes to the rows of the ids that are left, and to no other.
    """
    tables = factory(SPECS, OPTIMIZER, SEED, policies=POLICIES)
    start, early = held(tables.table_state()), None
    drops: dict[str, Policy] = {feature: how for feature, how in POLICIES.items() if how == "drop"}
    oracles = make_oracles(quirks, policies=drops)
    counts = {feature: {"ids": 0, "outside": 0} for feature in POLICIES}
    for step in range(3):
        ids = make_ids(9, seed=step)
        for feature, outside in _outside(ids, POLICIES).items():
            span = _span(ids, feature)
            counts[feature]["ids"] += 2 * (span.stop - span.start)  # looked up twice
            counts[feature]["outside"] += 2 * outside
        with torch.no_grad():
            out = look_up(tables, ids, quirks)
        found = {feature: vectors.cpu() for feature, vectors in out.items()}
        rows = _check_found(found, ids, held(tables.table_state()))
        train_step(tables, ids.to(torch.device(quirks.device)))
        ids.values()[_span(ids, "s.item")] = rows
        for oracle in oracles:
            train_step(oracle, ids)
        if early is None:
            early = tables.policy_counts()
            before = copy.deepcopy(early)
    assert tables.policy_counts() == counts, f"policy_counts {tables.policy_counts()}, expected {counts}"
    assert early == before, f"counts that were told before changed to {early}"
    assert_close_to_oracle(tables, oracles, quirks)
    for name in ("item", "tag", "word"):
        for key, part in tables.table_state()[name].items():
            assert_equal(
                part[0], start[name][key][0], f"{name} {key}: an id outside trained row 0, which none looks up"
            )
    _check_shared_policies(factory, quirks)


def _check_found(found: dict[str, Tensor], ids: KeyedJaggedTensor, state: State) -> Tensor:
    """Vectors of one batch under POLICIES; returns the rows that "s.item" looked up."""
    items, hashed = ids["item"].values(), ids["s.item"].values()
    inside = (items >= 0) & (items < 23)
    expected = torch.where(inside[:, None], state["item"]["weight"][items.where(inside, 0)], torch.zeros(9, 8))
    assert_equal(found["item"], expected, "dropped single ids")
    for feature, name in (("tags", "tag"), ("words", "word")):
        values, weight = ids[feature].values(), state[name]["weight"]
        inside = (values >= 0) & (values < weight.shape[0])
        row_of = torch.repeat_interleave(torch.arange(9), ids[feature].lengths())[inside]
        pooled = torch.zeros(9, weight.shape[1]).index_add(0, row_of, weight[values[inside]])
        if name == "word":
            pooled /= row_of.bincount(minlength=9).clamp(min=1)[:, None]  # the mean of those that are left
        assert_rounded(found[feature], pooled, f"{feature} without its dropped ids")
    same = (found["s.item"][:, None] == state["item"]["weight"]).all(2)
    assert same.any(1).all(), "hashed ids look up rows of the table"
    rows, inside = same.int().argmax(1), (hashed >= 0) & (hashed < 23)
    assert_equal(rows[inside], hashed[inside], "ids inside are not hashed")
    assert (rows[~inside] > 0).all(), "no id is hashed to row 0"
    for one in hashed[~inside].unique():
        assert rows[hashed == one].unique().numel() == 1, f"id {one} has one row"
    return rows


def _check_shared_policies(factory: ConfiguredFactory, quirks: Quirks) -> None:
    """Ids dropped from weighted bags take their weights along; a feature's policy acts in each of its tables."""
    policies: dict[str, Policy] = {"tags": "drop", "more_tags": "drop"}
    tables = factory(SHARED_SPECS, OPTIMIZER, SEED, policies=policies)
    oracles = make_oracles(quirks, specs=SHARED_SPECS, policies=policies)
    for step in range(3):
        ids = make_ids(9, seed=step, weighted=True)
        _outside(ids, policies)
        for model in (tables, *oracles):
            train_step(model, ids.to(torch.device(quirks.device if model is tables else "cpu")))
    expected = oracles[0].policy_counts()
    assert tables.policy_counts() == expected, f"policy_counts {tables.policy_counts()}, expected {expected}"
    assert_close_to_oracle(tables, oracles, quirks)


def _managed_batch(step: int) -> KeyedJaggedTensor:
    ids = make_ids(8, seed=step)
    for spec in SPECS[::2]:
        for feature in spec.features:
            span = _span(ids, feature)
            ids.values()[span] = (ids.values()[span] * 2 + step) * 7_000_000_000_123 - 5
    return ids


def check_managed(factory: ConfiguredFactory, quirks: Quirks) -> None:
    """Ids that earn rows train as in the reference; the map moves to other tables whole, or not at all.

    Evaluations are counted and insert nothing. The map is a copy both ways, as a table's state is.
    """
    managed = {"item": ManagedIds(interval=2), "tag": ManagedIds(policy="lru", interval=1)}
    tables = factory(SPECS, OPTIMIZER, SEED, managed=managed)
    oracles = make_oracles(quirks, managed=managed)
    for step in range(7):
        for model in (tables, *oracles):
            train_step(model, _managed_batch(step).to(torch.device(quirks.device if model is tables else "cpu")))
        expected = oracles[0].policy_counts()
        assert tables.policy_counts() == expected, f"step {step}: {tables.policy_counts()}, expected {expected}"
    assert all(count["evicted"] for count in expected.values()), "the batches evict nothing"
    _check_evaluations(tables, oracles, quirks)
    assert_close_to_oracle(tables, oracles, quirks)
    state, ids, shapes = held(tables.table_state()), tables.id_state(), tables.id_shapes()
    assert sorted(ids) == sorted(shapes) == sorted(managed), f"id_state {sorted(ids)}, id_shapes {sorted(shapes)}"
    for name, parts in ids.items():
        assert sorted(parts) == sorted(shapes[name]), (
            f"{name}: id_state {sorted(parts)}, id_shapes {sorted(shapes[name])}"
        )
        for key, part in parts.items():
            wanted = tuple(n if n >= 0 else came for n, came in zip(shapes[name][key], part.shape, strict=True))
            assert (part.dtype, tuple(part.shape)) == (torch.int64, wanted), f"{name} {key}: {part.shape} {part.dtype}"
    other = factory(SPECS, OPTIMIZER, SEED + 1, managed=managed)
    untouched = held(other.id_state())
    assert "'tag'" in error_of(lambda: other.load_id_state({"item": ids["item"]}))
    assert_same_ids(other.id_state(), untouched, "a map that does not fit")
    _check_map_moves(tables, factory(SPECS, OPTIMIZER, SEED, managed=managed), state, quirks)


def _check_evaluations(tables: Tables, oracles: Sequence[Tables], quirks: Quirks) -> None:
    before = held(tables.id_state())
    for step in range(20, 24):
        for model in (tables, *oracles):
            batch = _managed_batch(step).to(torch.device(quirks.device if model is tables else "cpu"))
            with torch.set_grad_enabled(step == 23):  # the last is one without a backward
                model(batch)
    assert_same_ids(tables.id_state(), before, "evaluations, and a lookup without a backward")
    expected = oracles[0].policy_counts()
    assert tables.policy_counts() == expected, f"evaluations: {tables.policy_counts()}, expected {expected}"


def _check_map_moves(tables: Tables, other: Tables, state: State, quirks: Quirks) -> None:
    saved = tables.id_state()
    loaded, kept = held(saved), held(saved)
    other.load_table_state(held(state))
    other.load_id_state(loaded)
    assert_same_ids(other.id_state(), kept, "loading a map")
    copied = {name: part.clone() for name, part in tables.copied_parts().items()}
    for step in range(7, 10):
        for model in (tables, other):
            train_step(model, _managed_batch(step).to(torch.device(quirks.device)))
    assert_same_ids(saved, kept, "training changed a map that was saved")
    assert_same_ids(loaded, kept, "training changed a map that was loaded")
    after = held(tables.id_state())
    assert_same_ids(other.id_state(), after, "loading a map and three steps")
    assert_same_state(other.table_state(), tables.table_state(), "loading a map and three steps")
    _check_copied_maps(tables, other, copied)
    for given in (saved, loaded, tables.id_state()):
        overwrite(given)
    assert_same_ids(tables.id_state(), after, "writing into a map that was saved")
    assert_same_ids(other.id_state(), after, "writing into a map that was loaded")


def _check_copied_maps(tables: Tables, other: Tables, before: dict[str, Tensor]) -> None:
    """`copied_parts` has the maps, which all ranks hold: alike in tables whose maps are, and changed by rounds."""
    parts = tables.copied_parts()
    maps = {name: part for name, part in parts.items() if not part.dtype.is_floating_point}
    assert len(maps) >= len(tables.id_shapes()), f"copied_parts {list(parts)}, expected the maps of the managed tables"
    assert_same_ids({"": other.copied_parts()}, {"": parts}, "copied_parts of tables with the same maps")
    assert any(not torch.equal(part, before[name]) for name, part in maps.items()), (
        "copied_parts is the same after rounds that changed the maps"
    )
