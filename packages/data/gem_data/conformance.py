"""What every Loader must do, as a list of cases to run with any implementation (public through gem_data.testing).

Each case gets a factory and an empty directory, writes the tiny data set it needs and asserts; it needs no test
framework. `Quirks` is data: what an implementation leaves out shows as skipped, not as passed. Batches are compared
bit for bit: reading has no rounding. conformance_settings.py has the cases of LoaderConfig, conformance_requests.py
those of requests.
"""

from __future__ import annotations

import functools
import json
import tempfile
import unittest
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq
import torch

from gem_data.damage import DAMAGES, Damage
from gem_data.interface import Batch, DataError, Loader, LoaderConfig, Schema
from gem_data.tiny import write_tiny as write_tiny_anew


class LoaderFactory(Protocol):
    """Builds the Loader under test."""

    def __call__(
        self, directory: Path, *, split: str, config: LoaderConfig, rank: int = 0, world_size: int = 1
    ) -> Loader:
        """The loader of one rank."""
        ...


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """What an implementation does not do.

    world_sizes           world sizes it serves
    resumes               state_dict and load_state_dict work
    resumes_any_world     a state of one world size loads at another
    checks_values         ids, labels, times and so on are checked in reading
    shuffles              shuffle=True works
    skipped_damages       kinds of gem_data.testing.DAMAGES that it does not notice
    requests              it reads data whose rows are requests
    skipped_settings      field of LoaderConfig -> why it is left out. A loader refuses, with a ValueError, what it
                          leaves out and what would change the batches: {"base_batch": "rows come in file order"}
    """

    world_sizes: tuple[int, ...] = (1, 2, 3, 4, 8)
    resumes: bool = True
    resumes_any_world: bool = True
    checks_values: bool = True
    shuffles: bool = True
    skipped_damages: tuple[str, ...] = ()
    requests: bool = True
    skipped_settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to prove: `run(factory, empty_directory)` raises AssertionError where it fails.

    skipped  why the quirks leave it out: `run` then raises unittest.SkipTest, which pytest too shows as skipped. None =
             it runs
    """

    name: str
    run: Callable[[LoaderFactory, Path], None]
    skipped: str | None = None


def batch_difference(left: Batch, right: Batch) -> str | None:
    """The first field in which two batches differ, in value, shape or dtype; None when they are equal bit for bit."""
    fields = ("sample_ids", "user_ids", "timestamps", "labels", "weights", "dense", "row_index")
    pairs: list[tuple[str, Any, Any]] = [(name, getattr(left, name), getattr(right, name)) for name in fields]
    pairs += [(name, getattr(left, name), getattr(right, name)) for name in ("global_rows", "step")]
    pairs += [(f"ids.{name}", getattr(left.ids, name)(), getattr(right.ids, name)()) for name in _KJT_PARTS]
    pairs.append(("streams", list(left.streams), list(right.streams)))
    pairs.append(("requests", *(None if b.requests is None else b.requests.tolist() for b in (left, right))))
    for name in left.streams if list(left.streams) == list(right.streams) else ():
        for part in ("offsets", "actions", "times"):
            pair = (getattr(left.streams[name], part), getattr(right.streams[name], part))
            pairs.append((f"streams.{name}.{part}", *pair))
    for name, one, other in pairs:
        if isinstance(one, torch.Tensor):
            if one.dtype != other.dtype or not torch.equal(one, other):
                return f"{name}: {one} != {other}"
        elif one != other:
            return f"{name}: {one} != {other}"
    return None


def conformance_cases(quirks: Quirks) -> list[Case]:
    """All cases, those that the quirks leave out marked as skipped."""
    from gem_data.conformance_requests import request_cases
    from gem_data.conformance_settings import settings_cases

    shuffle = None if quirks.shuffles else "quirk: does not shuffle"
    resume = None if quirks.resumes else "quirk: does not resume"
    elastic = resume or (None if quirks.resumes_any_world else "quirk: resumes at the same world size only")
    several = None if len(quirks.world_sizes) > 1 else "quirk: one process only"
    values = None if quirks.checks_values else "quirk: does not check values"

    def bound(check: Callable[[LoaderFactory, Path, Quirks], None]) -> Callable[[LoaderFactory, Path], None]:
        return lambda factory, directory: check(factory, directory, quirks)

    cases = [
        Case(name="rows are those of the files", run=_same_rows),
        Case(name="file order without shuffling", run=_file_order),
        Case(name="every row once an epoch", run=_exactly_once, skipped=shuffle),
        Case(name="order from seed and epoch alone", run=_seeded, skipped=shuffle),
        Case(name="the same global batches at any world size", run=bound(_any_world), skipped=shuffle or several),
        Case(name="ranks without rows", run=bound(_empty_ranks), skipped=several),
        Case(name="drop_last", run=_drop_last),
        Case(name="goes on after a break", run=_break),
        Case(name="an old iterator refuses", run=_old_iterator),
        Case(name="mark_trained refuses what was not yielded", run=_mark_refuses, skipped=resume),
        Case(name="resume after every step", run=_resume_everywhere, skipped=shuffle or resume),
        Case(name="the state is of what was trained", run=_state_of_trained, skipped=resume),
        Case(name="several resumes at other world sizes", run=bound(_elastic), skipped=shuffle or elastic or several),
        Case(name="refuses a foreign state and changes nothing", run=_foreign_state, skipped=shuffle or resume),
    ]
    for entry in DAMAGES:
        skip = None if entry.at_start else values
        if entry.kind in quirks.skipped_damages:
            skip = f"quirk: does not notice {entry.kind}"
        cases.append(Case(name=f"bad input: {entry.kind}", run=_bad_input(entry), skipped=skip))
    cases += settings_cases(quirks) + request_cases(quirks)
    return [case if case.skipped is None else replace(case, run=_skip(case.skipped)) for case in cases]


def _skip(reason: str) -> Callable[[LoaderFactory, Path], None]:
    def run(factory: LoaderFactory, directory: Path) -> None:
        raise unittest.SkipTest(reason)

    return run


@functools.cache
def _tiny_files(train_rows: int, seed: int) -> tuple[Schema, dict[str, bytes]]:
    with tempfile.TemporaryDirectory() as parent:
        schema = write_tiny_anew(Path(parent) / "tiny", train_rows=train_rows, seed=seed)
        return schema, {path.name: path.read_bytes() for path in (Path(parent) / "tiny").iterdir()}


def write_tiny(directory: Path, *, train_rows: int = 100, seed: int = 0) -> Schema:
    """Like tiny.write_tiny, but the bytes of a data set are made once a process: the suite asks for it 100 times."""
    schema, files = _tiny_files(train_rows, seed)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return schema


_KJT_PARTS = ("keys", "values", "lengths", "stride", "length_per_key", "offset_per_key")
_CONFIG = LoaderConfig(global_batch_size=16, seed=7, window_groups=3, logical_shards=4)


def _config(**changes: Any) -> LoaderConfig:
    return LoaderConfig(**{**_CONFIG.__dict__, **changes})


def samples_of(batches: Iterable[Batch]) -> list[int]:
    return [sample for batch in batches for sample in batch.sample_ids.tolist()]


def assert_same(left: Sequence[Batch], right: Sequence[Batch], what: str) -> None:
    assert len(left) == len(right), f"{what}: {len(left)} batches != {len(right)}"
    for one, other in zip(left, right, strict=True):
        difference = batch_difference(one, other)
        assert difference is None, f"{what}: step {one.step}: {difference}"


def _json(state: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
    return plain


def raises(kinds: type[Exception], call: Callable[[], Any]) -> Exception:
    """What `call` raises; AssertionError where it raises nothing."""
    try:
        call()
    except kinds as error:
        return error
    raise AssertionError(f"expected {kinds.__name__}, nothing was raised")


def _rows_of(directory: Path, schema: Schema, split: str) -> dict[int, tuple[list[int], dict[str, Any]]]:
    """sample id -> (file, row group, row) and the row's values, read independently of any loader."""
    rows = {}
    for index, info in enumerate(schema.files):
        if info.split == split:
            file = pq.ParquetFile(directory / info.path)
            for group in range(file.num_row_groups):
                for number, row in enumerate(file.read_row_group(group).to_pylist()):
                    rows[row["sample_id"]] = ([index, group, number], row)
    return rows


