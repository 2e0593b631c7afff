"""What every Loader must do with each field of LoaderConfig, and the types of what it yields (part of
conformance.conformance_cases).

A loader that drops a setting trains something else than was asked for and says nothing, so every field has a case that
tells the loader that obeys from one that resets the field to its default, and SETTINGS has to name every field (a test
compares). A field that an implementation leaves out stands in Quirks.skipped_settings with the reason, and is then to
be refused with a ValueError where it would change what comes out.

A setting is proved by what the interface says of it, never by comparing with the order of the shipped loader: another
implementation may shuffle otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor

from gem_data.conformance import (
    Case,
    LoaderFactory,
    Quirks,
    assert_same,
    raises,
    samples_of,
    write_tiny,
)
from gem_data.conformance_requests import write_requests
from gem_data.damage import FILE, rewrite, set_value
from gem_data.interface import Batch, CostModel, CostTerm, DataError, LoaderConfig, Schema

_BASE = LoaderConfig(global_batch_size=16, seed=7, window_groups=3, logical_shards=4)
_FILE_ORDER = LoaderConfig(global_batch_size=16, shuffle=False)

Check = Callable[[LoaderFactory, Path, Quirks], None]


def settings_cases(quirks: Quirks) -> list[Case]:
    """One case a field of LoaderConfig, one for each field left out that must be refused, and those of types."""
    unknown = sorted(set(quirks.skipped_settings) - set(SETTINGS))
    if unknown:
        raise ValueError(f"Quirks.skipped_settings: expected fields of LoaderConfig, came {unknown}")
    shuffle = None if quirks.shuffles else "quirk: does not shuffle"
    requests = None if quirks.requests else "quirk: does not read requests"
    cases = [
        Case(name="types of a batch", run=functools.partial(_types, write_tiny)),
        Case(name="types of a batch of requests", run=functools.partial(_types, write_requests), skipped=requests),
    ]
    for field, check in SETTINGS.items():
        reason = quirks.skipped_settings.get(field)
        skip = shuffle if field in _SHUFFLED else None
        skip = f"quirk: no {field}: {reason}" if reason is not None else skip
        cases.append(Case(name=f"setting: {field}", run=functools.partial(_run, check, quirks), skipped=skip))
        if reason is not None and field in _REFUSED:
            cases.append(Case(name=f"setting: {field} is refused", run=functools.partial(_refuses, field)))
    return cases


def _run(check: Check, quirks: Quirks, factory: LoaderFactory, directory: Path) -> None:
    check(factory, directory, quirks)


def _refuses(field: str, factory: LoaderFactory, directory: Path) -> None:
    write_tiny(directory)
    config = dataclasses.replace(_BASE, **_REFUSED[field])
    raises(ValueError, lambda: factory(directory, split="train", config=config))


# ------------------------------------------------------------------------------------------------------- types


def assert_types(batch: Batch, schema: Schema) -> None:
    """Every tensor of a batch has the dtype and shape that interface.Batch states."""
    count = len(batch.sample_ids)
    wanted: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]] = {
        "sample_ids": (batch.sample_ids, torch.int64, (count,)),
        "user_ids": (batch.user_ids, torch.int64, (count,)),
        "timestamps": (batch.timestamps, torch.int64, (count,)),
        "labels": (batch.labels, torch.float32, (count, len(schema.labels))),
        "weights": (batch.weights, torch.float32, (count, len(schema.labels))),
        "dense": (batch.dense, torch.float32, (count, len(schema.dense))),
        "row_index": (batch.row_index, torch.int64, (count, 3)),
    }
    for name, stream in batch.streams.items():
        events = int(stream.offsets[-1])
        wanted[f"streams.{name}.offsets"] = (stream.offsets, torch.int64, (batch.rows + 1,))
        wanted[f"streams.{name}.actions"] = (stream.actions, torch.int64, (events,))
        wanted[f"streams.{name}.times"] = (stream.times, torch.int64, (events,))
    keys = [key for key, _ in schema.id_features()]
    lengths = batch.ids.lengths()
    wanted["ids.lengths"] = (lengths, torch.int64, (len(keys) * count,))
    wanted["ids.values"] = (batch.ids.values(), torch.int64, (int(lengths.sum()),))
    if schema.impression:
        assert batch.requests is not None, "requests: expected offsets, came None"
        wanted["requests"] = (batch.requests, torch.int64, (batch.rows + 1,))
    else:
        assert batch.requests is None, "requests: expected None where a row is one impression"
    for name, (tensor, dtype, shape) in wanted.items():
        came = (tensor.dtype, tuple(tensor.shape))
        assert came == (dtype, shape), f"{name}: expected {dtype} of shape {shape}, came {came[0]} of {came[1]}"
    assert batch.ids.weights_or_none() is None, "ids: expected no weights"
    assert list(batch.ids.keys()) == keys, f"ids.keys: expected {keys}, came {list(batch.ids.keys())}"
    assert list(batch.streams) == [stream.name for stream in schema.streams]
    assert type(batch.global_rows) is int, f"global_rows: expected an int, came {batch.global_rows!r}"
    assert type(batch.step) is int, f"step: expected an int, came {batch.step!r}"


def _types(write: Callable[[Path], Schema], factory: LoaderFactory, directory: Path) -> None:
    schema = write(directory)
    for batch in factory(directory, split="train", config=_FILE_ORDER).epoch():
        assert_types(batch, schema)


# ---------------------------------------------------------------------------------------- settings, one by one


def _read(factory: LoaderFactory, directory: Path, config: LoaderConfig, **changes: Any) -> list[Batch]:
    loader = factory(directory, split="train", config=dataclasses.replace(config, **changes))
    return list(loader.epoch())


def _refused(factory: LoaderFactory, directory: Path, config: LoaderConfig, **changes: Any) -> None:
    wrong = dataclasses.replace(config, **changes)
    raises(ValueError, lambda: factory(directory, split="train", config=wrong))


def _groups(batches: Sequence[Batch]) -> list[tuple[int, ...]]:
    """(file, row group) of every row in the order in which it came."""
    return [tuple(place[:2]) for batch in batches for place in batch.row_index.tolist()]


def _global_batch_size(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    write_tiny(directory)
    for size, wanted in ((7, [7] * 14 + [2]), (64, [64, 36]), (200, [100])):
        batches = _read(factory, directory, _FILE_ORDER, global_batch_size=size)
        assert [len(batch.sample_ids) for batch in batches] == wanted
        assert [batch.global_rows for batch in batches] == wanted
    _refused(factory, directory, _FILE_ORDER, global_batch_size=0)


def _seed(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    write_tiny(directory)
    orders = [samples_of(_read(factory, directory, _BASE, seed=seed)) for seed in (0, 1, 2, 1)]
    assert orders[1] == orders[3], "the same seed, and another order"
    assert len({tuple(order) for order in orders}) == 3, "seeds 0, 1 and 2 must shuffle differently"


def _shuffle(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    write_tiny(directory)
    plain = samples_of(_read(factory, directory, _BASE, shuffle=False, logical_shards=1))
    assert plain == list(range(100)), "file order with shuffle=False"
    mixed = samples_of(_read(factory, directory, _BASE, shuffle=True, logical_shards=1))
    assert mixed != plain, "file order with shuffle=True"
    assert sorted(mixed) == plain


def _window_groups(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    """Rows of at most so many row groups are mixed: with one, a group's rows come without a break."""
    write_tiny(directory)
    for width in (1, 2, 100):
        places = _groups(_read(factory, directory, _BASE, window_groups=width, logical_shards=1))
        changes = sum(one != other for one, other in itertools.pairwise(places))
        distinct = len(set(places))
        assert (changes == distinct - 1) == (width == 1), f"window_groups={width}: {changes} changes of row group"
        begun = [places.index(group) for group in set(places)]
        ended = [len(places) - places[::-1].index(group) for group in set(places)]
        at_once = max(sum(b <= row < e for b, e in zip(begun, ended, strict=True)) for row in range(len(places)))
        assert at_once <= width, f"window_groups={width}: rows of {at_once} row groups are mixed"
    _refused(factory, directory, _BASE, window_groups=0)


