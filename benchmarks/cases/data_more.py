"""Reading requests, windows of time and base batches: the loader's other forms, counted and not timed."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Any

from cases import data
from cases.case import Case, scratch
from cases.memory import count_all

REQUESTS, REQUEST_BATCH = 600, 100
ROWS, GROUP, SECONDS, WINDOW_BATCH = 1200, 100, 2500, 128
BASE_BATCH, SHARDS = 5, 4
EVENTS = 12  # tiny_schema's longest history of views


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A data set on disk (`directory` lives as long as this) and the Arrow table it was written from."""

    directory: tempfile.TemporaryDirectory[str]
    table: Any


def make_requests() -> Inputs:
    """600 requests of 1 to 4 impressions with every kind of column."""
    from gem_data.api import write_dataset
    from gem_data.testing import tiny_request_schema, tiny_request_table

    table = tiny_request_table(rows=REQUESTS, seed=5)
    directory = scratch()
    write_dataset(directory.name + "/set", tiny_request_schema(), {"train": table}, rows_per_group=100)
    return Inputs(directory=directory, table=table)


def read_requests(inputs: Inputs) -> list[Any]:
    """All batches of one epoch."""
    from gem_data.api import build_loader
    from gem_data.interface import LoaderConfig

    config = LoaderConfig(global_batch_size=REQUEST_BATCH, prefetch=0)
    return list(build_loader(inputs.directory.name + "/set", split="train", config=config).epoch())


def check_requests(inputs: Inputs, batches: list[Any]) -> None:
    """Every request once with its impressions, in their order, and its user's part as written, once."""
    rows = {row["sample_id"][0]: row for row in inputs.table.to_pylist()}
    seen = []
    for batch in batches:
        bounds = batch.requests.tolist()
        samples, items = batch.sample_ids.tolist(), batch.ids["item"].values().tolist()
        views, times = batch.ids["views.item"].values(), batch.streams["views"].times
        offsets, users = batch.streams["views"].offsets.tolist(), batch.ids["user"].values().tolist()
        assert len(users) == len(bounds) - 1 == len(offsets) - 1
        for place, (start, stop) in enumerate(itertools.pairwise(bounds)):
            row, events = rows[samples[start]], slice(offsets[place], offsets[place + 1])
            seen.append(samples[start])
            assert samples[start:stop] == row["sample_id"]
            assert items[start:stop] == row["id.item"]
            assert batch.labels[start:stop, 0].tolist() == row["label.click"]
            assert users[place] == row["id.user"]
            assert views[events].tolist() == row["stream.views.item"][-EVENTS:]
            assert times[events].tolist() == row["stream.views.time"][-EVENTS:]
    assert sorted(seen) == sorted(rows)


def make_log() -> Inputs:
    """1200 rows, one every 10 seconds, in row groups of 100."""
    from gem_data.api import write_dataset
    from gem_data.testing import tiny_schema, tiny_table

    table = tiny_table(rows=ROWS, seed=5)
    directory = scratch()
    write_dataset(directory.name + "/set", tiny_schema(), {"train": table}, rows_per_file=500, rows_per_group=GROUP)
    return Inputs(directory=directory, table=table)


def stream(inputs: Inputs) -> list[tuple[list[Any], list[Any]]]:
    """Of every window: the batches that are trained, then those that are predicted."""
    from gem_data.interface import LoaderConfig
    from gem_data.streaming import StreamingLoader

    config = LoaderConfig(global_batch_size=WINDOW_BATCH, prefetch=0)
    loader = StreamingLoader(inputs.directory.name + "/set", seconds=SECONDS, config=config)
    found = []
    for _ in loader.windows:
        trained = []
        for batch in loader.epoch():
            loader.mark_trained(batch)
            trained.append(batch)
        later = loader.later(LoaderConfig(global_batch_size=WINDOW_BATCH, shuffle=False, prefetch=0))
        found.append((trained, [] if later is None else list(later.epoch())))
    return found


def check_stream(inputs: Inputs, windows: list[tuple[list[Any], list[Any]]]) -> None:
    """Rows by the seconds of the table: whole row groups of at least SECONDS, each window predicted, then trained."""
    times, samples = (inputs.table.column(name).to_pylist() for name in ("timestamp", "sample_id"))
    wanted: list[list[int]] = []
    begun = None
    for start in range(0, ROWS, GROUP):
        if begun is None or times[start] >= begun + SECONDS:
            wanted.append([])
            begun = times[start]
        wanted[-1] += samples[start : start + GROUP]
    assert len(wanted) > 2

    def held(batches: list[Any]) -> list[int]:
        return [sample for batch in batches for sample in batch.sample_ids.tolist()]

    assert [sorted(held(trained)) for trained, _ in windows] == wanted
    assert [held(later) for _, later in windows] == [*wanted[1:], []]
    steps = [batch.step for trained, _ in windows for batch in trained]
    assert steps == list(range(len(steps)))
    whole = [batch for trained, later in windows for batch in (*trained, *later)]
    data.check_rows(inputs.table, whole)


def read_base(inputs: data.Inputs) -> list[Any]:
    """All batches of one epoch, base batches of 5 rows moved in each of four shards."""
    from gem_data.api import build_loader
    from gem_data.interface import LoaderConfig

    config = LoaderConfig(
        global_batch_size=data.BATCH, base_batch=BASE_BATCH, base_pool=20, logical_shards=SHARDS, prefetch=0
    )
    return list(build_loader(inputs.directory.name + "/set", split="train", config=config).epoch())


def unevenness(inputs: data.Inputs) -> dict[str, int]:
    """By how many millionths the heaviest quarter of a batch lies above the mean, as the mean over batches."""
    import numpy as np
    from gem_data.api import imbalance

    found = []
    for batch in read_base(inputs):
        events = sum(np.diff(stream.offsets.numpy()) for stream in batch.streams.values())
        found.append(imbalance([part.sum() for part in np.array_split(events, SHARDS)]))
    return {"uneven_millionths": round(1e6 * (sum(found) / len(found) - 1.0))}


CASES = (
    Case(
        name="data.requests_ragged",
        make=make_requests,
        run=read_requests,
        check=check_requests,
        count=count_all,
        timed=False,
    ),
    Case(name="data.stream_windows", make=make_log, run=stream, check=check_stream, count=count_all, timed=False),
    Case(
        name="data.epoch_base_ragged",
        make=partial(data.make, shape="ragged", shuffle=True),
        run=read_base,
        check=data.check,
        count=count_all,
        formula=unevenness,
        timed=False,
    ),
)