def _same_rows(factory: LoaderFactory, directory: Path) -> None:
    schema = write_tiny(directory)
    rows = _rows_of(directory, schema, "train")
    for batch in factory(directory, split="train", config=_config(shuffle=False)).epoch():
        ids = batch.ids.to_dict()
        for place, sample in enumerate(batch.sample_ids.tolist()):
            origin, row = rows[sample]
            assert batch.row_index[place].tolist() == origin
            assert batch.user_ids[place].item() == row["user_id"]
            assert batch.timestamps[place].item() == row["timestamp"]
            wanted = [row[f"label.{label.name}"] for label in schema.labels]
            assert batch.labels[place].tolist() == wanted
            wanted = [row[f"weight.{label.name}"] if label.weighted else 1.0 for label in schema.labels]
            assert batch.weights[place].tolist() == wanted
            assert batch.dense[place].tolist() == [row[f"dense.{name}"] for name in schema.dense]
            for feature in schema.scalars:
                assert ids[feature.name].to_dense()[place].tolist() == [row[f"id.{feature.name}"]]
            for feature in schema.lists:
                assert ids[feature.name].to_dense()[place].tolist() == row[f"ids.{feature.name}"]
            for info in schema.streams:
                stream, keep = batch.streams[info.name], info.max_length
                start, stop = stream.offsets[place : place + 2].tolist()
                prefix = f"stream.{info.name}"
                assert stream.actions[start:stop].tolist() == row[f"{prefix}.action"][-keep:]
                assert stream.times[start:stop].tolist() == row[f"{prefix}.time"][-keep:]
                for feature in info.fields:
                    came = ids[f"{info.name}.{feature.name}"].to_dense()[place].tolist()
                    assert came == row[f"{prefix}.{feature.name}"][-keep:]


