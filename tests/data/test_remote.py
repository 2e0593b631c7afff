"""Data at a URL, through fsspec: the same batches, bytes, states and refusals as from a disk."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import sys
import types

import fsspec
import fsspec.implementations.memory
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from gem_data import isolated, shards
from gem_data import remote as remote_module
from gem_data import verify as verify_module
from gem_data.api import build_loader, data_path, inspect_dataset, read_schema, verify_dataset, write_dataset
from gem_data.blocks import chunks_of
from gem_data.interface import DataError, LoaderConfig
from gem_data.loader import ArrowLoader
from gem_data.remote import ReadError, RemotePath
from gem_data.schema import schema_to_dict
from gem_data.shards import Shards
from gem_data.streaming import StreamingLoader
from gem_data.testing import batch_difference, tiny_schema, write_tiny

CONFIG = LoaderConfig(global_batch_size=16, seed=3, window_groups=3, logical_shards=2)
URL = "memory://bucket/log"


@pytest.fixture
def local(tmp_path):
    write_tiny(tmp_path / "d")
    return tmp_path / "d"


@pytest.fixture
def remote(local):
    """The same files behind a URL; the memory of this process is emptied afterwards."""
    filesystem = fsspec.filesystem("memory")
    for path in local.iterdir():
        filesystem.pipe_file(f"/bucket/log/{path.name}", path.read_bytes())
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def batches(place, **settings):
    return list(build_loader(place, split="train", config=dataclasses.replace(CONFIG, **settings)).epoch())


@pytest.mark.parametrize(
    "settings", [{}, {"prefetch": 0}, {"features": ("id.item", "stream.buys"), "labels": ("like",)}]
)
def test_the_same_batches(local, remote, settings) -> None:
    pairs = zip(batches(URL, **settings), batches(local, **settings), strict=True)
    assert [batch_difference(there, here) for there, here in pairs] == [None] * 7


def test_states_go_from_disk_to_url(local, remote) -> None:
    here = build_loader(local, split="train", config=CONFIG)
    there = build_loader(URL, split="train", config=CONFIG)
    found = list(here.epoch())
    here.mark_trained(found[2])
    there.load_state_dict(json.loads(json.dumps(here.state_dict())))
    assert [batch_difference(a, b) for a, b in zip(there.epoch(), found[3:], strict=True)] == [None] * 4


def test_only_the_bytes_of_the_columns_travel(remote, monkeypatch) -> None:
    """One range for each run of columns that touch, to the byte: no cache reads ahead."""
    ranges = []
    original = RemotePath.open

    class Watched:
        def __init__(self, file):
            self.file, self.seek = file, file.seek

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def read(self, count):
            ranges.append(count)
            return self.file.read(count)

    loader = build_loader(URL, split="train", config=dataclasses.replace(CONFIG, features=("id.item",), prefetch=0))
    monkeypatch.setattr(RemotePath, "open", lambda path, mode="rb": Watched(original(path, mode)))
    list(loader.epoch())
    groups = sum(len(footer.group_rows) for footer in loader._shards.footers)
    wanted = 0
    for footer in loader._shards.footers:
        for group in range(len(footer.group_rows)):
            keep = ("sample_id", "user_id", "timestamp", "label.click", "label.like", "weight.like", "id.item")
            wanted += sum(c.stop - c.start for c in chunks_of(footer.metadata, group) if c.column in keep)
    assert sum(ranges) == wanted
    assert len(ranges) == 2 * groups  # id.user lies between


def test_streams_checks_and_descriptions(local, remote) -> None:
    assert read_schema(URL) == read_schema(local)
    there, here = inspect_dataset(URL, check=True), inspect_dataset(local, check=True)
    assert there == here
    report = verify_dataset(URL)
    assert (report.ok, report.rows, report.warnings) == (True, {"train": 100, "eval": 30}, ())
    loaders = [StreamingLoader(place, seconds=300, config=CONFIG) for place in (URL, local)]
    assert loaders[0].windows == loaders[1].windows
    pairs = zip(*(loader.epoch() for loader in loaders), strict=True)
    assert [batch_difference(a, b) for a, b in pairs] == [None] * 3


def test_damage_is_found_before_decoding(remote) -> None:
    path = "/bucket/log/train-00001.parquet"
    sound = remote.cat_file(path)
    for place in range(50, len(sound), 997):
        spoilt = bytearray(sound)
        spoilt[place] ^= 16
        remote.pipe_file(path, bytes(spoilt))
        with pytest.raises(DataError, match=r"train-00001\.parquet"):
            batches(URL)
        assert not verify_dataset(URL).ok
    remote.pipe_file(path, sound)
    loader = build_loader(URL, split="train", config=dataclasses.replace(CONFIG, prefetch=0))
    remote.pipe_file(path, sound[:-1])
    with pytest.raises(DataError, match=r"bytes as at start"):
        list(loader.epoch())
    remote.rm_file(path)
    with pytest.raises(DataError, match=r"train-00001\.parquet: expected the file memory://.*no such file"):
        batches(URL)


def test_files_without_hashes_are_refused_at_a_url(local, remote) -> None:
    """From a disk a process of its own decodes them; it reads no URLs, and nothing is decoded here uncompared."""
    schema = read_schema(local)
    bare = dataclasses.replace(schema, files=tuple(dataclasses.replace(f, blocks_xxh3=()) for f in schema.files))
    remote.pipe_file("/bucket/log/schema.json", json.dumps(schema_to_dict(bare)).encode())
    with pytest.raises(DataError, match=r"train-00000\.parquet: expected hashes .*came none\. Copy the data set"):
        build_loader(URL, split="train", config=CONFIG)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://me:sesame@store/log",
        "simplecache::https://me:sesame@store/log",
        "zip://log/x::blockcache::ftp://me:sesame@store/a.zip",
        "https://me:open/sesame@store/log",
        "https://me:ses@me/sesame@store/log",
        "https://me@mine:sesame@store/log",
        "https://me:open::sesame@store/log",
        "https://me:[sesame]@store/log",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url) -> None:
    for asked in (data_path, read_schema, lambda place: write_dataset(place, tiny_schema(), {})):
        with pytest.raises(ValueError, match=r"data at .*://: the URL has a password in it") as caught:
            asked(url)
        assert "ses" not in str(caught.value)


def test_urls_without_a_password_are_read() -> None:
    for url in ("memory://store/log", "memory://store/log@3:4", "simplecache::memory://me@store/x@2"):
        assert data_path(url) is not None
    with pytest.raises(ValueError, match="nosuch://b/x@y: fsspec cannot read it"):
        data_path("zip://inner::nosuch://b/x@y")


def test_what_is_missing_is_said(remote, local, monkeypatch) -> None:
    with pytest.raises(DataError, match=r"memory://.*nowhere/schema\.json: no such file"):
        read_schema("memory://nowhere")
    with pytest.raises(ValueError, match=r"nosuch://x/y: fsspec cannot read it: Protocol not known: nosuch"):
        data_path("nosuch://x/y")
    with pytest.raises(ValueError, match="write_dataset: expected a directory of this machine"):
        write_dataset("memory://new", read_schema(local), {})
    with pytest.raises(ValueError, match="impl 'reference': expected a directory of this machine"):
        build_loader(URL, split="train", config=CONFIG, impl="reference")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError, match="through fsspec, which is not installed: pip install fsspec"):
        data_path(URL)
    assert len(batches(local)) == 7  # a directory does not need it


class Failing:
    """A file of which some reads fail: each call takes the next of `faults`, an exception or None."""

    def __init__(self, file, faults: list) -> None:
        self.file, self.seek, self.close, self.faults = file, file.seek, file.close, faults

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, count: int) -> bytes:
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        data = self.file.read(count)
        return data[:-1] if fault == "short" else data


class HttpError(Exception):
    """As libraries of stores have it: no OSError."""


@pytest.fixture
def waits(monkeypatch):
    """How long is waited, without waiting."""
    waited: list = []
    monkeypatch.setattr(remote_module.time, "sleep", waited.append)
    return waited


def with_faults(monkeypatch, remote, faults: list) -> None:
    original = type(remote).open
    monkeypatch.setattr(
        type(remote), "open", lambda self, *given, **named: Failing(original(self, *given, **named), faults)
    )


@pytest.mark.parametrize(
    "fault", [TimeoutError("read timed out"), HttpError("503"), OSError("connection reset"), "short"]
)
def test_a_read_that_fails_is_tried_again(local, remote, monkeypatch, waits, fault) -> None:
    loader = build_loader(URL, split="train", config=CONFIG, on_damage=lambda *heard: pytest.fail(str(heard)))
    with_faults(monkeypatch, remote, [None, fault, fault, None, fault])
    pairs = zip(loader.epoch(), batches(local), strict=True)
    assert [batch_difference(there, here) for there, here in pairs] == [None] * 7
    assert waits == [0.5, 2.0, 0.5]


@pytest.mark.parametrize("fault", [TimeoutError("read timed out"), HttpError("503"), "short"])
def test_what_cannot_be_read_is_no_damage(remote, monkeypatch, waits, fault) -> None:
    """It is never left out of training, and the place is told."""
    config = dataclasses.replace(CONFIG, prefetch=0)
    loader = build_loader(URL, split="train", config=config, on_damage=lambda *heard: pytest.fail(str(heard)))
    with_faults(monkeypatch, remote, [fault] * 99)
    with pytest.raises(
        ReadError, match=r"train-0000\d\.parquet, row group \d+: cannot be read from memory://.*4 attem"
    ) as caught:
        list(loader.epoch())
    assert not isinstance(caught.value, DataError)
    assert str(caught.value).startswith(f"{caught.value.file}, row group {caught.value.row_group}: ")
    assert waits == [0.5, 2.0, 5.0]
    with pytest.raises(ReadError, match=r"train-00000\.parquet: cannot be read"):
        Shards(URL, read_schema_of(remote, monkeypatch), "train")


def read_schema_of(remote, monkeypatch):
    with monkeypatch.context() as sound:
        sound.setattr(type(remote), "open", fsspec.implementations.memory.MemoryFileSystem._open)
        return read_schema(URL)


def test_sizes_that_cannot_be_had_are_no_damage(remote, monkeypatch, waits) -> None:
    loader = build_loader(URL, split="train", config=dataclasses.replace(CONFIG, prefetch=0))
    original, faults = type(remote).info, [HttpError("429")]

    def info(self, path, **named):
        if faults:
            raise faults.pop()
        return original(self, path, **named)

    monkeypatch.setattr(type(remote), "info", info)
    assert len(list(loader.epoch())) == 7
    assert waits == [0.5]
    faults += [HttpError("429")] * 4
    with pytest.raises(ReadError, match=r"row group \d+: cannot be read from .*HttpError: 429 \(4 attempts, 0 s\)"):
        list(loader.epoch())
    faults += [HttpError("429")]
    assert (data_path(URL) / "schema.json").is_file()  # a store that is busy is no store without the file
    assert not (data_path(URL) / "other.json").is_file()
    faults += [HttpError("429")] * 4
    with pytest.raises(ReadError, match="429"):
        (data_path(URL) / "schema.json").is_file()
    faults += [PermissionError("no key")]
    waits.clear()
    with pytest.raises(ReadError, match="PermissionError: no key"):  # which no attempt will change
        (data_path(URL) / "schema.json").stat()
    assert waits == []


@pytest.mark.parametrize(
    ("took_s", "begun_at"),
    [(0.0, [0.0, 0.5, 2.5, 7.5]), (2.0, [0.0, 2.5, 6.5, 13.5]), (4.0, [0.0, 4.5, 10.5]), (60.0, [0.0])],
)
def test_no_attempt_begins_later_than_15_s_after_the_first(monkeypatch, took_s, begun_at) -> None:
    """Libraries of stores try for minutes themselves; four times that would outlive a job's watchdog."""
    now, begun = [0.0], []
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=lambda wait: now.__setitem__(0, now[0] + wait))
    monkeypatch.setattr(remote_module, "time", clock)

    def action() -> None:
        begun.append(now[0])
        now[0] += took_s
        raise TimeoutError("no answer")

    count = f"{len(begun_at)} attempt{'s' if len(begun_at) > 1 else ''}"
    with pytest.raises(ReadError, match=rf"here: TimeoutError: no answer \({count}, \d+ s\)"):
        remote_module._patiently("here", action)
    assert begun == begun_at


