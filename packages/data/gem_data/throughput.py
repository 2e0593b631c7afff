"""Measures reading: samples/s and events/s of the loader beside what pyarrow alone needs for the same columns.

    python -m gem_data.throughput DIRECTORY [--split train] [--batch 256] [--shards 1] [--in-order]
    python -m gem_data.throughput --rows 80000       (a generated data set of MovieLens-100K's shape, up to 200 events)

Pure pyarrow decoding of the same row groups and columns, without hashes or checks, is the bound: nothing that reads
these files through pyarrow can be faster. Both run in the same process, on one thread (the loader with prefetch=0),
alternating; the figures printed are medians over the repeats, in processor seconds. The budget says where the loader's
time goes: a pass that does the same work stage by stage, with the window in memory as the loader has it.

    hash     read the bytes of row groups and compare their hashes
    decode   pyarrow, into memory that a window keeps: slower than the bound, whose memory is reused at once
    columns  take Arrow's columns over, compare the offsets of parallel lists
    checks   every value
    views    where the events of every row lie (window.py)
    batches  copy the rows of every batch, make its tensors
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem_data.api import build_loader, write_dataset
from gem_data.baseline import KINDS, baseline_epoch
from gem_data.batching import Group, Plan
from gem_data.collate import take_batch
from gem_data.interface import IdFeature, LabelInfo, LoaderConfig, Schema, StreamInfo, TableInfo
from gem_data.rows import Rows, Where, decode
from gem_data.schema import columns, read_schema
from gem_data.shards import Shards, groups_of
from gem_data.validation import check_values
from gem_data.window import join, limits_of


def measure(
    directory: str | Path, *, split: str, config: LoaderConfig, repeats: int = 5, baselines: Collection[str] = ()
) -> dict[str, Any]:
    """Median seconds of one epoch, of pyarrow alone and of every stage, with rates; `config.prefetch` should be 0.

    {"samples", "events": stream events after cutting, "loader_s", "pyarrow_s", "samples_per_s", "events_per_s",
     "bound_samples_per_s", "share_of_bound": pyarrow_s / loader_s, "hash_s", "decode_s", ...: the budget}
    baselines: of baseline.KINDS; also "dataloader_<kind>_s" and "times_dataloader_<kind>", of torch's DataLoader.
    """
    shards = Shards(directory, read_schema(directory), split)
    samples = events = 0
    times: dict[str, list[float]] = {"loader_s": [], "pyarrow_s": []}
    for kind in baselines:
        for _ in range(min(repeats, 2)):
            started = time.process_time()
            rows = sum(
                len(b["sample_id"])
                for b in baseline_epoch(directory, split=split, batch_size=config.global_batch_size, kind=kind)
            )
            times.setdefault(f"dataloader_{kind}_s", []).append(time.process_time() - started)
            assert rows == sum(footer.info.rows for footer in shards.footers)
    for _ in range(repeats):
        times["pyarrow_s"].append(_seconds(lambda: decode_all(shards)))
        loader = build_loader(directory, split=split, config=config)
        started = time.process_time()
        samples = events = 0
        for batch in loader.epoch():
            samples += len(batch.sample_ids)
            events += sum(len(stream.times) for stream in batch.streams.values())
        times["loader_s"].append(time.process_time() - started)
        for stage, seconds in budget(shards, config).items():
            times.setdefault(f"{stage}_s", []).append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "samples": samples,
        "events": events,
        **medians,
        "samples_per_s": samples / medians["loader_s"],
        "events_per_s": events / medians["loader_s"],
        "bound_samples_per_s": samples / medians["pyarrow_s"],
        "share_of_bound": medians["pyarrow_s"] / medians["loader_s"],
        **{
            f"times_{name.removesuffix('_s')}": seconds / medians["loader_s"]
            for name, seconds in medians.items()
            if name.startswith("dataloader")
        },
    }


def decode_all(shards: Shards) -> None:
    """The bound: pyarrow decodes the split's columns, a row group at a time."""
    names = [column.name for column in columns(shards.schema)]
    for footer in shards.footers:
        with pq.ParquetFile(shards.directory / footer.info.path, pre_buffer=False) as file:  # faster here than with
            for group in range(len(footer.group_rows)):
                file.read_row_group(group, columns=names, use_threads=False)


