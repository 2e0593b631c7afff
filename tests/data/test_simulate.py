"""The measured imbalance: of the rows that the loaders of all ranks make, by hand from the files."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
from gem_data import loader, simulate_loader
from gem_data.api import build_loader, partition, read_schema
from gem_data.interface import LoaderConfig
from gem_data.shards import Shards

RANKS, ROWS, STEPS = 4, 32, 17
GROUPS = 2  # a rank: 550 rows hold 17 steps


@pytest.fixture
def shards(tmp_path):
    simulate_loader.write_long_tailed(tmp_path / "d", rows=RANKS * GROUPS * simulate_loader.GROUP_ROWS)
    return Shards(tmp_path / "d", read_schema(tmp_path / "d"), "train")


def by_hand(shards) -> np.ndarray:
    """(ranks, steps, rows) loads of an unbalanced epoch: 64 tokens and 64^2 pairs for each event that is written."""
    table = pq.read_table(shards.directory / "train-00000.parquet")
    tokens = 64 * np.array([len(events) for events in table.column("stream.views.item").to_pylist()])
    assert (tokens.min(), tokens.max()) == (64, 4096)
    assert 700 < np.median(tokens) < 840
    loads = 7.86e6 * tokens + 3584.0 * tokens.astype(float) ** 2
    config = LoaderConfig(global_batch_size=RANKS * ROWS, logical_shards=RANKS, drop_last=True, prefetch=0)
    found = []
    for rank in range(RANKS):
        opened = build_loader(shards.directory, split="train", config=config, rank=rank, world_size=RANKS)
        found.append([loads[batch.sample_ids.numpy()] for batch in opened.epoch()][:STEPS])
        opened.close()
    return np.array(found)


def uneven(sums: np.ndarray) -> float:
    """Mean over the first axis of max over mean along the second."""
    return float((sums.max(axis=1) / sums.mean(axis=1)).mean())


def test_what_is_measured_is_what_the_loaders_make(shards, monkeypatch) -> None:
    wanted = by_hand(shards)
    monkeypatch.setattr(simulate_loader, "Shards", lambda *_: shards)
    (found,) = simulate_loader.measure(ranks=RANKS, rows=(ROWS,), steps=STEPS)
    assert found.before == pytest.approx(uneven(wanted.sum(axis=2).T), rel=1e-12)
    divided = [
        [step.reshape(-1)[part].sum() for part in partition(step.reshape(-1), RANKS)]
        for step in wanted.transpose(1, 0, 2)
    ]
    assert found.across_ranks == pytest.approx(uneven(np.array(divided)), rel=1e-12)
    assert found.across_ranks < 1.005
    assert max(found.default_window, found.large_window) - 1 < (found.before - 1) / 2
    monkeypatch.setattr(loader, "base_batch_order", lambda loads, **_: np.arange(len(loads)))
    (still,) = simulate_loader.measure(ranks=RANKS, rows=(ROWS,), steps=STEPS)
    assert still.default_window == still.before