@pytest.mark.parametrize("hashed", [True, False])
def test_a_disk_that_fails_is_no_damage(local, monkeypatch, hashed) -> None:
    """EIO and the like of a local or mounted file system, read here or by the other process."""
    if not hashed:
        schema = read_schema(local)
        bare = tuple(dataclasses.replace(f, blocks_xxh3=()) for f in schema.files)
        (local / "schema.json").write_text(json.dumps(schema_to_dict(dataclasses.replace(schema, files=bare))))
    config = dataclasses.replace(CONFIG, prefetch=0)
    heard: list = []
    loader = build_loader(local, split="train", config=config, on_damage=lambda *found: heard.append(found))
    failed = OSError(errno.EIO, "Input/output error")
    if hashed:
        monkeypatch.setattr(shards, "Block", lambda *_, **__: (_ for _ in ()).throw(failed))
    else:
        monkeypatch.setattr(isolated.json, "loads", lambda line: {"error": "x", "kind": "OSError", "errno": errno.EIO})
    with pytest.raises(ReadError, match=r"train-0000\d\.parquet, row group \d+: cannot be read from .*\[Errno 5\]"):
        list(loader.epoch())
    assert not heard


@pytest.mark.parametrize("first", ["hangs", "crashes"])
def test_a_disk_that_hangs_is_no_damage(local, monkeypatch, first) -> None:
    """The other process does not answer: also where it crashed first, and columns are asked for one by one."""
    schema = read_schema(local)
    bare = tuple(dataclasses.replace(f, blocks_xxh3=()) for f in schema.files)
    (local / "schema.json").write_text(json.dumps(schema_to_dict(dataclasses.replace(schema, files=bare))))
    reader, heard, asked = isolated.ReaderProcess(), [], []
    config = dataclasses.replace(CONFIG, prefetch=0)
    split = Shards(local, read_schema(local), "train", reader=reader)
    loader = ArrowLoader(
        local, split="train", config=config, on_damage=lambda *found: heard.append(found), shards=split
    )
    ask, reader._limit_s = reader._line, 0.2

    def stopped(process):
        asked.append(process.pid)
        if first == "crashes" and len(asked) == 1:
            os.kill(process.pid, signal.SIGKILL)
        elif len(asked) <= 2:
            os.kill(process.pid, signal.SIGSTOP)
        return ask(process)

    monkeypatch.setattr(reader, "_line", stopped)
    try:
        with pytest.raises(ReadError, match=r"train-0000\d\.parquet, row group \d+: .* no answer within 0\.2 s"):
            list(loader.epoch())
    finally:
        reader.close()
    assert not heard


