"""What every Loader must do with data whose rows are requests (part of conformance.conformance_cases)."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from gem_data.conformance import Case, LoaderFactory, Quirks, batch_difference, raises
from gem_data.damage import FILE, GROUP, ROW, rewrite, set_value
from gem_data.interface import Batch, DataError, LoaderConfig, Schema
from gem_data.tiny import write_tiny_requests as write_anew

_CONFIG = LoaderConfig(global_batch_size=8, seed=5, window_groups=3, logical_shards=4)
_TRAIN_ROWS, _GROUP_ROWS = 60, 9


def request_cases(quirks: Quirks) -> list[Case]:
    """All cases of requests, those that the quirks leave out marked as skipped."""
    skip = None if quirks.requests else "quirk: does not read requests"
    shuffle = skip or (None if quirks.shuffles else "quirk: does not shuffle")
    resume = shuffle or (None if quirks.resumes else "quirk: does not resume")
    several = shuffle or (None if len(quirks.world_sizes) > 1 else "quirk: one process only")
    elastic = resume or several or (None if quirks.resumes_any_world else "quirk: resumes at the same world size only")
    values = skip or (None if quirks.checks_values else "quirk: does not check values")
    worlds = [world for world in quirks.world_sizes if world > 1]
    cases = [
        Case(name="requests are those of the files", run=_same_requests, skipped=skip),
        Case(name="requests: every impression once an epoch", run=_exactly_once, skipped=shuffle),
        Case(name="requests are whole at any world size", run=functools.partial(_any_world, worlds), skipped=several),
        Case(name="requests: ranks without rows", run=functools.partial(_empty_ranks, worlds), skipped=several),
        Case(name="requests: resumes at other world sizes", run=functools.partial(_elastic, worlds), skipped=elastic),
    ]
    for kind, (spoil, column) in _SPOILT.items():
        run = functools.partial(_bad_request, spoil, column)
        cases.append(Case(name=f"bad request: {kind}", run=run, skipped=values))
    return cases


@functools.cache
def _files() -> tuple[Schema, dict[str, bytes]]:
    with tempfile.TemporaryDirectory() as parent:
        schema = write_anew(Path(parent) / "tiny", train_rows=_TRAIN_ROWS, rows_per_group=_GROUP_ROWS)
        return schema, {path.name: path.read_bytes() for path in (Path(parent) / "tiny").iterdir()}


def write_requests(directory: Path) -> Schema:
    """The tiny requests, whose bytes are made once a process."""
    schema, files = _files()
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return schema


def _counts(directory: Path, schema: Schema, split: str) -> list[dict[str, Any]]:
    """The rows of a split in file order, read independently of any loader."""
    files = [info for info in schema.files if info.split == split]
    return [row for info in files for row in pq.read_table(directory / info.path).to_pylist()]


def _same_requests(factory: LoaderFactory, directory: Path) -> None:
    schema = write_requests(directory)
    rows = iter(_counts(directory, schema, "train"))
    once = schema.request_keys()
    for batch in factory(directory, split="train", config=LoaderConfig(global_batch_size=7, shuffle=False)).epoch():
        assert batch.requests is not None
        assert batch.global_rows == batch.rows == batch.requests.numel() - 1
        bounds, ids = batch.requests.tolist(), batch.ids.to_dict()
        for number, (first, stop) in enumerate(pairwise(bounds)):
            row, each = next(rows), slice(first, stop)
            assert batch.sample_ids[each].tolist() == row["sample_id"]
            for name in ("user_id", "timestamp"):
                assert set(getattr(batch, f"{name}s")[each].tolist()) == {row[name]}
            wanted = [row[f"label.{label.name}"] for label in schema.labels]
            assert batch.labels[each].T.tolist() == wanted
            assert batch.weights[each, 1].tolist() == row["weight.like"]
            dense = [row["dense.price"], [row["dense.hour"]] * (stop - first)]
            assert batch.dense[each].T.tolist() == dense
            for key, column in _id_columns(schema).items():
                came = [ids[key].to_dense()[place].tolist() for place in range(first, stop)]
                one = row[column] if isinstance(row[column], list) else [row[column]]
                if key in once:
                    keep = next((s.max_length for s in schema.streams if key.startswith(f"{s.name}.")), len(one) or 1)
                    assert came == [one[-keep:], *[[]] * (stop - first - 1)], key
                else:
                    assert came == [value if isinstance(value, list) else [value] for value in one], key
            for stream in schema.streams:
                held = batch.streams[stream.name]
                begin, end = held.offsets[number : number + 2].tolist()
                assert held.times[begin:end].tolist() == row[f"stream.{stream.name}.time"][-stream.max_length :]
                assert held.offsets.numel() == batch.rows + 1
    assert next(rows, None) is None


def _id_columns(schema: Schema) -> dict[str, str]:
    found = {feature.name: f"id.{feature.name}" for feature in schema.scalars}
    found |= {feature.name: f"ids.{feature.name}" for feature in schema.lists}
    return found | {key: f"stream.{key}" for key, _ in schema.id_features() if key not in found}


def _exactly_once(factory: LoaderFactory, directory: Path) -> None:
    schema = write_requests(directory)
    samples = [sample for row in _counts(directory, schema, "train") for sample in row["sample_id"]]
    loader = factory(directory, split="train", config=_CONFIG)
    orders = []
    for _ in range(2):
        batches = list(loader.epoch())
        assert [batch.rows for batch in batches] == [8] * 7 + [4], "a batch is made of requests"
        orders.append([sample for batch in batches for sample in batch.sample_ids.tolist()])
        assert sorted(orders[-1]) == sorted(samples)
    assert orders[0] != orders[1] != samples


def _joined(parts: list[Batch]) -> dict[str, Any]:
    """What the ranks' parts of a batch hold, one after the other."""
    requests = [part.requests for part in parts if part.requests is not None]
    found: dict[str, Any] = {"samples": torch.cat([part.sample_ids for part in parts]).tolist()}
    found["impressions"] = torch.cat([offsets.diff() for offsets in requests]).tolist()
    found["labels"] = torch.cat([part.labels for part in parts]).tolist()
    for key in parts[0].ids.keys():  # noqa: SIM118 - keys() of a KeyedJaggedTensor, which is no dict
        found[key] = torch.cat([part.ids[key].values() for part in parts]).tolist()
    return found


