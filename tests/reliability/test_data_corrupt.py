"""D2: whatever happens to a Parquet file, no row is silently wrong, nothing crashes or hangs, and the error says where.

Each mutant is read in a forked child with a memory limit, by the loader as a job builds it. The child reports the
error, or a digest of every batch it got; the digest must be that of the sound data set.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from gem_data import shards
from gem_data.api import build_loader, read_schema, write_dataset
from gem_data.damage import refresh_block_hashes
from gem_data.interface import Batch, DataError, LoaderConfig
from gem_data.isolated import ReaderDiedError, ReaderProcess
from gem_data.remote import ReadError
from gem_data.testing import tiny_schema, tiny_table
from mutants import BYTES, REWRITTEN

FILE = "train-00000.parquet"
LIMIT_S = 10.0
GROWTH_BYTES = 400 << 20
CONFIG = LoaderConfig(global_batch_size=16, shuffle=False, prefetch=0)


def digest_of(batch: Batch) -> bytes:
    parts = [batch.sample_ids, batch.user_ids, batch.timestamps, batch.labels, batch.weights, batch.dense]
    parts += [batch.ids.values(), batch.ids.lengths()]
    for stream in batch.streams.values():
        parts += [stream.offsets, stream.actions, stream.times]
    return b"".join(part.numpy().tobytes() for part in parts)


def read_all(directory: Path, **arguments: Any) -> dict[str, Any]:
    """Digest and rows of everything, or the error with its place."""
    lost: list[int] = []
    if arguments.pop("quarantine", False):
        arguments["on_damage"] = lambda error, rows: lost.append(rows)
    try:
        loader = build_loader(directory, split="train", config=CONFIG, **arguments)
        hashed, rows = hashlib.sha256(), 0
        for batch in loader.epoch():
            hashed.update(digest_of(batch))
            rows += len(batch.sample_ids)
    except DataError as error:
        return {
            "error": str(error),
            "place": [error.file, error.row_group, error.row, error.column],
        }
    return {"digest": hashed.hexdigest(), "rows": rows, "lost": sum(lost)}


def in_child(directory: Path, **arguments: Any) -> dict[str, Any]:
    """`read_all` in a forked child: {"died": how} for a crash, {"hung": True} for more than LIMIT_S."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        limit = _address_space() + GROWTH_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            answer = read_all(directory, **arguments)
        except BaseException as error:
            answer = {"escaped": f"{type(error).__name__}: {error}"}
        os.write(write, json.dumps(answer).encode()[:60_000])
        os._exit(0)
    os.close(write)
    data, deadline = b"", time.monotonic() + LIMIT_S
    while True:
        if not select.select([read], [], [], max(0, deadline - time.monotonic()))[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            return {"hung": True}
        piece = os.read(read, 65536)
        if not piece:
            break
        data += piece
    os.close(read)
    status = os.waitpid(child, 0)[1]
    return json.loads(data) if os.WIFEXITED(status) and data else {"died": status}


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A sound data set of three row groups, most of whose bytes are pages, and the digest of its batches."""
    directory = tmp_path_factory.mktemp("sound") / "d"
    tables = {"train": tiny_table(rows=1_500, seed=3), "eval": tiny_table(rows=10, seed=4)}
    write_dataset(directory, tiny_schema(), tables, rows_per_group=500)
    return directory, read_all(directory)


@pytest.fixture
def one_reader(monkeypatch):
    """All forked children use one reading process, started here: a start costs more than reading a mutant.

    Call it before each fork: it starts another where a mutant crashed the last.
    """
    held = [ReaderProcess(limit_s=LIMIT_S / 2, memory_bytes=500 << 20)]
    monkeypatch.setattr(shards, "shared_reader", lambda: held[0])

    def ready() -> None:
        if held[0]._process is None or held[0]._process.poll() is not None:
            held[0].close()
            held[0] = ReaderProcess(limit_s=LIMIT_S / 2, memory_bytes=500 << 20)
            held[0]._start()

    yield ready
    held[0].close()


def without_hashes(directory: Path) -> None:
    """As another program would have written schema.json."""
    path = directory / "schema.json"
    content = json.loads(path.read_text())
    for entry in content["files"]:
        entry.pop("blocks_xxh3")
        entry.pop("xxh3")
    path.write_text(json.dumps(content))


def test_d2_our_files(sound, tmp_path, rng, count, counted, one_reader):
    """Files with hashes: a mutant is refused before a byte of it is decoded, unless what is read of it is as it was
    (a file written twice, one after the other, is the file)."""
    directory, wanted = sound
    outcomes: Counter[str] = Counter()
    named: Counter[str] = Counter()
    for number in range(count(fast=30, full_count=2_000)):
        target = tmp_path / "m"
        shutil.copytree(directory, target)
        mutant = rng.choice(BYTES + REWRITTEN)
        done = mutant(target / FILE, rng)
        one_reader()
        found = in_child(target)
        assert "error" in found or found == wanted, (number, done, found)
        if "error" in found:
            file, group, _, column = found["place"]
            assert file == FILE, (done, found)
            named["row group" if group is not None else "footer"] += 1
            named["column"] += column is not None
        outcomes["refused" if "error" in found else "unchanged"] += 1
        shutil.rmtree(target)
    counted("mutants of our files", dict(outcomes))
    counted("places named", dict(named))


def test_d2_files_of_other_programs(sound, tmp_path, rng, count, counted, one_reader):
    """No hashes, page checksums alone: another process decodes. A flipped bit in a page is always found; what no
    checksum covers must not crash, hang or escape, and bad rows are named."""
    directory, wanted = sound
    outcomes: Counter[str] = Counter()
    wrong = []
    shutil.copytree(directory, tmp_path / "sound")
    without_hashes(tmp_path / "sound")
    one_reader()
    assert in_child(tmp_path / "sound") == wanted
    for number in range(count(fast=12, full_count=2_000)):
        target = tmp_path / "m"
        shutil.copytree(directory, target)
        without_hashes(target)
        mutant = rng.choice(BYTES + REWRITTEN)
        done = mutant(target / FILE, rng)
        one_reader()
        found = in_child(target)
        assert "error" in found or "digest" in found, (number, done, found)
        if "error" in found:
            assert found["place"][0] == FILE, (done, found)
            outcomes["refused"] += 1
        elif found == wanted:
            outcomes["unchanged"] += 1
        else:
            wrong.append((mutant.__name__, done))
        shutil.rmtree(target)
    counted("mutants of files without hashes", dict(outcomes))
    counted("silently wrong", f"{len(wrong)} {wrong[:3]}")
    assert wrong == []


@pytest.mark.parametrize("mutant", REWRITTEN, ids=lambda mutant: mutant.__name__)
def test_bad_rows_well_written_are_named(sound, tmp_path, rng, mutant):
    """Hashes that fit the bad file, as from a writer of bad rows: file and column always, row where it is one row."""
    directory, _ = sound
    shutil.copytree(directory, tmp_path / "m")
    done = mutant(tmp_path / "m" / FILE, rng)
    refresh_block_hashes(tmp_path / "m" / FILE)
    found = read_all(tmp_path / "m")
    file, group, row, column = found["place"]
    assert file == FILE
    if "rows" not in done:
        assert column is not None
    if any(word in done for word in ("label", "null", "id outside")):
        assert group is not None
        assert row is not None


def test_a_flipped_bit_in_a_page_names_file_row_group_and_column(sound, tmp_path, rng):
    directory, _ = sound
    shutil.copytree(directory, tmp_path / "m")
    path = tmp_path / "m" / FILE
    metadata = pq.read_metadata(path)
    for group in range(metadata.num_row_groups):
        chunk = metadata.row_group(group).column(rng.randrange(metadata.num_columns))
        start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        data = bytearray(path.read_bytes())
        before = bytes(data)
        data[start + chunk.total_compressed_size - 1] ^= 1
        path.write_bytes(data)
        schema = read_schema(tmp_path / "m")
        assert schema.files[0].path == FILE
        found = read_all(tmp_path / "m")
        column = chunk.path_in_schema.removesuffix(".list.element")
        assert found["place"] == [FILE, group, None, column], found
        path.write_bytes(before)


def test_quarantine_leaves_out_the_damaged_group_and_counts_it(sound, tmp_path):
    directory, wanted = sound
    shutil.copytree(directory, tmp_path / "m")
    path = tmp_path / "m" / FILE
    metadata = pq.read_metadata(path)
    chunk = metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + 3] ^= 1
    path.write_bytes(data)
    lost = metadata.row_group(1).num_rows
    assert "error" in read_all(tmp_path / "m")
    found = read_all(tmp_path / "m", quarantine=True)
    assert (found["rows"], found["lost"]) == (wanted["rows"] - lost, lost)
    heard = []
    ranks = [
        build_loader(
            tmp_path / "m",
            split="train",
            config=LoaderConfig(global_batch_size=20, prefetch=2, seed=5),
            rank=rank,
            world_size=2,
            on_damage=lambda error, rows: heard.append((error.file, error.row_group, rows)),
        )
        for rank in range(2)
    ]
    ids, planned = [], 0
    for parts in zip(*(loader.epoch() for loader in ranks), strict=True):
        planned += parts[0].global_rows
        ids += [sample for part in parts for sample in part.sample_ids.tolist()]
    assert planned == wanted["rows"]
    assert (len(ids), len(set(ids))) == (wanted["rows"] - lost,) * 2
    assert set(heard) == {(FILE, 1, lost)}


def test_a_crash_a_hang_and_a_glutton_are_errors_here(sound, tmp_path, monkeypatch):
    """The reading process is killed, stopped, or refused memory: an error each time, and the next request works.

    A stopped one may wait for a disk: that is no damage, which a ValueError would be.
    """
    directory, _ = sound
    columns = ["sample_id", "id.item"]
    reader = ReaderProcess(limit_s=5.0)
    reader.group(directory / FILE, 0, columns)
    os.kill(reader._process.pid, signal.SIGSEGV)
    reader._process.wait()
    with pytest.raises(ReaderDiedError, match=r"died \(SIGSEGV\)"):
        reader.group(directory / FILE, 0, columns)
    assert reader.group(directory / FILE, 0, columns).column_names == columns
    reader._limit_s = 0.3
    os.kill(reader._process.pid, signal.SIGSTOP)
    with pytest.raises(ReadError, match=r"no answer within 0\.3 s"):
        reader.group(directory / FILE, 0, columns)
    reader._limit_s = 5.0
    assert reader.group(directory / FILE, 0, columns).num_rows > 0
    assert reader.started == 3
    reader.close()


def test_a_bomb_does_not_take_the_memory(tmp_path):
    """A file of a few KB that decodes to 512 MB: the reading process is refused the memory, here is an error."""
    import pyarrow as pa

    path = tmp_path / "bomb.parquet"
    with pq.ParquetWriter(path, pa.schema([("x", pa.int64())]), compression="zstd") as writer:
        big = pa.chunked_array([pa.array([7] * 1_000_000)] * 64)
        writer.write_table(pa.table({"x": big}), row_group_size=64_000_000)
    assert path.stat().st_size < 1 << 20
    reader = ReaderProcess(limit_s=30.0, memory_bytes=400 << 20)
    with pytest.raises(ValueError, match=r"MemoryError|died|malloc|memory"):
        reader.group(path, 0, ["x"])
    reader.close()
