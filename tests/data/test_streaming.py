"""Time windows: edges between seconds, training before evaluation, and a resume on either side of an edge."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gem_data import shards
from gem_data.api import build_loader, read_schema, write_dataset
from gem_data.blocks import chunks_of, parse_footer, read_footer
from gem_data.interface import DataError, LoaderConfig
from gem_data.schema import schema_to_dict
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


def table_at(seconds) -> pa.Table:
    """Tiny rows that begin so many seconds after the usual start."""
    table = tiny_table(rows=len(seconds), seed=2)
    stamps = pa.array([TINY_START + second for second in seconds], pa.int64())
    usual = table.column("timestamp").to_numpy()
    assert all(new.as_py() >= old for new, old in zip(stamps, usual, strict=True))  # histories stay earlier
    return table.set_column(table.column_names.index("timestamp"), "timestamp", stamps)


def trained(loader: StreamingLoader, most: int = 99) -> list:
    """Up to so many batches, each marked as trained."""
    batches: list = []
    for _ in loader.windows if most else ():
        for batch in loader.epoch():
            loader.mark_trained(batch)
            batches.append(batch)
            if len(batches) == most:
                return batches
    return batches


def spoil(directory, file: str, group: int) -> None:
    """Flip a bit in the item ids of a row group."""
    path = directory / file
    with parse_footer(read_footer(path)) as parsed:
        (chunk,) = (c for c in chunks_of(parsed.metadata, group) if c.column == "id.item")
    data = bytearray(path.read_bytes())
    data[chunk.stop - 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("empty_at", ["start", "middle", "end"])
def test_a_window_without_a_whole_batch_is_passed_over(tmp_path, empty_at: str) -> None:
    """Windows of 30, 10 and 30 rows, and batches of 20 whole ones."""
    gaps = {"start": [10], "middle": [30, 40], "end": [30]}[empty_at]
    seconds = [10 * row + 1000 * sum(row >= gap for gap in gaps) for row in range(70 if empty_at == "middle" else 40)]
    write_dataset(tmp_path / "d", tiny_schema(), {"train": table_at(seconds)}, rows_per_group=10)
    config = LoaderConfig(global_batch_size=20, drop_last=True)

    def loader() -> StreamingLoader:
        return StreamingLoader(tmp_path / "d", seconds=SECONDS, config=config)

    wanted = {"start": (0, 1), "middle": (1, 0, 1), "end": (1, 0)}[empty_at]
    assert loader().batches_by_window == wanted
    straight = trained(loader())
    assert [batch.step for batch in straight] == list(range(sum(wanted)))
    for stop in range(sum(wanted) + 1):
        stopped = loader()
        trained(stopped, stop)
        again = loader()
        again.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        rest = trained(again)
        pairs = zip(rest, straight[stop:], strict=True)
        assert all(batch_difference(one, other) is None for one, other in pairs)
    if empty_at == "end":  # it is not trained, but predicted
        assert sum(b.rows for b in again.later(LoaderConfig(global_batch_size=16)).epoch()) == 10


def test_what_is_trained_next_is_predicted_with_what_is_passed_over(tmp_path) -> None:
    """Windows of 30, 10, 10, 30, 10 and 10 rows in batches of 20 whole ones: the first predicts up to the fourth."""
    gaps = [30, 40, 50, 80, 90]
    seconds = [10 * row + 1000 * sum(row >= gap for gap in gaps) for row in range(100)]
    write_dataset(tmp_path / "d", tiny_schema(), {"train": table_at(seconds)}, rows_per_group=10)
    loader = StreamingLoader(tmp_path / "d", seconds=SECONDS, config=LoaderConfig(global_batch_size=20, drop_last=True))
    assert loader.batches_by_window == (1, 0, 0, 1, 0, 0)
    predicted: set = set()
    for window, after in ((0, (1, 2, 3)), (3, (4, 5))):
        (batch,) = loader.epoch()
        assert window == loader.window
        assert predicted.issuperset(batch.sample_ids.tolist()) or window == 0
        loader.mark_trained(batch)
        assert tuple(ahead.index for ahead in loader.ahead) == after
        later = loader.later(LoaderConfig(global_batch_size=16, shuffle=False))
        held = [i for batch in later.epoch() for i in batch.sample_ids.tolist()]
        assert sorted(held) == list(range(30, 80) if window == 0 else range(80, 100))
        predicted.update(held)
    assert list(loader.epoch()) == []


def test_a_stream_without_any_batch_is_refused_at_start(directory) -> None:
    config = LoaderConfig(global_batch_size=64, drop_last=True)
    with pytest.raises(DataError, match=r"expected a window with rows for at least one batch, came 4 windows of at mo"):
        StreamingLoader(directory, seconds=SECONDS, config=config)


def test_a_damaged_row_group_does_not_end_the_look_ahead(directory) -> None:
    """Row group 4 is in the second window: looked at when the first is trained, and again when it is trained."""
    spoil(directory, "train-00001.parquet", 0)
    heard: list = []
    loader = StreamingLoader(
        directory, seconds=SECONDS, config=CONFIG, on_damage=lambda error, rows: heard.append((error.row_group, rows))
    )
    assert len(trained(loader, 4)) == 4
    later = loader.later(LoaderConfig(global_batch_size=16, shuffle=False))
    assert sum(batch.rows for batch in later.epoch()) == 20
    assert heard == [(0, 10)]
    strict = StreamingLoader(directory, seconds=SECONDS, config=CONFIG)
    trained(strict, 4)
    with pytest.raises(DataError, match=r"train-00001\.parquet, row group 0, column id\.item"):
        list(strict.later(CONFIG).epoch())


def test_footers_are_read_once(directory, monkeypatch) -> None:
    read: list = []
    monkeypatch.setattr(shards, "read_footer", lambda path: read.append(path.name) or read_footer(path))
    loader = StreamingLoader(directory, seconds=SECONDS, config=CONFIG)
    for _ in loader.windows:
        for batch in loader.epoch():
            loader.mark_trained(batch)
        later = loader.later(LoaderConfig(global_batch_size=16, shuffle=False))
        if later is not None:
            list(later.epoch())
    assert sorted(read) == ["train-00000.parquet", "train-00001.parquet", "train-00002.parquet"]
    trained(loader)
    other = StreamingLoader(directory, seconds=SECONDS, config=CONFIG).later(
        LoaderConfig(global_batch_size=16, features=("id.item",))
    )
    assert next(iter(other.epoch())).ids.keys() == ["item"]


def test_files_without_hashes_are_streamed_too(directory) -> None:
    """Another process says the times of their row groups."""
    wanted = StreamingLoader(directory, seconds=SECONDS, config=CONFIG)
    without_hashes(directory)
    found = StreamingLoader(directory, seconds=SECONDS, config=CONFIG)
    assert found.windows == wanted.windows
    pairs = zip(trained(found), trained(wanted), strict=True)
    assert all(batch_difference(one, other) is None for one, other in pairs)


def test_files_without_times_are_refused_by_name(directory) -> None:
    path = directory / "train-00001.parquet"
    pq.write_table(pq.read_table(path), path, row_group_size=10, write_statistics=False)
    without_hashes(directory)
    assert sum(b.rows for b in build_loader(directory, split="train", config=CONFIG).epoch()) == 100
    with pytest.raises(DataError, match=r"train-00001\.parquet, row group 0: expected statistics of column timestamp"):
        StreamingLoader(directory, seconds=SECONDS, config=CONFIG)


def without_hashes(directory) -> None:
    schema = read_schema(directory)
    files = tuple(dataclasses.replace(file, xxh3="", blocks_xxh3=()) for file in schema.files)
    (directory / "schema.json").write_text(json.dumps(schema_to_dict(dataclasses.replace(schema, files=files))))


def grown(directory, target, rows: int):
    """A copy of the log, with rows 100 and later appended as files of their own."""
    shutil.copytree(directory, target)
    more = tiny_table(rows=100 + rows, seed=2).slice(100)
    added = write_dataset(target / "more", tiny_schema(), {"train": more}, rows_per_group=10)
    schema = read_schema(target)
    files = list(schema.files)
    for number, file in enumerate(added.files, start=len(files)):
        name = f"train-{number:05d}.parquet"
        (target / "more" / file.path).rename(target / name)
        files.append(dataclasses.replace(file, path=name))
    shutil.rmtree(target / "more")
    schema = dataclasses.replace(schema, files=tuple(files))
    (target / "schema.json").write_text(json.dumps(schema_to_dict(schema)))
    return target


@pytest.mark.parametrize("stop", [0, 3, 4, 11, 12, 13, 14])
def test_a_log_may_grow(directory, tmp_path, stop: int) -> None:
    """Windows of 30, 30, 30 and 10 rows, to which 50 are appended. Steps 4, 8, 12 and 14 are edges."""
    stopped = StreamingLoader(directory, seconds=SECONDS, config=CONFIG)
    seen = [i for batch in trained(stopped, stop) for i in batch.sample_ids.tolist()]
    state = json.loads(json.dumps(stopped.state_dict()))
    longer = grown(directory, tmp_path / "longer", 50)
    again = StreamingLoader(longer, seconds=SECONDS, config=CONFIG)
    again.load_state_dict(state)
    # The last window goes on, unless it had begun.
    assert [window.rows for window in again.windows] == (
        [30, 30, 30, 30, 30] if stop < 13 else [30, 30, 30, 10, 30, 20]
    )
    assert all(a.last < b.first for a, b in itertools.pairwise(again.windows))
    half = trained(again, 2)
    seen += [i for batch in half for i in batch.sample_ids.tolist()]
    once_more = StreamingLoader(longer, seconds=SECONDS, config=CONFIG)  # a state of the longer log resumes it
    once_more.load_state_dict(json.loads(json.dumps(again.state_dict())))
    assert once_more.windows == again.windows
    rest = trained(once_more)
    seen += [i for batch in rest for i in batch.sample_ids.tolist()]
    assert [batch.step for batch in half + rest] == list(range(stop, stop + len(half + rest)))
    assert sorted(seen) == list(range(150))


def test_a_log_that_changed_is_refused(directory, tmp_path) -> None:
    stopped = StreamingLoader(directory, seconds=SECONDS, config=CONFIG)
    trained(stopped, 13)
    state = json.loads(json.dumps(stopped.state_dict()))
    longer = grown(directory, tmp_path / "longer", 50)
    schema = read_schema(longer)

    def load(files, seconds=SECONDS) -> None:
        (longer / "schema.json").write_text(json.dumps(schema_to_dict(dataclasses.replace(schema, files=files))))
        StreamingLoader(longer, seconds=seconds, config=CONFIG).load_state_dict(state)

    with pytest.raises(DataError, match="windows: they are not those"):
        load(schema.files[:1])  # it shrank
    with pytest.raises(DataError, match=r"files\[1\]: train-00001\.parquet: the state has xxh3 .*, this loader"):
        load((schema.files[0], dataclasses.replace(schema.files[1], xxh3="0" * 16), *schema.files[2:]))
    load(schema.files)
    tied = tiny_table(rows=101, seed=2).slice(99)  # its first row is of the second that the log ended in
    written = write_dataset(tmp_path / "tied", tiny_schema(), {"train": tied}, rows_per_group=1).files[0]
    (tmp_path / "tied" / written.path).rename(longer / "tied.parquet")
    stopped.epoch()
    with pytest.raises(
        DataError, match=r"tied\.parquet, row group 0: expected rows not before second .*has begun ends"
    ):
        load((*schema.files[:3], dataclasses.replace(written, path="tied.parquet")))


def test_states_of_before_are_read(directory, tmp_path) -> None:
    """They had no position at an edge."""
    stopped = StreamingLoader(directory, seconds=SECONDS, config=CONFIG)
    trained(stopped, 4)
    state = {**stopped.state_dict(), "inside": None}
    for place in (directory, grown(directory, tmp_path / "longer", 50)):
        again = StreamingLoader(place, seconds=SECONDS, config=CONFIG)
        again.load_state_dict(state)
        assert next(again.epoch()).step == 4
    state["trained"] = 3
    with pytest.raises(DataError, match="trained: expected 4, came 3"):
        again.load_state_dict(state)
    other = StreamingLoader(directory, seconds=SECONDS, config=dataclasses.replace(CONFIG, seed=5))
    with pytest.raises(DataError, match=r"config\.seed"):
        other.load_state_dict(stopped.state_dict())  # at an edge, where nothing was compared
    for key, value, said in (
        ("window", 9, "windows: expected"),
        ("steps_before", 1, "expected 0"),
        ("window", "x", "a whole"),
    ):
        with pytest.raises(DataError, match=said):
            again.load_state_dict({**stopped.state_dict(), key: value})