def _logical_shards(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    """A batch is dealt from so many sequences of row groups; until the tail no two of them share a row group."""
    write_tiny(directory)
    for shards in (1, 2, 4):
        share, seen = 16 // shards, [set[tuple[int, ...]]() for _ in range(shards)]
        for batch in _read(factory, directory, _FILE_ORDER, logical_shards=shards)[:4]:
            groups = _groups([batch])
            for shard in range(shards):
                seen[shard].update(groups[shard * share : (shard + 1) * share])
        assert sum(map(len, seen)) == len(set().union(*seen)), f"logical_shards={shards}: they share row groups"
    for shards, distinct in ((1, 2), (4, 4), (8, 8)):  # 16 rows of groups of 9: two groups, or one of each shard
        first = _read(factory, directory, _FILE_ORDER, logical_shards=shards)[0]
        assert len(set(_groups([first]))) == distinct, f"logical_shards={shards}"
    _refused(factory, directory, _FILE_ORDER, logical_shards=0)


def _max_length(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    schema = write_tiny(directory)
    whole = _events(_read(factory, directory, _FILE_ORDER))
    for limit in (0, 1, 3, 100):
        cut = _events(_read(factory, directory, _FILE_ORDER, max_length=limit))
        for (sample, stream), events in whole.items():
            keep = min(limit, next(info.max_length for info in schema.streams if info.name == stream))
            wanted = events[max(len(events) - keep, 0) :]
            assert cut[sample, stream] == wanted, f"max_length={limit}: {stream} of sample {sample}"
    _refused(factory, directory, _FILE_ORDER, max_length=-1)


def _drop_last(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    write_tiny(directory)
    for drop, sizes in ((False, [16] * 6 + [4]), (True, [16] * 6)):
        batches = _read(factory, directory, _FILE_ORDER, drop_last=drop)
        assert [batch.global_rows for batch in batches] == sizes, f"drop_last={drop}"


def _prefetch(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    write_tiny(directory)
    wanted = _read(factory, directory, _FILE_ORDER, prefetch=0)
    for count in (1, 5):
        assert_same(_read(factory, directory, _FILE_ORDER, prefetch=count), wanted, f"prefetch={count}")
    _refused(factory, directory, _FILE_ORDER, prefetch=-1)
    _refused(factory, directory, _FILE_ORDER, prefetch=0, readers=2)


def _readers(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    write_tiny(directory)
    wanted = _read(factory, directory, _FILE_ORDER, readers=1)
    for count in (0, 3):
        assert_same(_read(factory, directory, _FILE_ORDER, readers=count), wanted, f"readers={count}")
    _refused(factory, directory, _FILE_ORDER, readers=-1)
    _refused(factory, directory, _FILE_ORDER, prefetch=0, readers=2)


# One window holds all of a shard. Shares of 12 rows, each of six base batches of two.
_EVENED = LoaderConfig(global_batch_size=48, seed=7, window_groups=100, logical_shards=4, base_batch=2)
_ROWS = 240
_BUYS = CostModel(unit="events", terms=(CostTerm(stream="buys"),))


def _spread(batches: Sequence[Batch], load: Callable[[dict[str, int]], float]) -> float:
    """Standard deviation, over all shares of all batches, of their load; load: of one row, from its events."""
    loads = []
    for batch in batches:
        lengths = {name: stream.offsets.diff().tolist() for name, stream in batch.streams.items()}
        rows = [load({name: lengths[name][row] for name in lengths}) for row in range(batch.rows)]
        loads += [sum(rows[start : start + 12]) for start in range(0, len(rows), 12)]
    return statistics.pstdev(loads)


def _all_events(lengths: dict[str, int]) -> float:
    return sum(lengths.values())


def _buys(lengths: dict[str, int]) -> float:
    return lengths["buys"]


def _base_batch(factory: LoaderFactory, directory: Path, quirks: Quirks) -> None:
    """Shares weigh about the same, every row still comes once, and the world size changes nothing."""
    write_tiny(directory, train_rows=_ROWS)
    plain = _read(factory, directory, _EVENED, base_batch=None)
    evened = _read(factory, directory, _EVENED)
    assert sorted(samples_of(evened)) == list(range(_ROWS))
    before, after = _spread(plain, _all_events), _spread(evened, _all_events)
    assert after < before / 2, f"base_batch: shares deviate by {after:.1f} events, without it by {before:.1f}"
    for world in [world for world in quirks.world_sizes if world in (2, 4)][:1]:
        ranks = [
            list(factory(directory, split="train", config=_EVENED, rank=rank, world_size=world).epoch())
            for rank in range(world)
        ]
        joined = [[s for part in parts for s in samples_of([part])] for parts in zip(*ranks, strict=True)]
        assert joined == [samples_of([batch]) for batch in evened], f"base_batch: world size {world}"
    for wrong in (0, 5, 12):  # a share of 12 rows is not two or more whole ones
        _refused(factory, directory, _EVENED, base_batch=wrong)


def _base_pool(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    """Base batches of a pool are moved together: those of one share (6) leave it as it is, all of them even it."""
    write_tiny(directory, train_rows=_ROWS)
    small, large = (_spread(_read(factory, directory, _EVENED, base_pool=pool), _all_events) for pool in (6, 256))
    assert large < small / 2, f"base_pool: shares deviate by {large:.1f} events with 256, by {small:.1f} with 6"
    _refused(factory, directory, _EVENED, base_pool=1)


def _cost(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    """What is evened is the load of the rows by `cost`: here events of buys; without it events of all streams."""
    write_tiny(directory, train_rows=_ROWS)
    by_default, by_cost = (_read(factory, directory, _EVENED, cost=cost) for cost in (None, _BUYS))
    for name, load, own, other in (("buys", _buys, by_cost, by_default), ("events", _all_events, by_default, by_cost)):
        a, b = _spread(own, load), _spread(other, load)
        assert a < b / 1.5, f"cost: shares evened by {name} deviate by {a:.1f} of them, the others by {b:.1f}"


def _open_ids(factory: LoaderFactory, directory: Path, quirks: Quirks) -> None:
    """Ids outside their table come through unchanged where they are named; elsewhere they are bad input."""
    write_tiny(directory)
    for column, came in (("id.item", 10**12), ("ids.genres", [7, -1]), ("stream.views.genre", None)):
        write_tiny(directory)

        def spoil(events: Any, came: Any = came) -> Any:
            return [99] * len(events) if came is None else came

        row = 0
        while not pq.read_table(directory / FILE, columns=["stream.views.time"])[0][row].as_py():
            row += 1  # it needs an event to spoil
        rewrite(directory / FILE, functools.partial(set_value, row=row, column=column, value=spoil))
        key = column.split(".", 1)[1]
        if quirks.checks_values:
            raises(DataError, lambda: _read(factory, directory, _FILE_ORDER))
            other = "item" if key != "item" else "user"
            raises(DataError, lambda other=other: _read(factory, directory, _FILE_ORDER, open_ids=(other,)))  # type: ignore[misc]
        (batch, *_) = _read(factory, directory, _FILE_ORDER, open_ids=(key,))
        found = batch.ids[key].to_dense()[row].tolist()
        wanted = {"id.item": [10**12], "ids.genres": [7, -1]}.get(column, [99] * len(found))
        assert found == wanted, f"open_ids: expected {wanted} of {key}, came {found}"
    _refused(factory, directory, _FILE_ORDER, open_ids=("no such feature",))


_FEW = ("id.user", "stream.views.item", "dense.hour")


def _features(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    """These and no others, with the values that they have among all; what is not read may be spoilt."""
    write_tiny(directory)
    whole = _read(factory, directory, _FILE_ORDER)
    rewrite(directory / FILE, functools.partial(set_value, row=3, column="id.item", value=10**12))
    loader = factory(directory, split="train", config=dataclasses.replace(_FILE_ORDER, features=_FEW))
    assert [key for key, _ in loader.schema.id_features()] == ["user", "views.item"]
    assert (loader.schema.dense, [stream.name for stream in loader.schema.streams]) == (("hour",), ["views"])
    for part, batch in zip(loader.epoch(), whole, strict=True):
        assert_types(part, loader.schema)
        for key in ("user", "views.item"):
            assert torch.equal(part.ids[key].values(), batch.ids[key].values()), f"features: ids of {key}"
        assert torch.equal(part.dense, batch.dense[:, 1:]), "features: dense"
        assert torch.equal(part.streams["views"].times, batch.streams["views"].times), "features: streams.views.times"
        assert torch.equal(part.labels, batch.labels), "features: labels are chosen by `labels`"
    _refused(factory, directory, _FILE_ORDER, features=("id.none",))
    _refused(factory, directory, _FILE_ORDER, features=("stream.views.genre",))  # without its stream's first field


def _labels(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    write_tiny(directory)
    whole = _read(factory, directory, _FILE_ORDER)
    rewrite(directory / FILE, functools.partial(set_value, row=3, column="label.click", value=0.5))
    loader = factory(directory, split="train", config=dataclasses.replace(_FILE_ORDER, labels=("like",)))
    assert [label.name for label in loader.schema.labels] == ["like"]
    for part, batch in zip(loader.epoch(), whole, strict=True):
        assert_types(part, loader.schema)
        assert torch.equal(part.labels, batch.labels[:, 1:]), "labels: another column"
        assert torch.equal(part.weights, batch.weights[:, 1:]), "labels: weights of another column"
        assert torch.equal(part.ids.values(), batch.ids.values()), "labels: ids are chosen by `features`"
    _refused(factory, directory, _FILE_ORDER, labels=("none",))


def _events(batches: Sequence[Batch]) -> dict[tuple[int, str], list[tuple[int, ...]]]:
    """(sample, stream) -> its events, each with action, time and ids."""
    found = {}
    for batch in batches:
        for name, stream in batch.streams.items():
            keys = [key for key in batch.ids.keys() if key.startswith(f"{name}.")]  # noqa: SIM118 - no dict
            columns = [stream.actions, stream.times, *(batch.ids[key].values() for key in keys)]
            events = list(zip(*(column.tolist() for column in columns), strict=True))
            bounds = stream.offsets.tolist()
            for row, sample in enumerate(batch.sample_ids.tolist()):
                found[sample, name] = events[bounds[row] : bounds[row + 1]]
    return found


def _stochastic_length(factory: LoaderFactory, directory: Path, _: Quirks) -> None:
    """Limits 12 and 5, alpha 1.4: long rows are cut to their latest 12^0.7 = 5 and 5^0.7 = 3, but for some."""
    write_tiny(directory)
    whole = _events(_read(factory, directory, _FILE_ORDER))
    config = dataclasses.replace(_FILE_ORDER, stochastic_length=1.4)
    loader = factory(directory, split="train", config=config)
    first, second = _events(list(loader.epoch())), _events(list(loader.epoch()))
    assert first != second, "stochastic_length: expected another draw in the second epoch"
    other = _events(_read(factory, directory, config, global_batch_size=7, logical_shards=2))
    assert other == first, "stochastic_length: the draw depends on seed, epoch and the row's place alone"
    assert _events(_read(factory, directory, config, seed=1)) != first, "stochastic_length: expected a draw by seed"
    for stream, short in (("views", 5), ("buys", 3)):
        long = [key for key, events in whole.items() if key[1] == stream and len(events) > short]
        for key, events in whole.items():
            if key[1] == stream:
                kept = len(first[key])
                assert first[key] == events[len(events) - kept :], f"stochastic_length: not the latest of {key}"
                wanted = {len(events), short} if key in long else {len(events)}
                assert kept in wanted, f"stochastic_length: {kept} of {len(events)} events of {key}"
        assert {len(first[key]) == short for key in long} == {True, False}, "some long rows stay whole, others do not"
    assert _events(_read(factory, directory, config, stochastic_length=2.0)) == whole, "alpha 2 cuts nothing"
    for alpha in (0.5, 2.5):
        _refused(factory, directory, config, stochastic_length=alpha)


SETTINGS: dict[str, Check] = {
    "global_batch_size": _global_batch_size,
    "seed": _seed,
    "shuffle": _shuffle,
    "window_groups": _window_groups,
    "logical_shards": _logical_shards,
    "max_length": _max_length,
    "drop_last": _drop_last,
    "prefetch": _prefetch,
    "readers": _readers,
    "base_batch": _base_batch,
    "base_pool": _base_pool,
    "cost": _cost,
    "open_ids": _open_ids,
    "features": _features,
    "labels": _labels,
    "stochastic_length": _stochastic_length,
}
"""Field of LoaderConfig -> what proves that a loader obeys it."""

_SHUFFLED = ("seed", "shuffle", "window_groups", "base_batch", "base_pool", "cost")
# What changes what comes out, and settings that a loader without the field has to refuse.
_REFUSED: dict[str, dict[str, Any]] = {
    "logical_shards": {"logical_shards": 2},
    "max_length": {"max_length": 1},
    "drop_last": {"drop_last": True},
    "base_batch": {"base_batch": 2},
    "base_pool": {"base_batch": 2, "base_pool": 6},
    "cost": {"base_batch": 2, "cost": _BUYS},
    "open_ids": {"open_ids": ("item",)},
    "features": {"features": ("id.user",)},
    "labels": {"labels": ("like",)},
    "stochastic_length": {"stochastic_length": 1.4},
}
