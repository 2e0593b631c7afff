"""Time windows: edges between seconds, training before evaluation, and a resume on either side of an edge."""

from __future__ import annotations

import itertools
import json

import pyarrow as pa
import pytest
from gem_data.api import write_dataset
from gem_data.interface import DataError, LoaderConfig
from gem_data.streaming import StreamingLoader, time_windows
from gem_data.testing import TINY_START, batch_difference, tiny_schema, tiny_table

CONFIG = LoaderConfig(global_batch_size=8, window_groups=2)
SECONDS = 300  # a row every 10 s: windows of three row groups of 10 rows, and one of one


@pytest.fixture
def directory(tmp_path):
    write_dataset(
        tmp_path / "d", tiny_schema(), {"train": tiny_table(rows=100, seed=2)}, rows_per_file=40, rows_per_group=10
    )
    return tmp_path / "d"


def test_windows_follow_one_another_in_time(directory) -> None:
    windows = time_windows(directory, seconds=SECONDS)
    assert [w.rows for w in windows] == [30, 30, 30, 10]
    assert [w.first - TINY_START for w in windows] == [0, 300, 600, 900]
    assert all(a.last < b.first for a, b in itertools.pairwise(windows))
    assert [w.rows for w in time_windows(directory, seconds=10**6)] == [100]


def test_equal_seconds_stay_together(tmp_path) -> None:
    table = tiny_table(rows=40, seed=2)
    stamps = table.column("timestamp").to_pylist()
    stamps[9] = stamps[10]  # the first row group ends in the second that the next begins with
    table = table.set_column(table.column_names.index("timestamp"), "timestamp", pa.array(stamps))
    write_dataset(tmp_path / "d", tiny_schema(), {"train": table}, rows_per_group=10)
    assert [w.rows for w in time_windows(tmp_path / "d", seconds=100)] == [20, 10, 10]


def test_data_out_of_order_is_refused(tmp_path) -> None:
    table = tiny_table(rows=40, seed=2)
    write_dataset(tmp_path / "d", tiny_schema(), {"train": table.take(list(range(39, -1, -1)))}, rows_per_group=10)
    with pytest.raises(DataError, match=r"row group 1: expected rows not before second .* order of time") as error:
        time_windows(tmp_path / "d", seconds=100)
    assert error.value.row_group == 1


def test_each_window_is_trained_and_the_next_one_is_strictly_later(directory) -> None:
    loader = StreamingLoader(directory, seconds=SECONDS, config=CONFIG)
    seen, steps = [], []
    for window in loader.windows:
        for batch in loader.epoch():
            assert window.first <= int(batch.timestamps.min()) <= int(batch.timestamps.max()) <= window.last
            seen += batch.sample_ids.tolist()
            steps.append(batch.step)
            loader.mark_trained(batch)
        assert loader.window == window.index
        later = loader.later(LoaderConfig(global_batch_size=16, shuffle=False))
        if window is loader.windows[-1]:
            assert later is None
        else:
            first = min(int(batch.timestamps.min()) for batch in later.epoch())
            assert first > window.last
    assert sorted(seen) == list(range(100))
    assert steps == list(range(4 + 4 + 4 + 2))
    assert list(loader.epoch()) == []


@pytest.mark.parametrize("stop", [0, 3, 4, 5, 8, 13, 14])
def test_resuming_anywhere_gives_the_rest(directory, stop: int) -> None:
    """Steps 4, 8 and 12 are edges."""

    def run(loader: StreamingLoader, most: int) -> list:
        batches = []
        for _ in loader.windows:
            for batch in loader.epoch():
                if len(batches) == most:
                    return batches
                loader.mark_trained(batch)
                batches.append(batch)
        return batches

    straight = run(StreamingLoader(directory, seconds=SECONDS, config=CONFIG), 99)
    stopped = StreamingLoader(directory, seconds=SECONDS, config=CONFIG)
    run(stopped, stop)
    state = json.loads(json.dumps(stopped.state_dict()))
    again = StreamingLoader(directory, seconds=SECONDS, config=CONFIG)
    again.load_state_dict(state)
    rest = run(again, 99)
    assert len(rest) == len(straight) - stop
    for one, other in zip(rest, straight[stop:], strict=True):
        assert batch_difference(one, other) is None


def test_what_does_not_fit_is_refused(directory) -> None:
    loader = StreamingLoader(directory, seconds=SECONDS, config=CONFIG)
    state = loader.state_dict()
    with pytest.raises(DataError, match="windows: they are not those"):
        StreamingLoader(directory, seconds=2 * SECONDS, config=CONFIG).load_state_dict(state)
    with pytest.raises(DataError, match="expected an object with the keys"):
        loader.load_state_dict({"window": 0})
    list(loader.epoch())
    with pytest.raises(ValueError, match=r"only 0 of its 4 batches were marked as trained"):
        next(loader.epoch())
    with pytest.raises(ValueError, match="seconds: expected at least 1"):
        time_windows(directory, seconds=0)