def _any_world(worlds: list[int], factory: LoaderFactory, directory: Path) -> None:
    write_requests(directory)
    # with one shard ranks share row groups, with four each of the first worlds has its own
    for shards, served in ((1, worlds[:1]), (4, [worlds[0], worlds[-1]])):
        config = LoaderConfig(**{**_CONFIG.__dict__, "logical_shards": shards})
        whole = list(factory(directory, split="train", config=config).epoch())
        for world in served:
            ranks = [
                list(factory(directory, split="train", config=config, rank=rank, world_size=world).epoch())
                for rank in range(world)
            ]
            for number, batch in enumerate(whole):
                parts = [batches[number] for batches in ranks]
                assert _joined(parts) == _joined([batch]), f"world size {world}, step {number}"
                n = batch.rows
                assert [part.rows for part in parts] == [(r + 1) * n // world - r * n // world for r in range(world)]


def _empty_ranks(worlds: list[int], factory: LoaderFactory, directory: Path) -> None:
    write_requests(directory)
    config, world = LoaderConfig(global_batch_size=1, shuffle=False), max(worlds)
    batches = [
        next(factory(directory, split="train", config=config, rank=rank, world_size=world).epoch())
        for rank in range(world)
    ]
    empty = [batch for batch in batches if not batch.rows]
    assert len(empty) == world - 1
    for batch in empty:
        assert batch.requests is not None
        assert (batch.requests.tolist(), batch.ids.stride(), batch.global_rows) == ([0], 0, 1)
        assert [stream.offsets.tolist() for stream in batch.streams.values()] == [[0], [0]]


def _elastic(worlds: list[int], factory: LoaderFactory, directory: Path) -> None:
    write_requests(directory)
    whole = factory(directory, split="train", config=_CONFIG)
    batches = [*whole.epoch(), *whole.epoch()]
    state: dict[str, Any] | None = None
    for step, world in enumerate([1, worlds[0], worlds[-1], 1]):
        loaders = [
            factory(directory, split="train", config=_CONFIG, rank=rank, world_size=world) for rank in range(world)
        ]
        parts = []
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            batch = next(loader.epoch())
            loader.mark_trained(batch)
            parts.append(batch)
        assert _joined(parts) == _joined([batches[step]]), f"step {step} at world size {world}"
        states = [loader.state_dict() for loader in loaders]
        assert all(found == states[0] for found in states)
        state = states[0]
    resumed = factory(directory, split="train", config=_CONFIG)
    assert state is not None
    resumed.load_state_dict(state)
    step = state["step"]
    assert batch_difference(next(resumed.epoch()), batches[step]) is None


Spoil = Callable[[pa.Table, int], pa.Table]


def _set(column: str, change: Callable[[Any], Any]) -> Spoil:
    return lambda table, row: set_value(table, row, column, change)


def _emptied(table: pa.Table, row: int) -> pa.Table:
    """Every list of impressions of one row without entries."""
    for column in ("sample_id", "label.click", "label.like", "weight.like", "id.item", "ids.genres", "dense.price"):
        table = set_value(table, row, column, lambda _: [])
    return table


_SPOILT: dict[str, tuple[Spoil, str]] = {
    "a label too few": (_set("label.click", lambda values: values[:-1]), "label.click"),
    "an id too many": (_set("id.item", lambda values: [*values, 1]), "id.item"),
    "a bag too few": (_set("ids.genres", lambda values: values[:-1]), "ids.genres"),
    "no impression": (_emptied, "sample_id"),
    "an id outside its table": (_set("id.item", lambda values: [*values[:-1], 50]), "id.item"),
    "a bag's id outside its table": (_set("ids.genres", lambda values: [[-1], *values[1:]]), "ids.genres"),
    "a label of 0.5": (_set("label.click", lambda values: [*values[:-1], 0.5]), "label.click"),
    "a null among labels": (_set("label.click", lambda values: [None, *values[1:]]), "label.click"),
    "a null instead of ids": (_set("id.item", lambda _: None), "id.item"),
    "an event after the request": (
        _set("stream.views.time", lambda values: [10**9] * len(values)),
        "stream.views.time",
    ),
}


def _bad_request(spoil: Spoil, column: str, factory: LoaderFactory, directory: Path) -> None:
    write_requests(directory)
    row = GROUP * _GROUP_ROWS + ROW
    while not pq.read_table(directory / FILE, columns=["stream.views.time"])[0][row].as_py():
        row += 1  # the row must have an event to spoil
    rewrite(directory / FILE, lambda table: spoil(table, row))
    config = LoaderConfig(global_batch_size=8, shuffle=False)
    error = raises((DataError,), lambda: list(factory(directory, split="train", config=config).epoch()))
    assert isinstance(error, DataError)
    place = (error.file, error.row_group, error.row, error.column)
    assert place == (FILE, row // _GROUP_ROWS, row % _GROUP_ROWS, column), f"{place}: {error}"
