"""What comes back from the process that decodes files without hashes, however the kernel cuts it."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gem_data import isolated


@pytest.fixture
def reader():
    found = isolated.ReaderProcess()
    yield found
    found.close()


def test_an_answer_may_come_in_pieces(reader, tmp_path, monkeypatch) -> None:
    """One call of the kernel gives at most 2,147,479,552 bytes; here 1,000."""
    table = pa.table({"timestamp": list(range(5000))})
    pq.write_table(table, tmp_path / "a.parquet")
    pread, preadv, calls = os.pread, os.preadv, []

    def some(memory, buffers, offset):
        calls.append(offset)
        return preadv(memory, [buffers[0][:1000]], offset)

    monkeypatch.setattr(os, "pread", lambda memory, count, offset: pread(memory, min(count, 1000), offset))
    monkeypatch.setattr(os, "preadv", some)
    assert reader.group(tmp_path / "a.parquet", 0, ["timestamp"]).equals(table)
    assert calls[:3] == [0, 1000, 2000]
    assert reader.footer(tmp_path / "a.parquet").seconds == ((0, 4999),)


def test_an_answer_that_ends_early_is_refused(reader, tmp_path, monkeypatch) -> None:
    pq.write_table(pa.table({"timestamp": [1, 2]}), tmp_path / "a.parquet")
    monkeypatch.setattr(os, "preadv", lambda memory, buffers, offset: 0)
    with pytest.raises(ValueError, match=r"0 of [0-9]+ bytes came from the reading process"):
        reader.group(tmp_path / "a.parquet", 0, ["timestamp"])
    monkeypatch.undo()
    monkeypatch.setattr(isolated.json, "loads", lambda line: {"bytes": 1 << 40})
    with pytest.raises(ValueError, match="says 1099511627776 bytes, and wrote"):
        reader.group(tmp_path / "a.parquet", 0, ["timestamp"])
