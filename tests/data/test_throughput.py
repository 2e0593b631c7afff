"""The measuring tool reads what it says, on a data set whose histories are right by construction."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from gem_data.api import verify_dataset
from gem_data.interface import LoaderConfig
from gem_data.throughput import measure, write_generated


def test_it_counts_rows_and_events(tmp_path: Path) -> None:
    write_generated(tmp_path / "d", rows=600)
    report = verify_dataset(tmp_path / "d")
    assert report.ok, str(report)
    table = pq.read_table(tmp_path / "d" / "train-00000.parquet")
    # A history is the user's own last 200 items before the row.
    users, items = table.column("user_id").to_pylist(), table.column("id.item").to_pylist()
    for row in (0, 100, 599):
        wanted = [items[r] for r in range(row) if users[r] == users[row]][-200:]
        assert table.column("stream.ratings.item")[row].as_py() == wanted
    found = measure(tmp_path / "d", split="train", config=LoaderConfig(global_batch_size=64, prefetch=0), repeats=1)
    assert found["samples"] == 600
    assert found["events"] == sum(len(times) for times in table.column("stream.ratings.time").to_pylist())
    assert found["samples_per_s"] * found["loader_s"] == pytest.approx(600)
    stages = ("hash", "decode", "columns", "checks", "views", "batches")
    assert all(found[f"{stage}_s"] > 0 for stage in stages), found
    assert found["share_of_bound"] == found["pyarrow_s"] / found["loader_s"]