def _file_order(factory: LoaderFactory, directory: Path) -> None:
    schema = write_tiny(directory)
    for prefetch in (0, 3):
        config = LoaderConfig(global_batch_size=16, shuffle=False, prefetch=prefetch)
        loader = factory(directory, split="eval", config=config)
        batches = list(loader.epoch())
        assert samples_of(batches) == list(range(100, 130))
        assert [batch.global_rows for batch in batches] == [16, 14]
        assert (loader.schema, loader.rows_per_epoch, loader.batches_per_epoch) == (schema, 30, 2)


def _exactly_once(factory: LoaderFactory, directory: Path) -> None:
    write_tiny(directory)
    for shards in (1, 3, 4, 40):
        loader = factory(directory, split="train", config=_config(logical_shards=shards))
        for epoch in range(2):
            batches = list(loader.epoch())
            assert sorted(samples_of(batches)) == list(range(100)), f"{shards} shards, epoch {epoch}"
            assert [batch.step for batch in batches] == list(range(7 * epoch, 7 * epoch + 7))
            assert [batch.global_rows for batch in batches] == [16] * 6 + [4]


def _seeded(factory: LoaderFactory, directory: Path) -> None:
    write_tiny(directory)
    loader = factory(directory, split="train", config=_config())
    first, second = list(loader.epoch()), list(loader.epoch())
    again = factory(directory, split="train", config=_config(prefetch=0))
    assert_same(first + second, list(again.epoch()) + list(again.epoch()), "same seed")
    other = list(factory(directory, split="train", config=_config(seed=8)).epoch())
    orders = [samples_of(first), samples_of(second), samples_of(other), list(range(100))]
    assert len({tuple(order) for order in orders}) == 4, "epochs, seeds and file order must all differ"


def _ranks(factory: LoaderFactory, directory: Path, config: LoaderConfig, world: int, split: str) -> list[list[Batch]]:
    made = (factory(directory, split=split, config=config, rank=rank, world_size=world) for rank in range(world))
    return [list(loader.epoch()) for loader in made]


