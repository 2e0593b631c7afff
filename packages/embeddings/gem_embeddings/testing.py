"""The conformance suite: what any implementation of `Tables` must do, as functions that take a factory.

An implementation kept elsewhere proves itself with

    def factory(specs, optimizer, seed): return MyTables(...)
    run_conformance(factory, Quirks())                      # one process
    check_ranks(factory, Quirks(), rank, world_size)        # on every rank of an initialised process group
    check_averages(factory, Quirks(), ...)                  # where copies are averaged
    check_copies(tables, replicas)                          # where there are copies, after any step, on all ranks
    check_policies(configured, Quirks())                    # where ids outside their table have policies
    check_managed(configured, Quirks())                     # where ids earn their rows
    check_exchange(exchange)                                # an `Exchange`, on all its ranks

`configured` is a `ConfiguredFactory`: it takes policies and managed tables too. Every check raises AssertionError with
what differs. Training is compared with `ReferenceTables` in float64; allowed is three times the error of the same
reference in float32 plus two roundings of the largest value, so no tolerance is picked by hand.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.averaged import scaled_optimizer
from gem_embeddings.initial import initial_rows
from gem_embeddings.interface import Exchange, Replicas, RowWiseAdagrad, Tables, TableSpec
from gem_embeddings.layout import CUT_BY_COLUMNS, ON_A_HOST, parse_sharding
from gem_embeddings.reference import ReferenceTables
from gem_embeddings.testing_compare import (
    DTYPES,
    State,
    assert_close_to_oracle,
    assert_equal,
    assert_rounded,
    assert_same_state,
    error_of,
    held,
    look_up,
    make_oracle,
    make_oracles,
    overwrite,
)
from gem_embeddings.testing_compare import ConfiguredFactory as ConfiguredFactory
from gem_embeddings.testing_compare import Factory as Factory
from gem_embeddings.testing_compare import Quirks as Quirks
from gem_embeddings.testing_configured import check_managed as check_managed
from gem_embeddings.testing_configured import check_policies as check_policies
from gem_embeddings.testing_exchange import GroupExchange as GroupExchange
from gem_embeddings.testing_exchange import check_exchange as check_exchange
from gem_embeddings.testing_inputs import KEYS, OPTIMIZER, SEED, SHARED_SPECS, SPECS, make_ids, outputs_of, part_of
from gem_embeddings.testing_inputs import train_step as train_step


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
        for key, part in state[spec.name].items():
            assert (part.dtype, part.device.type) == (torch.float32, "cpu"), f"{spec.name} {key}: {part.dtype} {part}"
        assert not state[spec.name]["momentum"].any(), f"momentum of {spec.name}"


def check_lookups(factory: Factory, quirks: Quirks) -> None:
    """Vectors are the rows of the table, in row order, whatever the order of the keys; empty bags give 0.

    A lookup changes neither batch nor tables, and no later lookup or step changes its vectors.
    """
    tables = factory(SPECS, OPTIMIZER, SEED)
    state, earlier = held(tables.table_state()), []
    for keys in (KEYS, tuple(reversed(KEYS))):
        ids = make_ids(9, seed=1, keys=keys)
        with torch.no_grad():
            look_up(tables, ids, quirks)
        out = look_up(tables, ids, quirks)
        _assert_vectors(out, ids, state, SPECS)
        earlier.append((out, {name: vectors.detach().clone() for name, vectors in out.items()}))
        assert_same_state(state, tables.table_state(), "a lookup")
    train_step(tables, make_ids(9, seed=1).to(torch.device(quirks.device)))
    look_up(tables, make_ids(9, seed=2), quirks)
    for out, before in earlier:
        for name, vectors in out.items():
            assert_equal(vectors, before[name], f"vectors of {name}, after a step and another lookup")


def check_shared(factory: Factory, quirks: Quirks) -> None:
    """Weighted bags, and features that look up two tables: vectors, and training as in the reference."""
    tables, oracles = factory(SHARED_SPECS, OPTIMIZER, SEED), make_oracles(quirks, specs=SHARED_SPECS)
    state, ids = held(tables.table_state()), make_ids(9, seed=1, weighted=True)
    _assert_vectors(look_up(tables, ids, quirks), ids, state, SHARED_SPECS)
    for step in range(6):
        batch = make_ids(8 if step != 3 else 0, seed=step, weighted=True)
        for model in (tables, *oracles):
            train_step(model, batch.to(torch.device(quirks.device if model is tables else "cpu")))
    assert_close_to_oracle(tables, oracles, quirks)


def _assert_vectors(
    out: Mapping[str, Tensor], ids: KeyedJaggedTensor, state: State, specs: Sequence[TableSpec]
) -> None:
    """Vectors by their definition, from the rows of a state."""
    outputs = outputs_of(specs)
    assert sorted(out) == sorted(outputs), f"outputs {sorted(out)}, expected {sorted(outputs)}"
    for name, (spec, feature) in outputs.items():
        rows = state[spec.name]["weight"][ids[feature].values()]
        if spec.pooling == "none":
            assert_equal(out[name].cpu(), rows, name)
            continue
        if spec.weighted:
            rows = rows * ids[feature].weights()[:, None]
        for row, own in enumerate(rows.split(ids[feature].lengths().tolist())):
            pooled = own.sum(0) / (max(len(own), 1) if spec.pooling == "mean" else 1)
            assert_rounded(out[name][row].detach().cpu(), pooled, f"{name}, row {row}")


def check_training(factory: Factory, quirks: Quirks) -> None:
    """Twenty steps with repeated ids equal the float64 reference to float32 rounding; zero-row steps change nothing."""
    tables = factory(SPECS, OPTIMIZER, SEED)
    oracles = make_oracles(quirks)
    for step in range(20):
        for model in (tables, *oracles):
            device = quirks.device if model is tables else "cpu"
            train_step(model, make_ids(8, seed=step).to(torch.device(device)))
        if step == 10:
            before = held(tables.table_state())
            train_step(tables, make_ids(0, seed=0).to(torch.device(quirks.device)))
            assert_same_state(before, tables.table_state(), "a step on zero rows")
    assert_close_to_oracle(tables, oracles, quirks)


def check_no_ids(factory: Factory, quirks: Quirks) -> None:
    """Zero rows, and rows without list ids, give empty or zero vectors of the right dim."""
    tables = factory(SPECS, OPTIMIZER, SEED)
    out = tables(make_ids(0, seed=0).to(torch.device(quirks.device)))
    assert {feature: tuple(vectors.shape) for feature, vectors in out.items()} == {
        feature: (0, spec.dim) for spec in SPECS for feature in spec.features
    }
    out = tables(make_ids(3, seed=0, empty=True).to(torch.device(quirks.device)))
    assert out["s.item"].shape == (0, 8)
    assert_equal(out["tags"].cpu(), torch.zeros(3, 8), "tags of rows without ids")
    assert_equal(out["words"].cpu(), torch.zeros(3, 4), "words of rows without ids")


def check_bad_input(factory: Factory, quirks: Quirks) -> None:
    """Ids outside the table and missing features are ValueErrors that name them; no parameter changes."""
    tables = factory(SPECS, OPTIMIZER, SEED)
    before = held(tables.table_state())
    for bad in (23, -1):
        ids = make_ids(4, seed=2)
        start = int(ids.offset_per_key()[KEYS.index("s.item")])
        ids.values()[start + 1] = bad
        row = int((ids["s.item"].offsets() <= 1).sum()) - 1
        message = error_of(lambda ids=ids: tables(ids.to(torch.device(quirks.device))))
        for part in ("'s.item'", "'item'", f"row {row}", f"id {bad} ", "0 <= id < 23"):
            assert part in message, f"{part!r} not in {message!r}"
    message = error_of(lambda: tables(make_ids(2, seed=0, keys=KEYS[:-1]).to(torch.device(quirks.device))))
    assert "s.item" in message, message
    assert_same_state(before, tables.table_state(), "bad input")


def check_state(factory: Factory, quirks: Quirks) -> None:
    """State moves a model from one object to another bit for bit; a state that does not fit changes nothing.

    A state is a copy both ways: training changes none that was saved or loaded, and writing into one changes no table.
    """
    source, target = factory(SPECS, OPTIMIZER, SEED), factory(SPECS, OPTIMIZER, SEED + 1)
    for step in range(3):
        train_step(source, make_ids(5, seed=step).to(torch.device(quirks.device)))
    before = held(target.table_state())
    broken = held(source.table_state())
    del broken["shop"]
    broken["other"] = broken["tag"]
    broken["word"] = {"weight": torch.zeros(2, 4), "momentum": broken["word"]["momentum"]}
    message = error_of(lambda: target.load_table_state(broken))
    for part in ("'shop' is missing", "'other'", "'word'", "(13, 4)", "(2, 4)"):
        assert part in message, f"{part!r} not in {message!r}"
    assert_same_state(before, target.table_state(), "a state that does not fit")
    saved = source.table_state()
    loaded, kept = held(saved), held(saved)
    target.load_table_state(loaded)
    assert_same_state(kept, target.table_state(), "loading a state")
    for tables in (source, target):
        train_step(tables, make_ids(5, seed=9).to(torch.device(quirks.device)))
    assert_same_state(kept, saved, "training changed a state that was saved")
    assert_same_state(kept, loaded, "training changed a state that was loaded")
    after = held(source.table_state())
    assert_same_state(after, target.table_state(), "loading a state and one step")
    for state in (saved, loaded, source.table_state()):
        overwrite(state)
    assert_same_state(after, source.table_state(), "writing into a state that was saved")
    assert_same_state(after, target.table_state(), "writing into a state that was loaded")


def check_learning_rate(factory: Factory, quirks: Quirks) -> None:
    """set_learning_rate counts from the next forward on: 0 stops the weights, momentum goes on."""
    tables = factory(SPECS, OPTIMIZER, SEED)
    before = held(tables.table_state())
    tables.set_learning_rate(0.0)
    train_step(tables, make_ids(5, seed=1).to(torch.device(quirks.device)))
    frozen = held(tables.table_state())
    for name in before:
        assert_equal(frozen[name]["weight"], before[name]["weight"], f"{name} at learning rate 0")
        assert frozen[name]["momentum"].any(), name
    tables.set_learning_rate(0.2)
    other = factory(SPECS, RowWiseAdagrad(lr=0.2, eps=OPTIMIZER.eps), SEED)
    other.load_table_state(frozen)
    for model in (tables, other):
        train_step(model, make_ids(5, seed=2).to(torch.device(quirks.device)))
    assert_same_state(tables.table_state(), other.table_state(), "learning rate 0.2")


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
    assert_same_state(plain.table_state(), ahead.table_state(), "prepared ids")
    once = ahead.prepare(batches[0])
    assert not once.used, "prepared ids count as used before they were looked up"
    with torch.no_grad():
        ahead.look_up(once)
    assert once.used, "ids that were looked up do not count as used"
    assert "once" in error_of(lambda: ahead.look_up(once))


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
    _assert_copied(tables, quirks)
    train_step(tables, make_ids(5, seed=2).to(torch.device(quirks.device)))
    assert list(tables.copied_parts()) == names, f"copied_parts {list(tables.copied_parts())}, a step before {names}"
    _assert_copied(tables, quirks)
    assert tables.policy_counts() == {}, f"no feature has a policy, got {tables.policy_counts()}"
    assert tables.id_shapes() == tables.id_state() == {}, f"no table is managed, got {tables.id_shapes()}"
    before = held(tables.table_state())
    tables.load_id_state({})
    assert "item" in error_of(lambda: tables.load_id_state({"item": {"ids": torch.zeros(23, dtype=torch.int64)}}))
    assert_same_state(before, tables.table_state(), "id states of tables that are not managed")


def _assert_copied(tables: Tables, quirks: Quirks) -> None:
    """The numbers of `copied_parts` are those of the tables that are held in copy, in whatever pieces."""
    state, parts = tables.table_state(), tables.copied_parts()
    expected = [part.flatten() for name in quirks.copied for part in state[name].values()]
    found = [part.detach().cpu().flatten() for part in parts.values()]
    sizes = [sum(part.numel() for part in some) for some in (found, expected)]
    assert sizes[0] == sizes[1], (
        f"copied_parts shows {sizes[0]} numbers ({list(parts)}), tables {quirks.copied} have {sizes[1]}; "
        "Quirks.copied names the tables that all ranks hold whole"
    )
    if found:
        assert_equal(torch.cat(found).sort().values, torch.cat(expected).sort().values, f"copied_parts {list(parts)}")


def check_ranks(factory: Factory, quirks: Quirks, rank: int, world_size: int) -> None:
    """Every rank trains its unequal part of a global batch (rank 0's may be empty); the result is one process's.

    Then again, shorter, with weighted bags and features that look up two tables.
    """
    tables = _train_on_ranks(factory, quirks, rank, world_size, specs=SPECS, steps=20)
    saved = held(tables.table_state())
    again = factory(SPECS, OPTIMIZER, SEED + 1)
    again.load_table_state(saved)
    assert_same_state(saved, again.table_state(), "loading on several ranks")
    _train_on_ranks(factory, quirks, rank, world_size, specs=SHARED_SPECS, steps=4)


def _train_on_ranks(
    factory: Factory, quirks: Quirks, rank: int, world_size: int, *, specs: Sequence[TableSpec], steps: int
) -> Tables:
    tables = factory(specs, OPTIMIZER, SEED)
    oracles = make_oracles(quirks, specs=specs)
    rows, prepared = 9, None

    def whole(step: int) -> KeyedJaggedTensor:
        return make_ids(rows, seed=step, weighted=specs is SHARED_SPECS)

    def part(step: int) -> tuple[KeyedJaggedTensor, int]:
        start = 0 if step == steps // 4 else 2
        bounds = [0, start, *[rows] * world_size] if world_size > 1 else [0, rows]
        own = part_of(whole(step), bounds[rank], bounds[rank + 1])
        return own.to(torch.device(quirks.device)), bounds[rank]

    for step in range(steps):
        own, first_row = part(step)
        # every third batch is looked up without having been prepared
        ahead = part(step + 1)[0] if step % 3 else None
        scale = world_size / rows
        prepared = train_step(tables, own, first_row=first_row, scale=scale, prepared=prepared, ahead=ahead)
        for oracle in oracles:
            train_step(oracle, whole(step), scale=1 / rows)
    assert_close_to_oracle(tables, oracles, quirks)
    return tables


def check_copies(tables: Tables, replicas: Replicas, *, device: str = "cpu", world: Exchange | None = None) -> None:
    """On all ranks: what `copied_parts` shows is the same on all copies: names, shapes, dtypes and bits.

    Some rank shows something, but where slices are held; one whose copies hold no table shows nothing. With sync
    "average": right after an average. What one rank finds, all raise, so that none goes on alone.
    world: an Exchange over all ranks; by default the default process group, and without one that of the copies.
    """
    if world is None:
        world = GroupExchange(dist.group.WORLD) if dist.is_initialized() else replicas.exchange
    parts = tables.copied_parts()
    shown = world.all_gather(torch.tensor([len(parts)], device=device))
    assert bool(shown.any()) or replicas.fully_sharded, (
        f"copied_parts is empty on all {world.size} ranks, expected the tables that each copy holds"
    )
    wrong = _differing(parts, replicas.exchange, device)
    found = world.all_gather(torch.tensor([wrong is not None], dtype=torch.int64, device=device))
    assert wrong is None, f"copied_parts{wrong}"
    ranks = found.nonzero().flatten().tolist()
    assert not ranks, f"copied_parts is the same on the copies of this rank, not on those of other ranks: {ranks} say"


def _differing(parts: Mapping[str, Tensor], exchange: Exchange, device: str) -> str | None:
    """What differs between the copies of one part; the same collectives on all of them."""
    told = [f"{name} {tuple(part.shape)} {part.dtype}" for name, part in parts.items()]
    every = _gathered(torch.tensor([zlib.crc32("\n".join(told).encode()), len(told)], device=device), exchange)
    if not bool((every == every[0]).all()):
        return f" has other names, shapes or dtypes on other copies than {told}"
    for name, part in parts.items():
        own = _bits(part)
        if not bool((_gathered(own, exchange) == own).all()):
            return f": {name} differs between copies"
    return None


def _gathered(own: Tensor, exchange: Exchange) -> Tensor:
    return exchange.all_gather(own).view(exchange.size, len(own))


def _bits(part: Tensor) -> Tensor:
    """The bytes of a tensor as int64, which any Exchange gathers; zeros up to a multiple of 8."""
    bytes_B = part.detach().contiguous().flatten().view(torch.uint8)
    padded_B = bytes_B.new_zeros(-(-len(bytes_B) // 8) * 8)
    padded_B[: len(bytes_B)] = bytes_B
    return padded_B.view(torch.int64)


def check_averages(
    factory: Factory,
    quirks: Quirks,
    replicas: Replicas,
    *,
    copy_ranks: Sequence[Sequence[int]],
    rank: int,
    world: Exchange | None = None,
) -> None:
    """Averaged copies equal their definition: one `ReferenceTables` a copy on that copy's rows, then the mean.

    copy_ranks: the ranks of each copy, consecutive ones. Rows are dealt in rank order; the first rank has none once.
    world: as for `check_copies`, over the ranks of copy_ranks.
    """
    copies, world_size = len(copy_ranks), sum(map(len, copy_ranks))
    tables = factory(SPECS, OPTIMIZER, SEED)
    scaled = scaled_optimizer(OPTIMIZER, replicas)
    oracles = [[make_oracle(quirks, dtype, scaled) for _ in range(copies)] for dtype in DTYPES]
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
        if (step + 1) % replicas.every == 0:
            check_copies(tables, replicas, device=quirks.device, world=world)
    # `table_state` averages what was not averaged yet, and counts moments in units of one process.
    for members in oracles:
        _average(members)
    unit = (scaled.lr / OPTIMIZER.lr) ** 2
    for members in oracles:
        for table in members[0].tables.values():
            table.momentum /= unit
    assert_close_to_oracle(tables, [members[0] for members in oracles], quirks)


def _average(members: Sequence[ReferenceTables]) -> None:
    for name in members[0].tables:
        for key in ("weight", "momentum"):
            mean = torch.stack([getattr(model.tables[name], key) for model in members]).mean(0)
            for model in members:
                getattr(model.tables[name], key).copy_(mean)


CHECKS: tuple[Callable[[Factory, Quirks], None], ...] = (
    check_start_values,
    check_lookups,
    check_shared,
    check_training,
    check_no_ids,
    check_bad_input,
    check_state,
    check_learning_rate,
    check_prepared,
    check_told,
)
CONFIGURED_CHECKS: tuple[Callable[[ConfiguredFactory, Quirks], None], ...] = (check_policies, check_managed)


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