def budget(shards: Shards, config: LoaderConfig) -> dict[str, float]:
    """Seconds of every stage of one epoch; see the top of the file. Needs files with hashes, on this machine."""
    schema, spent = shards.schema, dict.fromkeys(("hash", "decode", "columns", "checks", "views", "batches"), 0.0)
    plan = Plan([Group(file=f, group=g, rows=n) for f, g, n in groups_of(shards.footers)], config).epoch(0)
    share = max(1, config.global_batch_size // config.logical_shards)
    names, limits = [column.name for column in columns(schema)], limits_of(schema, config.max_length)
    for shard, groups in enumerate(plan.shards):
        for window, first in enumerate(range(0, len(groups), config.window_groups)):
            found: list[Rows] = []
            for group in groups[first : first + config.window_groups]:
                footer, where = shards.footer(group.file), Where(file="", row_group=group.group)
                begin = time.process_time()
                shards.sound_block(footer, group.group, names)
                hashed = time.process_time()
                table = shards.read_table(group.file, group.group)
                decoded = time.process_time()
                found.append(decode(schema, table, where, file_index=group.file))
                taken = time.process_time()
                check_values(schema, found[-1], where)
                spent["hash"] += hashed - begin
                spent["decode"] += decoded - hashed - (hashed - begin)
                spent["columns"] += taken - decoded
                spent["checks"] += time.process_time() - taken
            begin = time.process_time()
            joined = join(schema, found, [limits] * len(found))
            spent["views"] += time.process_time() - begin
            order = plan.window_order(shard, window)
            begin = time.process_time()
            for start in range(0, len(order), share):
                # Held until the next one is made, as whoever trains on it does.
                batch = take_batch(schema, [joined], [order[start : start + share]])
            del batch
            spent["batches"] += time.process_time() - begin
    return spent


def write_generated(directory: str | Path, *, rows: int, seed: int = 0, rows_per_group: int | None = None) -> Schema:
    """`rows` impressions of 943 users on 1,682 items, each with the user's last (up to 200) earlier events."""
    schema = Schema(
        name="generated",
        created_by="gem_data.throughput",
        tables=(TableInfo(name="user", rows=944), TableInfo(name="item", rows=1683), TableInfo(name="genre", rows=20)),
        labels=(LabelInfo(name="like"),),
        scalars=(IdFeature(name="user", table="user"), IdFeature(name="item", table="item")),
        lists=(IdFeature(name="genres", table="genre"),),
        streams=(
            StreamInfo(
                name="ratings",
                fields=(IdFeature(name="item", table="item"), IdFeature(name="genre", table="genre")),
                action_bits=5,
                max_length=200,
            ),
        ),
    )
    rng = np.random.default_rng(seed)
    users = np.minimum(rng.zipf(1.1, rows), 943)
    items = rng.integers(1, 1683, rows)
    order = np.argsort(users, kind="stable")
    first = np.searchsorted(users[order], users[order])
    begin = np.empty(rows, np.int64)
    begin[order] = np.arange(rows) - first  # events of the user before this row
    lengths = np.minimum(begin, 200)
    rank = np.empty(rows, np.int64)
    rank[order] = np.arange(rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    index = np.repeat(rank - lengths - offsets[:-1], lengths) + np.arange(offsets[-1])
    source = order[index]
    values = {
        "item": items[source],
        "genre": items[source] % 20,
        "action": 1 << (source % 5),
        "time": source,
    }
    table = {
        "sample_id": np.arange(rows),
        "user_id": users,
        "timestamp": np.arange(rows),
        "label.like": (rng.random(rows) < 0.55).astype(np.float32),
        "id.user": users,
        "id.item": items,
        "ids.genres": pa.ListArray.from_arrays(
            np.arange(0, 2 * rows + 1, 2).astype(np.int32), rng.integers(0, 20, 2 * rows)
        ),
    }
    for part, column in values.items():
        table[f"stream.ratings.{part}"] = pa.ListArray.from_arrays(offsets.astype(np.int32), column)
    return write_dataset(directory, schema, {"train": pa.table(table)}, rows_per_group=rows_per_group)


def _seconds(call: Callable[[], None]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", help="a data set; default: one is generated")
    parser.add_argument("--split", default="train")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--rows", type=int, default=80_000, help="rows to generate")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--in-order", action="store_true", help="as the files are, a row group at a time, not shuffled")
    parser.add_argument("--baselines", action="store_true", help="also torch's DataLoader, rows by rows (slow)")
    arguments = parser.parse_args()
    order = {"shuffle": False, "window_groups": 1} if arguments.in_order else {}
    config = LoaderConfig(global_batch_size=arguments.batch, logical_shards=arguments.shards, prefetch=0, **order)
    with tempfile.TemporaryDirectory() as parent:
        directory = arguments.directory
        if directory is None:
            directory = f"{parent}/generated"
            write_generated(directory, rows=arguments.rows)
        found = measure(
            directory,
            split=arguments.split,
            config=config,
            repeats=arguments.repeats,
            baselines=KINDS if arguments.baselines else (),
        )
    for name, value in found.items():
        print(f"{name:22s} {value:,.3f}" if isinstance(value, float) else f"{name:22s} {value:,}")


if __name__ == "__main__":
    main()
