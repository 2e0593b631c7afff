"""The measuring tool reads what it says, on a data set whose histories are right by construction."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gem_data.api import build_loader, read_schema, verify_dataset
from gem_data.interface import LoaderConfig
from gem_data.shards import Shards
from gem_data.throughput import decode_all, measure, write_generated


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


def test_the_bound_decodes_what_the_loader_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row group once, the same columns of it, on one thread."""
    write_generated(tmp_path / "d", rows=600, rows_per_group=250)
    asked: list[tuple[int, tuple[str, ...], bool]] = []
    read = pq.ParquetFile.read_row_group

    def noted(self: pq.ParquetFile, group: int, *, columns: list[str], use_threads: bool) -> pa.Table:
        asked.append((group, tuple(sorted(columns)), use_threads))
        return read(self, group, columns=columns, use_threads=use_threads)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    decode_all(Shards(tmp_path / "d", read_schema(tmp_path / "d"), "train"))
    bound, asked[:] = sorted(asked), []
    loader = build_loader(tmp_path / "d", split="train", config=LoaderConfig(global_batch_size=64, prefetch=0))
    assert sum(len(batch.sample_ids) for batch in loader.epoch()) == 600
    assert [entry[0] for entry in bound] == [0, 1, 2]
    assert sorted(asked) == bound
    assert not any(threads for _, _, threads in bound)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40,000 rows, 6.2 million events."""
    directory = tmp_path_factory.mktemp("data") / "generated"
    write_generated(directory, rows=40_000)
    return directory


@pytest.mark.slow
def test_it_is_ten_times_as_fast_as_a_dataloader_over_python_lists(generated: Path) -> None:
    """Processor seconds of one run; packages/data/README.md has 14.6 times."""
    found = measure(
        generated,
        split="train",
        config=LoaderConfig(global_batch_size=256, prefetch=0),
        repeats=3,
        baselines=("lists",),
    )
    assert found["times_dataloader_lists"] >= 10, found


@pytest.mark.slow
def test_large_batches_reach_a_share_of_what_pyarrow_alone_decodes(generated: Path) -> None:
    """Processor seconds of the same run, hashes and checks of every value included: at least 0.4 of the bound."""
    config = LoaderConfig(global_batch_size=2048, prefetch=0)
    found = measure(generated, split="train", config=config, repeats=5)
    assert found["share_of_bound"] >= 0.4, found