def test_the_other_process_tells_what_it_could_not_read(tmp_path) -> None:
    """The number of the error, which damage has not."""
    from gem_data import reader_process

    assert reader_process.failure(PermissionError(errno.EACCES, "Permission denied"))["errno"] == errno.EACCES
    (tmp_path / "x").write_bytes(b"no parquet at all")
    reader = isolated.ReaderProcess()
    try:
        with pytest.raises(ValueError, match="ArrowInvalid"):
            reader.footer(tmp_path / "x")
        with pytest.raises(FileNotFoundError):
            reader.footer(tmp_path / "y")
    finally:
        reader.close()


def test_verify_lists_what_it_cannot_read(remote, monkeypatch, waits) -> None:
    original = RemotePath.open

    def closed(path, mode="rb"):
        if str(path).endswith("train-00001.parquet"):
            raise ReadError(f"{path}: HttpError: 403")
        return original(path, mode)

    monkeypatch.setattr(RemotePath, "open", closed)
    report = verify_dataset(URL)
    assert [problem.file for problem in report.problems] == ["train-00001.parquet"]
    assert "train-00001.parquet: cannot be read from memory://" in str(report.problems[0])
    left = len(read_schema(URL).files) - 2
    assert f"The rest of the file, and {left} other files, were not looked at." in str(report.problems[0])
    assert not report.ok
    assert 0 < report.rows["train"] < 100
    assert waits == []


