"""Data at a URL, through fsspec: the same batches, bytes, states and refusals as from a disk."""

from __future__ import annotations

import dataclasses
import json
import sys

import fsspec
import pytest
from gem_data.api import build_loader, data_path, inspect_dataset, read_schema, verify_dataset, write_dataset
from gem_data.blocks import chunks_of
from gem_data.interface import DataError, LoaderConfig
from gem_data.remote import RemotePath
from gem_data.schema import schema_to_dict
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