def _assert_split(whole: Sequence[Batch], parts: Sequence[Sequence[Batch]], world: int) -> None:
    """Rank by rank, `parts` are the contiguous slices of the batches in `whole`."""
    for number, batch in enumerate(whole):
        slices = [ranks[number] for ranks in parts]
        samples = batch.sample_ids.tolist()
        n = len(samples)
        for rank, part in enumerate(slices):
            assert part.sample_ids.tolist() == samples[rank * n // world : (rank + 1) * n // world]
            assert (part.global_rows, part.step) == (n, batch.step)
        assert torch.equal(torch.cat([part.labels for part in slices]), batch.labels)
        for key in batch.ids.keys():  # noqa: SIM118 - keys() of a KeyedJaggedTensor, which is no dict
            values = torch.cat([part.ids[key].values() for part in slices])
            assert torch.equal(values, batch.ids[key].values()), f"world size {world}, step {batch.step}, {key}"


def _any_world(factory: LoaderFactory, directory: Path, quirks: Quirks) -> None:
    write_tiny(directory)
    for shards in (1, 8):
        config = _config(logical_shards=shards)
        whole = list(factory(directory, split="train", config=config).epoch())
        for world in quirks.world_sizes if shards == 1 else quirks.world_sizes[-1:]:
            _assert_split(whole, _ranks(factory, directory, config, world, "train"), world)


def _empty_ranks(factory: LoaderFactory, directory: Path, quirks: Quirks) -> None:
    write_tiny(directory, train_rows=11)
    config = LoaderConfig(global_batch_size=5, shuffle=False, logical_shards=2)
    world = max(quirks.world_sizes)
    whole = list(factory(directory, split="train", config=config).epoch())
    parts = _ranks(factory, directory, config, world, "train")
    _assert_split(whole, parts, world)
    empty = [batch for batches in parts for batch in batches if not len(batch.sample_ids)]
    assert empty, "a batch of 1 row leaves ranks without rows"
    for batch in empty:
        assert batch.ids.stride() == 0
        assert batch.ids.values().numel() == 0
        assert [stream.offsets.tolist() for stream in batch.streams.values()] == [[0], [0]]
        assert (tuple(batch.labels.shape), tuple(batch.row_index.shape)) == ((0, 2), (0, 3))


def _drop_last(factory: LoaderFactory, directory: Path) -> None:
    write_tiny(directory)
    loader = factory(directory, split="train", config=_config(drop_last=True, shuffle=False))
    assert (loader.rows_per_epoch, loader.batches_per_epoch) == (96, 6)
    for _ in range(2):
        assert [batch.global_rows for batch in loader.epoch()] == [16] * 6
    config = _config(drop_last=True, global_batch_size=101)
    raises(DataError, lambda: factory(directory, split="train", config=config))


def _break(factory: LoaderFactory, directory: Path) -> None:
    write_tiny(directory)
    loader = factory(directory, split="train", config=_config(shuffle=False, logical_shards=1))
    seen = []
    for batch in loader.epoch():
        seen.append(batch)
        if len(seen) == 3:
            break
    seen += list(loader.epoch())
    assert samples_of(seen) == list(range(100)), "epoch() goes on after the last batch yielded"
    loader.close()
    loader.close()
    assert [batch.step for batch in loader.epoch()] == list(range(7, 14))


def _old_iterator(factory: LoaderFactory, directory: Path) -> None:
    write_tiny(directory)
    loader = factory(directory, split="train", config=_config(shuffle=False))
    old = loader.epoch()
    next(old)
    new = loader.epoch()
    assert next(new).step == 1
    raises(ValueError, lambda: next(old))
    loader.close()
    raises(ValueError, lambda: next(new))


def _mark_refuses(factory: LoaderFactory, directory: Path) -> None:
    write_tiny(directory)
    loader = factory(directory, split="train", config=_config(shuffle=False))
    batches = list(loader.epoch())
    fresh = factory(directory, split="train", config=_config(shuffle=False))
    before = fresh.state_dict()
    raises(ValueError, lambda: fresh.mark_trained(batches[0]))
    assert fresh.state_dict() == before
    loader.mark_trained(batches[4])
    assert loader.state_dict()["step"] == 5
    raises(ValueError, lambda: loader.mark_trained(batches[4]))
    loader.mark_trained(batches[5])
    assert (loader.state_dict()["step"], loader.state_dict()["samples"]) == (6, 96)


def _resume_everywhere(factory: LoaderFactory, directory: Path) -> None:
    write_tiny(directory)
    for config in (_config(), _config(drop_last=True, logical_shards=1)):
        straight = factory(directory, split="train", config=config)
        batches, states = [], [_json(straight.state_dict())]
        for _ in range(2):
            for batch in straight.epoch():
                straight.mark_trained(batch)
                batches.append(batch)
                states.append(_json(straight.state_dict()))
        for step, state in enumerate(states[:-1]):
            resumed = factory(directory, split="train", config=config)
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state, f"step {step}: loading and saving changes nothing"
            rest = list(resumed.epoch())
            if step + len(rest) < len(batches):
                rest.append(next(resumed.epoch()))
            resumed.close()
            assert_same(rest, batches[step : step + len(rest)], f"resumed at step {step}")
            assert step + len(rest) == len(batches) or rest[-1].step % resumed.batches_per_epoch == 0


def _state_of_trained(factory: LoaderFactory, directory: Path) -> None:
    write_tiny(directory)
    loader = factory(directory, split="train", config=_config(shuffle=False, prefetch=3))
    start = loader.state_dict()
    epoch = loader.epoch()
    batches = [next(epoch) for _ in range(4)]
    assert loader.state_dict() == start, "yielded or read ahead is not trained"
    loader.mark_trained(batches[0])
    loader.mark_trained(batches[1])
    state = _json(loader.state_dict())
    assert (state["step"], state["samples"], state["epoch"]) == (2, 32, 0)
    loader.load_state_dict(state)
    assert next(loader.epoch()).step == 2


def _elastic(factory: LoaderFactory, directory: Path, quirks: Quirks) -> None:
    write_tiny(directory)
    straight = factory(directory, split="train", config=_config())
    whole = [*straight.epoch(), *straight.epoch()]
    state, step, ledger = None, 0, Counter[int]()
    worlds = [world for world in quirks.world_sizes for _ in range(2)]
    while step < 14:
        world = worlds[step % len(worlds)]
        config = _config(prefetch=step % 3)
        count = min(1 + step % 3, 7 - step % 7)
        states = []
        for rank in range(world):
            loader = factory(directory, split="train", config=config, rank=rank, world_size=world)
            if state is not None:
                loader.load_state_dict(state)
            epoch = loader.epoch()
            for number in range(count):
                batch = next(epoch)
                samples = whole[step + number].sample_ids.tolist()
                n = len(samples)
                assert batch.sample_ids.tolist() == samples[rank * n // world : (rank + 1) * n // world]
                ledger.update(batch.sample_ids.tolist())
                loader.mark_trained(batch)
            states.append(_json(loader.state_dict()))
            loader.close()
        assert all(other == states[0] for other in states), "the state is the same on every rank"
        state, step = states[0], step + count
    assert ledger == Counter(dict.fromkeys(range(100), 2))


def _foreign_state(factory: LoaderFactory, directory: Path) -> None:
    write_tiny(directory / "a")
    write_tiny(directory / "b", seed=1)
    write_tiny(directory / "c", train_rows=99)
    loader = factory(directory / "a", split="train", config=_config())
    epoch = loader.epoch()
    for _ in range(2):
        loader.mark_trained(next(epoch))
    own = loader.state_dict()

    def refuse(state: dict[str, Any], what: str) -> None:
        error = raises(DataError, lambda: loader.load_state_dict(state))
        assert str(error), what
        assert loader.state_dict() == own, what

    def state_of(data: str, config: LoaderConfig, split: str = "train") -> dict[str, Any]:
        other = factory(directory / data, split=split, config=config)
        other.mark_trained(next(other.epoch()))
        return _json(other.state_dict())

    settings: list[tuple[str, Any]] = [("seed", 8), ("global_batch_size", 8), ("logical_shards", 2), ("max_length", 3)]
    settings += [("window_groups", 2), ("shuffle", False), ("drop_last", True)]
    for name, value in settings:
        refuse(state_of("a", _config(**{name: value})), f"{name} = {value}")
    refuse(state_of("b", _config()), "files of other sizes")
    refuse(state_of("c", _config()), "files of other rows")
    refuse(state_of("a", _config(), "eval"), "another split")
    written = write_tiny(directory / "d").files[0].xxh3
    schema = directory / "d" / "schema.json"
    schema.write_text(schema.read_text().replace(written, "0123456789abcdef"))
    refuse(state_of("d", _config()), "files of equal paths, rows and bytes, and of another content")
    good = state_of("a", _config(prefetch=0))
    for key in good:
        refuse({other: value for other, value in good.items() if other != key}, f"without {key}")
    refuse({**good, "step": good["step"] + 1}, "another step")
    refuse({**good, "samples": good["samples"] + 1}, "another number of samples")
    refuse({**good, "epoch": -1}, "a negative epoch")
    refuse({**good, "shards": [{**good["shards"][0], "row": 99}, *good["shards"][1:]]}, "another row")
    assert next(epoch).step == 2, "a refused state leaves the iterator as it was"
    loader.load_state_dict(good)
    assert loader.state_dict() == good


def _bad_input(entry: Damage) -> Callable[[LoaderFactory, Path], None]:
    def run(factory: LoaderFactory, directory: Path) -> None:
        write_tiny(directory)
        entry.spoil(directory)
        config = LoaderConfig(global_batch_size=16, shuffle=False)
        yielded: list[Batch] = []

        def read() -> None:
            loader = factory(directory, split="train", config=config)
            assert not entry.at_start, "expected to be refused before any row is read"
            for batch in loader.epoch():
                yielded.append(batch)

        error = raises(DataError, read)
        assert isinstance(error, DataError)
        assert entry.file in (error.file or ""), f"file: {error}"
        for name in ("row_group", "row", "column"):
            wanted = getattr(entry, name)
            assert wanted is None or getattr(error, name) == wanted, f"{name}: expected {wanted}: {error}"
        # Row group 2 starts at row 18: only the batch of rows 0..15 may have been handed out.
        assert len(yielded) <= 1, "a batch with a bad row was handed out"

    return run