def test_verify_waits_once_for_a_store_that_does_not_answer(remote, monkeypatch, waits) -> None:
    """Not once more at every file."""
    schema = read_schema(URL)
    with_faults(monkeypatch, remote, [TimeoutError("no answer")] * 99)
    monkeypatch.setattr(verify_module, "read_schema", lambda _: schema)
    report = verify_dataset(URL)
    assert waits == [0.5, 2.0, 5.0]
    assert len(report.problems) == 1
    assert f"{len(schema.files) - 1} other files, were not looked at" in str(report)


class StoreFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        StoreFile.fetched.append(end - start)
        return fsspec.filesystem("memory").cat_file(self.path)[start:end]


class Store(AbstractFileSystem):
    """The files of memory:// by ranges, as a store has them."""

    protocol = "rangestore"

    def ls(self, path, detail=True, **_):
        return fsspec.filesystem("memory").ls(path, detail)

    def info(self, path, **_):
        return {**fsspec.filesystem("memory").info(path), "name": path}

    def _open(self, path, mode="rb", **named):
        return StoreFile(self, path, mode, **{**named, "size": self.info(path)["size"], "block_size": 4096})


def test_a_cache_of_blocks_may_stand_between_a_store_and_us(local, remote, tmp_path, monkeypatch) -> None:
    fsspec.register_implementation("rangestore", Store, clobber=True)
    monkeypatch.setitem(fsspec.config.conf, "blockcache", {"cache_storage": str(tmp_path / "cache")})
    StoreFile.fetched = []
    for again in (False, True):
        pairs = zip(batches("blockcache::rangestore:///bucket/log"), batches(local), strict=True)
        assert [batch_difference(there, here) for there, here in pairs] == [None] * 7
        assert bool(StoreFile.fetched) is not again
        StoreFile.fetched.clear()


def test_a_cache_of_blocks_may_stand_between(local, tmp_path) -> None:
    fsspec.config.conf["blockcache"] = {"cache_storage": str(tmp_path / "cache")}
    try:
        for url in (f"blockcache::file://{local}", f"simplecache::file://{local}", f"file://{local}"):
            pairs = zip(batches(url), batches(local), strict=True)
            assert [batch_difference(there, here) for there, here in pairs] == [None] * 7
    finally:
        del fsspec.config.conf["blockcache"]
