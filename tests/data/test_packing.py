"""One buffer: the same batch, one transfer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gem_data.api import batch_from_table, build_loader
from gem_data.baseline import baseline_epoch
from gem_data.interface import LoaderConfig
from gem_data.packing import move_batch, pack_batch
from gem_data.testing import batch_difference, tiny_schema, tiny_table, write_tiny


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_packed_batch_is_the_batch_in_one_storage(rows: int) -> None:
    schema = tiny_schema()
    batch = batch_from_table(schema, tiny_table(rows=max(rows, 1), seed=rows).slice(0, rows), step=3)
    packed = pack_batch(batch)
    moved = move_batch(packed, "cpu")
    for held in (packed, moved):
        assert batch_difference(held.batch, batch) is None
        assert held.batch.ids.length_per_key() == batch.ids.length_per_key()
        first, last = held.buffer.data_ptr(), held.buffer.data_ptr() + held.buffer.numel()
        tensors = [held.batch.labels, held.batch.dense, held.batch.ids.values(), held.batch.streams["buys"].times]
        assert all(first <= tensor.data_ptr() < last for tensor in tensors if tensor.numel())
    assert moved.buffer.data_ptr() != packed.buffer.data_ptr()
    if rows:
        moved.batch.labels.fill_(9.0)
        assert batch_difference(packed.batch, batch) is None


def test_pinned_memory_needs_cuda() -> None:
    batch = batch_from_table(tiny_schema(), tiny_table(rows=3, seed=0))
    if torch.cuda.is_available():
        assert pack_batch(batch, pin=True).batch.labels.is_pinned()
        return
    with pytest.raises(RuntimeError):
        pack_batch(batch, pin=True)


@pytest.mark.parametrize("kind", ["lists", "slices"])
def test_the_yardstick_reads_the_same_rows(tmp_path, kind: str) -> None:
    """Or its speed would say nothing."""
    write_tiny(tmp_path / "d", train_rows=50)
    ours = {}
    for batch in build_loader(tmp_path / "d", split="train", config=LoaderConfig(global_batch_size=8)).epoch():
        ends = batch.streams["views"].offsets.tolist()
        for row, sample in enumerate(batch.sample_ids.tolist()):
            times = batch.streams["views"].times[ends[row] : ends[row + 1]].tolist()
            ours[sample] = (batch.labels[row].tolist(), times, int(batch.ids["item"].values()[row]))
    theirs = {}
    for found in baseline_epoch(tmp_path / "d", split="train", batch_size=8, kind=kind):
        times, lengths = found["stream.views.time"]
        ends = np.cumsum([0, *lengths.tolist()])
        for row, sample in enumerate(found["sample_id"].tolist()):
            labels = [float(found[f"label.{name}"][row]) for name in ("click", "like")]
            theirs[sample] = (
                labels,
                times[ends[row] : ends[row + 1]].tolist(),
                int(found["ids"]["item"].values()[row]),
            )
    assert theirs == ours
    with pytest.raises(ValueError, match="expected one of"):
        next(baseline_epoch(tmp_path / "d", split="train", batch_size=8, kind="fast"))


@pytest.mark.slow
def test_memory_is_flat_over_100000_batches(tmp_path) -> None:
    """Resident memory after 100,000 batches is that after 5,000, but for a few MiB."""
    import gc
    import os

    def resident() -> float:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    write_tiny(tmp_path / "d", train_rows=2000, rows_per_file=500, rows_per_group=250)
    loader = build_loader(tmp_path / "d", split="train", config=LoaderConfig(global_batch_size=8, base_batch=2))
    count, early = 0, 0.0
    while count < 100_000:
        for batch in loader.epoch():
            loader.mark_trained(batch)
            count += 1
            if count == 5_000:
                early = resident()
    assert loader.state_dict()["step"] == count
    assert resident() - early < 8.0, f"{early:.1f} MiB after 5,000 batches, {resident():.1f} after {count}"
