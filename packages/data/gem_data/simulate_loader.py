"""Measures how uneven ranks are with what training runs: files, the loader of every rank, and the division of rows.

    python -m gem_data.simulate --loader [--steps 64]

The lengths are those of simulate.py, written as a data set in which an event stands for 64 (1 to 64 events, and a load
that counts each as 64), so that 64 ranks of 256 samples fit on a disk. Row groups have 275 rows, as many as 8 MiB hold
of rows with all their events. The loader of every rank reads it, one after the other in one process, with one logical
shard a rank, and loads are those of the batches that it makes:

    before        without balance
    across ranks  `partition` of each global batch by the loads of all ranks, as the job's balancer divides it
    base batches  by the loader, in windows of the default number of row groups, and of LARGE_WINDOW

Batches are made and dropped; nothing is sent. Cost: 64 ranks of 64 steps read 1,056,000 rows, some of them six times.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from gem_data.balance import Float64, imbalance, partition
from gem_data.cost import row_costs
from gem_data.interface import CostModel, CostTerm, IdFeature, LabelInfo, LoaderConfig, Schema, StreamInfo, TableInfo
from gem_data.loader import ArrowLoader
from gem_data.schema import read_schema
from gem_data.shards import Shards
from gem_data.writing import write_dataset

SCALE = 64
GROUP_ROWS = 275
LARGE_WINDOW = 60
STREAM = "views"
COST = CostModel(
    unit="flops",
    terms=(
        CostTerm(stream=STREAM, coefficient=7.86e6 * SCALE),
        CostTerm(stream=STREAM, coefficient=3584.0 * SCALE**2, pairs=True, causal=False),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Mean over `steps` of max over mean. default_window, large_window: with base batches of `base_batch` rows."""

    ranks: int
    rows: int
    steps: int
    before: float
    across_ranks: float
    base_batch: int
    default_window: float
    large_window: float


def write_long_tailed(directory: str | Path, *, rows: int, seed: int = 0) -> None:
    """A data set of `rows` rows with one stream, whose lengths are exp(normal) around 12, cut to 1 to 64."""
    schema = Schema(
        name="long-tailed",
        created_by="gem_data.simulate",
        tables=(TableInfo(name="item", rows=2),),
        labels=(LabelInfo(name="click"),),
        streams=(
            StreamInfo(name=STREAM, fields=(IdFeature(name="item", table="item"),), action_bits=1, max_length=SCALE),
        ),
    )
    drawn = np.exp(np.random.default_rng(seed).standard_normal(rows))
    lengths = np.clip(np.round(768 / SCALE * drawn), 1, SCALE).astype(np.int64)
    bounds = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    events = pa.array(np.zeros(int(lengths.sum()), np.int64))
    lists = pa.ListArray.from_arrays(bounds, events)
    columns = {
        "sample_id": np.arange(rows),
        "user_id": np.zeros(rows, np.int64),
        "timestamp": np.ones(rows, np.int64),
        "label.click": np.zeros(rows, np.float32),
        **{f"stream.{STREAM}.{name}": lists for name in ("item", "action", "time")},
    }
    write_dataset(directory, schema, {"train": pa.table(columns)}, rows_per_group=GROUP_ROWS)


def measure(*, ranks: int, rows: tuple[int, ...], steps: int) -> list[Measured]:
    """For each of `rows` samples a rank and step, from the same files."""
    groups = -(-steps * max(rows) // GROUP_ROWS)
    with tempfile.TemporaryDirectory() as directory:
        write_long_tailed(directory, rows=ranks * groups * GROUP_ROWS)
        shards = Shards(directory, read_schema(directory), "train")
        return [_measure(shards, ranks=ranks, rows=count, steps=steps) for count in rows]


def _measure(shards: Shards, *, ranks: int, rows: int, steps: int) -> Measured:
    base = 128 if rows >= 256 else 8
    plain = loads_of_ranks(shards, ranks=ranks, rows=rows, steps=steps)
    together = plain.transpose(1, 0, 2).reshape(steps, ranks * rows)
    divided = [imbalance([loads[part].sum() for part in partition(loads, ranks)]) for loads in together]
    default, large = (
        loads_of_ranks(shards, ranks=ranks, rows=rows, steps=steps, base_batch=base, window_groups=window)
        for window in (LoaderConfig.window_groups, LARGE_WINDOW)
    )
    return Measured(
        ranks=ranks,
        rows=rows,
        steps=steps,
        before=mean_imbalance(plain),
        across_ranks=float(np.mean(divided)),
        base_batch=base,
        default_window=mean_imbalance(default),
        large_window=mean_imbalance(large),
    )


def loads_of_ranks(
    shards: Shards,
    *,
    ranks: int,
    rows: int,
    steps: int,
    base_batch: int | None = None,
    window_groups: int = LoaderConfig.window_groups,
) -> Float64:
    """(ranks, steps, rows) loads of the rows of the first batches, as the loader of each rank makes them."""
    config = LoaderConfig(
        global_batch_size=rows * ranks,
        logical_shards=ranks,
        window_groups=window_groups,
        drop_last=True,
        prefetch=0,
        base_batch=base_batch,
        cost=None if base_batch is None else COST,
    )
    loads = np.empty((ranks, steps, rows))
    for rank in range(ranks):
        loader = ArrowLoader(shards.directory, split="train", config=config, rank=rank, world_size=ranks, shards=shards)
        for step, batch in enumerate(islice(loader.epoch(), steps)):
            lengths = batch.streams[STREAM].offsets.diff().numpy()
            loads[rank, step] = row_costs(COST, {STREAM: lengths}, len(lengths))
        loader.close()
    return loads


def mean_imbalance(loads_RSN: Float64) -> float:
    """Mean over steps of max over mean of the ranks' loads."""
    return float(np.mean([imbalance(step) for step in loads_RSN.sum(axis=2).T]))
