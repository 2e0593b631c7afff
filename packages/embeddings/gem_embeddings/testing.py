"""The conformance suite: what any implementation of `Tables` must do, as functions that take a factory.

An implementation kept elsewhere proves itself with

    def factory(specs, optimizer, seed): return MyTables(...)
    run_conformance(factory, Quirks())                      # one process
    check_ranks(factory, Quirks(), rank, world_size)        # on every rank of an initialised process group
    check_averages(factory, Quirks(), ...)                  # where copies are averaged
    check_policies(configured, Quirks())                    # where ids outside their table have policies
    check_managed(configured, Quirks())                     # where ids earn their rows
    check_exchange(exchange)                                # an `Exchange`, on all its ranks

`configured` is a `ConfiguredFactory`: it takes policies and managed tables too. Every check raises AssertionError with
what differs. Training is compared with `ReferenceTables` in float64; allowed is three times the error of the same
reference in float32 plus two roundings of the largest value, so no tolerance is picked by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.averaged import scaled_optimizer
from gem_embeddings.initial import initial_rows
from gem_embeddings.interface import ManagedIds, Policy, Replicas, RowWiseAdagrad, Tables, TableSpec
from gem_embeddings.layout import CUT_BY_COLUMNS, ON_A_HOST, parse_sharding
from gem_embeddings.reference import ReferenceTables
from gem_embeddings.testing_exchange import GroupExchange as GroupExchange
from gem_embeddings.testing_exchange import check_exchange as check_exchange
from gem_embeddings.testing_inputs import KEYS, OPTIMIZER, SEED, SPECS, make_ids, part_of, train_step

Factory = Callable[[Sequence[TableSpec], RowWiseAdagrad, int], Tables]


class ConfiguredFactory(Protocol):
    """Builds tables with policies by feature, or with tables whose ids earn their rows; see `api.build_tables`."""

    def __call__(
        self,
        specs: Sequence[TableSpec],
        optimizer: RowWiseAdagrad,
        seed: int,
        *,
        policies: Mapping[str, Policy] | None = None,
        managed: Mapping[str, ManagedIds] | None = None,
    ) -> Tables:
        """The tables."""
        ...


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """What an implementation is allowed to differ in, as data.

    device         where ids go and vectors come from
    error_factor   allowed multiple of the float32 reference's error against float64
    column_parts   table -> parts that its columns are cut in, each with a moment of its own
    """

    device: str = "cpu"
    error_factor: float = 3.0
    column_parts: Mapping[str, int] = field(default_factory=dict)


def run_conformance(factory: Factory, quirks: Quirks) -> None:
    """All one-process checks."""
    for check in CHECKS:
        check(factory, quirks)


def check_start_values(factory: Factory, quirks: Quirks) -> None:
    """Start values come from seed and name alone, momentum starts at 0."""
    state = factory(SPECS, OPTIMIZER, SEED).table_state()
    assert sorted(state) == sorted(spec.name for spec in SPECS), sorted(state)
    for spec in SPECS:
        expected = initial_rows(spec, seed=SEED, start=0, stop=spec.rows)
        assert torch.equal(state[spec.name]["weight"], expected), f"start values of {spec.name}"
        assert not state[spec.name]["momentum"].any(), f"momentum of {spec.name}"


def check_lookups(factory: Factory, quirks: Quirks) -> None:
    """Vectors are the rows of the table, in row order, whatever the order of the keys; empty bags give 0."""
    tables = factory(SPECS, OPTIMIZER, SEED)
    state = tables.table_state()
    for keys in (KEYS, tuple(reversed(KEYS))):
        ids = make_ids(9, seed=1, keys=keys)
        out = tables(ids.to(torch.device(quirks.device)))
        assert sorted(out) == sorted(KEYS), sorted(out)
        for spec in SPECS:
            for feature in spec.features:
                rows = state[spec.name]["weight"][ids[feature].values()]
                if spec.pooling == "none":
                    _assert_equal(out[feature].cpu(), rows, feature)
                    continue
                for row, own in enumerate(rows.split(ids[feature].lengths().tolist())):
                    pooled = own.sum(0) / (max(len(own), 1) if spec.pooling == "mean" else 1)
                    torch.testing.assert_close(out[feature][row].cpu(), pooled, rtol=1e-6, atol=1e-6)


def check_training(factory: Factory, quirks: Quirks) -> None:
    """Twenty steps with repeated ids equal the float64 reference to float32 rounding; zero-row steps change nothing."""
    tables = factory(SPECS, OPTIMIZER, SEED)
    oracles = _oracles(quirks)
    for step in range(20):
        for model in (tables, *oracles):
            device = quirks.device if model is tables else "cpu"
            train_step(model, make_ids(8, seed=step).to(torch.device(device)))
        if step == 10:
            before = tables.table_state()
            train_step(tables, make_ids(0, seed=0).to(torch.device(quirks.device)))
            _assert_same_state(before, tables.table_state(), "a step on zero rows")
    _assert_close_to_oracle(tables, oracles, quirks)


def check_no_ids(factory: Factory, quirks: Quirks) -> None:
    """Zero rows, and rows without list ids, give empty or zero vectors of the right dim."""
    tables = factory(SPECS, OPTIMIZER, SEED)
    out = tables(make_ids(0, seed=0).to(torch.device(quirks.device)))
    assert {feature: tuple(vectors.shape) for feature, vectors in out.items()} == {
        feature: (0, spec.dim) for spec in SPECS for feature in spec.features
    }
    out = tables(make_ids(3, seed=0, empty=True).to(torch.device(quirks.device)))
    assert out["s.item"].shape == (0, 8)
    _assert_equal(out["tags"].cpu(), torch.zeros(3, 8), "tags of rows without ids")
    _assert_equal(out["words"].cpu(), torch.zeros(3, 4), "words of rows without ids")


def check_bad_input(factory: Factory, quirks: Quirks) -> None:
    """Ids outside the table and missing features are ValueErrors that name them; no parameter changes."""
    tables = factory(SPECS, OPTIMIZER, SEED)
    before = tables.table_state()
    for bad in (23, -1):
        ids = make_ids(4, seed=2)
        start = int(ids.offset_per_key()[KEYS.index("s.item")])
        ids.values()[start + 1] = bad
        row = int((ids["s.item"].offsets() <= 1).sum()) - 1
        message = _error_of(lambda ids=ids: tables(ids.to(torch.device(quirks.device))))
        for part in ("'s.item'", "'item'", f"row {row}", f"id {bad} ", "0 <= id < 23"):
            assert part in message, f"{part!r} not in {message!r}"
    message = _error_of(lambda: tables(make_ids(2, seed=0, keys=KEYS[:-1]).to(torch.device(quirks.device))))
    assert "s.item" in message, message
    _assert_same_state(before, tables.table_state(), "bad input")


def check_state(factory: Factory, quirks: Quirks) -> None:
    """State moves a model from one object to another bit for bit; a state that does not fit changes nothing."""
    source, target = factory(SPECS, OPTIMIZER, SEED), factory(SPECS, OPTIMIZER, SEED + 1)
    for step in range(3):
        train_step(source, make_ids(5, seed=step).to(torch.device(quirks.device)))
    before = target.table_state()
    broken = source.table_state()
    del broken["shop"]
    broken["other"] = broken["tag"]
    broken["word"] = {"weight": torch.zeros(2, 4), "momentum": broken["word"]["momentum"]}
    message = _error_of(lambda: target.load_table_state(broken))
    for part in ("'shop' is missing", "'other'", "'word'", "(13, 4)", "(2, 4)"):
        assert part in message, f"{part!r} not in {message!r}"
    _assert_same_state(before, target.table_state(), "a state that does not fit")
    target.load_table_state(source.table_state())
    for tables in (source, target):
        train_step(tables, make_ids(5, seed=9).to(torch.device(quirks.device)))
    _assert_same_state(source.table_state(), target.table_state(), "loading a state and one step")


def check_learning_rate(factory: Factory, quirks: Quirks) -> None:
    """set_learning_rate counts from the next forward on: 0 stops the weights, momentum goes on."""
    tables = factory(SPECS, OPTIMIZER, SEED)
    before = tables.table_state()
    tables.set_learning_rate(0.0)
    train_step(tables, make_ids(5, seed=1).to(torch.device(quirks.device)))
    frozen = tables.table_state()
    for name in before:
        _assert_equal(frozen[name]["weight"], before[name]["weight"], f"{name} at learning rate 0")
        assert frozen[name]["momentum"].any(), name
    tables.set_learning_rate(0.2)
    other = factory(SPECS, RowWiseAdagrad(lr=0.2, eps=OPTIMIZER.eps), SEED)
    other.load_table_state(frozen)
    for model in (tables, other):
        train_step(model, make_ids(5, seed=2).to(torch.device(quirks.device)))
    _assert_same_state(tables.table_state(), other.table_state(), "learning rate 0.2")


def check_prepared(factory: Factory, quirks: Quirks) -> None:
    """Ids that were prepared before the update of another batch give what they give after it, bit for bit, once."""
    device = torch.device(quirks.device)
    ahead, plain = factory(SPECS, OPTIMIZER, SEED), factory(SPECS, OPTIMIZER, SEED)
    batches = [make_ids(rows, seed=rows).to(device) for rows in (6, 0, 7)]
    prepared = None
    for number, ids in enumerate(batches):
        following = batches[number + 1] if number + 1 < len(batches) else None
        prepared = train_step(ahead, ids, prepared=prepared, ahead=following)
        train_step(plain, ids)
    _assert_same_state(plain.table_state(), ahead.table_state(), "prepared ids")
    once = ahead.prepare(batches[0])
    assert not once.used, "prepared ids count as used before they were looked up"
    with torch.no_grad():
        ahead.look_up(once)
    assert once.used, "ids that were looked up do not count as used"
    assert "once" in _error_of(lambda: ahead.look_up(once))


def check_told(factory: Factory, quirks: Quirks) -> None:
    """What tables say of themselves: shapes, where they lie, what is held in copy; and that no id is managed."""
    tables = factory(SPECS, OPTIMIZER, SEED)
    train_step(tables, make_ids(5, seed=1).to(torch.device(quirks.device)))
    state = tables.table_state()
    shapes = {name: {key: tuple(part.shape) for key, part in entry.items()} for name, entry in state.items()}
    assert tables.state_shapes() == shapes, f"state_shapes {tables.state_shapes()}, table_state has {shapes}"
    for spec in SPECS:
        parts = quirks.column_parts.get(spec.name, 1)
        moments = (spec.rows, parts) if parts > 1 else (spec.rows,)
        assert shapes[spec.name] == {"weight": (spec.rows, spec.dim), "momentum": moments}, shapes[spec.name]
    places = tables.placement()
    assert sorted(places) == sorted(shapes), f"placement of {sorted(places)}, the tables are {sorted(shapes)}"
    assert all(isinstance(place, str) and place for place in places.values()), places
    names = list(tables.copied_parts())
    assert all(isinstance(part, Tensor) for part in tables.copied_parts().values()), names
    train_step(tables, make_ids(5, seed=2).to(torch.device(quirks.device)))
    assert list(tables.copied_parts()) == names, f"copied_parts {list(tables.copied_parts())}, a step before {names}"
    assert tables.policy_counts() == {}, f"no feature has a policy, got {tables.policy_counts()}"
    assert tables.id_shapes() == tables.id_state() == {}, f"no table is managed, got {tables.id_shapes()}"
    before = tables.table_state()
    tables.load_id_state({})
    assert "item" in _error_of(lambda: tables.load_id_state({"item": {"ids": torch.zeros(23, dtype=torch.int64)}}))
    _assert_same_state(before, tables.table_state(), "id states of tables that are not managed")


def check_policies(factory: ConfiguredFactory, quirks: Quirks) -> None:
    """Ids outside: dropped from bags, zeros for single vectors, or another row than 0; counted, and only they."""
    policies: dict[str, Policy] = {"item": "drop", "tags": "drop", "s.item": "hash"}
    tables = factory(SPECS, OPTIMIZER, SEED, policies=policies)
    state = tables.table_state()
    counts = {feature: {"ids": 0, "outside": 0} for feature in policies}
    for step in range(3):
        ids = make_ids(9, seed=step)
        for feature in policies:
            start, stop = ids.offset_per_key()[KEYS.index(feature) :][:2]
            ids.values()[start:stop:3] = torch.arange(start, stop)[::3] * 7 % 5 * 1_000_003 - 4  # -4 and far outside
            count = len(range(start, stop, 3))
            counts[feature] = {
                "ids": counts[feature]["ids"] + stop - start,
                "outside": counts[feature]["outside"] + count,
            }
        with torch.no_grad():
            out = tables(ids.to(torch.device(quirks.device)))
        items, tags, hashed = ids["item"].values(), ids["tags"].values(), ids["s.item"].values()
        zeros = torch.zeros(9, 8)
        inside = (items >= 0) & (items < 23)
        expected = torch.where(inside[:, None], state["item"]["weight"][items.where(inside, 0)], zeros)
        _assert_equal(out["item"].cpu(), expected, "dropped single ids")
        inside = (tags >= 0) & (tags < 11)
        row_of = torch.repeat_interleave(torch.arange(9), ids["tags"].lengths())
        expected = zeros.index_add(0, row_of[inside], state["tag"]["weight"][tags[inside]])
        torch.testing.assert_close(out["tags"].cpu(), expected, rtol=1e-6, atol=1e-6)
        same = (out["s.item"].cpu()[:, None] == state["item"]["weight"]).all(2)
        assert same.any(1).all(), "hashed ids look up rows of the table"
        rows, inside = same.int().argmax(1), (hashed >= 0) & (hashed < 23)
        _assert_equal(rows[inside], hashed[inside], "ids inside are not hashed")
        assert (rows[~inside] > 0).all(), "no id is hashed to row 0"
        for one in hashed[~inside].unique():
            assert rows[hashed == one].unique().numel() == 1, f"id {one} has one row"
    assert tables.policy_counts() == counts, f"policy_counts {tables.policy_counts()}, expected {counts}"


def check_managed(factory: ConfiguredFactory, quirks: Quirks) -> None:
    """Ids that earn rows train as in the reference; the map moves to other tables whole, or not at all."""
    managed = {"item": ManagedIds(interval=2), "tag": ManagedIds(policy="lru", interval=1)}
    tables = factory(SPECS, OPTIMIZER, SEED, managed=managed)
    oracles = [_oracle(quirks, dtype, OPTIMIZER, managed) for dtype in _DTYPES]

    def batch(step: int) -> KeyedJaggedTensor:
        ids = make_ids(8, seed=step)
        for spec in SPECS[::2]:
            for feature in spec.features:
                start, stop = ids.offset_per_key()[KEYS.index(feature) :][:2]
                ids.values()[start:stop] = (ids.values()[start:stop] * 2 + step) * 7_000_000_000_123 - 5
        return ids

    for step in range(7):
        for model in (tables, *oracles):
            train_step(model, batch(step).to(torch.device(quirks.device if model is tables else "cpu")))
        expected = oracles[0].policy_counts()
        assert tables.policy_counts() == expected, f"step {step}: {tables.policy_counts()}, expected {expected}"
    assert all(count["evicted"] for count in expected.values()), "the batches evict nothing"
    _assert_close_to_oracle(tables, oracles, quirks)
    state, ids, shapes = tables.table_state(), tables.id_state(), tables.id_shapes()
    assert sorted(ids) == sorted(shapes) == sorted(managed), f"id_state {sorted(ids)}, id_shapes {sorted(shapes)}"
    for name, parts in ids.items():
        assert sorted(parts) == sorted(shapes[name]), (
            f"{name}: id_state {sorted(parts)}, id_shapes {sorted(shapes[name])}"
        )
        for key, part in parts.items():
            wanted = tuple(n if n >= 0 else came for n, came in zip(shapes[name][key], part.shape, strict=True))
            assert (part.dtype, tuple(part.shape)) == (torch.int64, wanted), f"{name} {key}: {part.shape} {part.dtype}"
    other = factory(SPECS, OPTIMIZER, SEED + 1, managed=managed)
    untouched = other.id_state()
    assert "'tag'" in _error_of(lambda: other.load_id_state({"item": ids["item"]}))
    _assert_same_ids(other.id_state(), untouched, "a map that does not fit")
    other = factory(SPECS, OPTIMIZER, SEED, managed=managed)
    other.load_table_state(state)
    other.load_id_state(ids)
    _assert_same_ids(other.id_state(), ids, "loading a map")
    for step in range(7, 10):
        for model in (tables, other):
            train_step(model, batch(step).to(torch.device(quirks.device)))
    _assert_same_ids(other.id_state(), tables.id_state(), "loading a map and three steps")
    _assert_same_state(other.table_state(), tables.table_state(), "loading a map and three steps")


def check_ranks(factory: Factory, quirks: Quirks, rank: int, world_size: int) -> None:
    """Every rank trains its unequal part of a global batch (rank 0's may be empty); the result is one process's."""
    tables = factory(SPECS, OPTIMIZER, SEED)
    oracles = _oracles(quirks)
    rows, prepared = 9, None

    def part(step: int) -> tuple[KeyedJaggedTensor, int]:
        start = 0 if step == 5 else 2
        bounds = [0, start, *[rows] * world_size] if world_size > 1 else [0, rows]
        own = part_of(make_ids(rows, seed=step), bounds[rank], bounds[rank + 1])
        return own.to(torch.device(quirks.device)), bounds[rank]

    for step in range(20):
        own, first_row = part(step)
        # every third batch is looked up without having been prepared
        ahead = part(step + 1)[0] if step % 3 else None
        scale = world_size / rows
        prepared = train_step(tables, own, first_row=first_row, scale=scale, prepared=prepared, ahead=ahead)
        for oracle in oracles:
            train_step(oracle, make_ids(rows, seed=step), scale=1 / rows)
    _assert_close_to_oracle(tables, oracles, quirks)
    saved = tables.table_state()
    again = factory(SPECS, OPTIMIZER, SEED + 1)
    again.load_table_state(saved)
    _assert_same_state(saved, again.table_state(), "loading on several ranks")


def check_averages(
    factory: Factory, quirks: Quirks, replicas: Replicas, *, copy_ranks: Sequence[Sequence[int]], rank: int
) -> None:
    """Averaged copies equal their definition: one `ReferenceTables` a copy on that copy's rows, then the mean.

    copy_ranks: the ranks of each copy, consecutive ones. Rows are dealt in rank order; the first rank has none once.
    """
    copies, world_size = len(copy_ranks), sum(map(len, copy_ranks))
    tables = factory(SPECS, OPTIMIZER, SEED)
    scaled = scaled_optimizer(OPTIMIZER, replicas)
    oracles = [[_oracle(quirks, dtype, scaled) for _ in range(copies)] for dtype in _DTYPES]
    rows = 4 * world_size + 1
    for step in range(2 * replicas.every + 1):
        whole = make_ids(rows, seed=step)
        start = 0 if step == 1 else 3
        bounds = [0, *(start + 4 * i for i in range(world_size - 1)), rows]
        own = part_of(whole, bounds[rank], bounds[rank + 1]).to(torch.device(quirks.device))
        train_step(tables, own, first_row=bounds[rank], scale=world_size / rows)
        for members in oracles:
            for model, ranks in zip(members, copy_ranks, strict=True):
                part = part_of(whole, bounds[ranks[0]], bounds[ranks[-1] + 1])
                train_step(model, part, first_row=bounds[ranks[0]], scale=copies / rows)
            if (step + 1) % replicas.every == 0:
                _average(members)
    # `table_state` averages what was not averaged yet, and counts moments in units of one process.
    for members in oracles:
        _average(members)
    unit = (scaled.lr / OPTIMIZER.lr) ** 2
    for members in oracles:
        for table in members[0].tables.values():
            table.momentum /= unit
    _assert_close_to_oracle(tables, [members[0] for members in oracles], quirks)


def _average(members: Sequence[ReferenceTables]) -> None:
    for name in members[0].tables:
        for key in ("weight", "momentum"):
            mean = torch.stack([getattr(model.tables[name], key) for model in members]).mean(0)
            for model in members:
                getattr(model.tables[name], key).copy_(mean)


CHECKS: tuple[Callable[[Factory, Quirks], None], ...] = (
    check_start_values,
    check_lookups,
    check_training,
    check_no_ids,
    check_bad_input,
    check_state,
    check_learning_rate,
    check_prepared,
    check_told,
)
CONFIGURED_CHECKS: tuple[Callable[[ConfiguredFactory, Quirks], None], ...] = (check_policies, check_managed)
_DTYPES = (torch.float64, torch.float32)


def shardable(kind: str) -> dict[str, str]:
    """Those tables of SPECS that can be cut so, as `sharding`: a host's kinds are for pooled ones, dim 4 is not cut."""
    return {
        spec.name: kind
        for spec in SPECS
        if not (kind in ON_A_HOST and spec.pooling == "none")
        and not (kind.partition(":")[0] in CUT_BY_COLUMNS and spec.dim < 8)
    }


def parts_of(sharding: Mapping[str, str]) -> dict[str, int]:
    """`Quirks.column_parts` of a sharding."""
    return {name: parse_sharding(kind)[1] for name, kind in sharding.items()}


def _oracle(
    quirks: Quirks,
    dtype: torch.dtype,
    optimizer: RowWiseAdagrad,
    managed: Mapping[str, ManagedIds] | None = None,
) -> ReferenceTables:
    parts = quirks.column_parts
    return ReferenceTables(
        SPECS, optimizer=optimizer, seed=SEED, dtype=dtype, alone=True, column_parts=parts, managed=managed
    )


def _oracles(quirks: Quirks) -> list[ReferenceTables]:
    return [_oracle(quirks, dtype, OPTIMIZER) for dtype in _DTYPES]


def _assert_close_to_oracle(tables: Tables, oracles: Sequence[ReferenceTables], quirks: Quirks) -> None:
    state, exact, plain = tables.table_state(), oracles[0].table_state(), oracles[1].table_state()
    for name in exact:
        for key in ("weight", "momentum"):
            error = (state[name][key].double() - exact[name][key]).abs().max()
            rounding = (plain[name][key].double() - exact[name][key]).abs().max()
            floor = 2 * torch.finfo(torch.float32).eps * exact[name][key].abs().max()
            allowed = quirks.error_factor * rounding + floor
            assert error <= allowed, f"{name} {key}: error {error:.3g} against float64, allowed {allowed:.3g}"


def _assert_same_state(first: dict[str, Any], second: dict[str, Any], what: str) -> None:
    for name in first:
        for key in ("weight", "momentum"):
            _assert_equal(second[name][key], first[name][key], f"{what}: {name} {key}")


def _assert_same_ids(first: dict[str, dict[str, Tensor]], second: dict[str, dict[str, Tensor]], what: str) -> None:
    assert {n: sorted(parts) for n, parts in first.items()} == {n: sorted(parts) for n, parts in second.items()}, what
    for name, parts in first.items():
        for key, part in parts.items():
            _assert_equal(part, second[name][key], f"{what}: {name} {key}")


def _assert_equal(came: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(came.detach(), expected), f"{what}: {came} differs from {expected}"


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("no ValueError was raised")
