"""Memory stays flat over many batches: of requests, and of streams across the edges of their windows.

Plain rows, 100,000 batches of them: test_packing.py.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from gem_data.api import build_loader, write_dataset
from gem_data.interface import LoaderConfig
from gem_data.streaming import StreamingLoader
from gem_data.testing import tiny_schema, tiny_table, write_tiny_requests


def resident_mib() -> float:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
def test_memory_is_flat_over_batches_of_requests(tmp_path: Path) -> None:
    """After 12,000 batches that after 3,000, but for a few MiB."""
    write_tiny_requests(tmp_path / "d", train_rows=2000, rows_per_file=500, rows_per_group=100)
    config = LoaderConfig(global_batch_size=8, base_batch=2, window_groups=4, readers=2)
    loader = build_loader(tmp_path / "d", split="train", config=config)
    count, early = 0, 0.0
    while count < 12_000:
        for batch in loader.epoch():
            loader.mark_trained(batch)
            count += 1
            if count == 3_000:
                early = resident_mib()
    assert loader.state_dict()["step"] == count
    late = resident_mib()
    print(f"requests: {early:.1f} MiB after 3,000 batches, {late:.1f} after {count:,}")
    assert late - early < 8.0, f"{early:.1f} MiB after 3,000 batches, {late:.1f} after {count}"


@pytest.mark.slow
def test_memory_is_flat_over_the_windows_of_a_stream(tmp_path: Path) -> None:
    """Three passes over a log of 40 windows, each trained and the next one evaluated; compared with the first pass."""
    schema = tiny_schema()
    write_dataset(tmp_path / "d", schema, {"train": tiny_table(rows=10_000, seed=0)}, rows_per_group=50)
    config = LoaderConfig(global_batch_size=5)
    count, early, windows = 0, 0.0, 0
    for turn in range(3):
        loader = StreamingLoader(tmp_path / "d", seconds=2400, config=config)
        windows = len(loader.windows)
        while True:
            later = loader.later(LoaderConfig(global_batch_size=50, shuffle=False))
            before = count
            for batch in loader.epoch():
                loader.mark_trained(batch)
                count += 1
            if count == before:
                break
            if later is not None:
                assert sum(len(batch.sample_ids) for batch in later.epoch()) > 0
        loader.close()
        if turn == 0:
            early = resident_mib()
    assert windows >= 40
    assert count == 3 * 2_000
    late = resident_mib()
    print(f"stream of {windows} windows: {early:.1f} MiB after {count // 3:,} batches, {late:.1f} after {count:,}")
    assert late - early < 8.0, f"{early:.1f} MiB after the first pass, {late:.1f} after {count} batches"
