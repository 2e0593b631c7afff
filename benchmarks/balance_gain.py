"""Step time of two processes on long-tailed lengths, without and with the balancer across ranks.

    python benchmarks/balance_gain.py [--rows-per-rank 8] [--steps 40] [--repeats 2] [--device cpu]

Writes a data set whose histories have exp(normal) lengths around 96, cut to 4 to 512, and trains the same global
batches twice with torchrun on two processes (one thread each; on CUDA one GPU each), two HSTU blocks of width 64: the
first time as they are cut, the second time balanced by counted FLOPs. Losses are compared first; then the figures of
the steps behind the tenth are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

WARM_UP = 10


def write_data(directory: Path, *, rows: int, seed: int = 0) -> None:
    """One stream, one task."""
    from gem_data.api import write_dataset
    from gem_data.interface import IdFeature, LabelInfo, Schema, StreamInfo, TableInfo

    item = IdFeature(name="item", table="item")
    stream = StreamInfo(name="views", fields=(item,), action_bits=2, max_length=512)
    schema = Schema(
        name="long-tailed",
        created_by="benchmarks/balance_gain.py",
        tables=(TableInfo(name="item", rows=1000),),
        labels=(LabelInfo(name="click"),),
        scalars=(item,),
        streams=(stream,),
    )
    tables = {}
    for split, first in (("train", 0), ("eval", rows)):
        count = rows if split == "train" else 64
        rng = np.random.default_rng((seed, first))
        lengths = np.clip(np.round(96 * np.exp(rng.standard_normal(count))), 4, 512).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        events = int(offsets[-1])
        columns = {
            "item": rng.integers(0, 1000, events),
            "action": rng.integers(0, 4, events),
            "time": np.zeros(events, np.int64),
        }
        tables[split] = pa.table(
            {
                "sample_id": np.arange(first, first + count),
                "user_id": np.arange(first, first + count),
                "timestamp": np.arange(first, first + count) + 1,
                "label.click": rng.integers(0, 2, count).astype(np.float32),
                "id.item": rng.integers(0, 1000, count),
                **{f"stream.views.{n}": pa.ListArray.from_arrays(offsets, v) for n, v in columns.items()},
            }
        )
    write_dataset(directory, schema, tables, rows_per_group=64)


def train(data: Path, run: Path, *, method: str, rows_per_rank: int, steps: int, device: str) -> list[dict[str, Any]]:
    """Train records of a run of two processes."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "gem_pipelines", "train", "--recipe", "debug", "--data", str(data), "--run-dir", str(run)),
        *("--data.global-batch-size", str(2 * rows_per_rank), "--train.steps", str(steps), "--train.threads", "1"),
        *("--train.checkpoint-every", "0", "--train.profile-every", "0", "--train.survey-rows", "0"),
        *("--train.tensorboard", "False", "--train.peak-flops-per-s", "1e9", "--train.device", device),
        *("--model.stream.dim", "64", "--model.dim", "32", "--model.table-dim", "32", "--balance.method", method),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(done.stderr)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "train"]


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows-per-rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        data = Path(parent) / "data"
        write_data(data, rows=2 * arguments.rows_per_rank * arguments.steps)
        options = {"rows_per_rank": arguments.rows_per_rank, "steps": arguments.steps, "device": arguments.device}
        runs: dict[str, list[dict[str, Any]]] = {"none": [], "global": []}
        for number in range(arguments.repeats):
            for method, held in runs.items():  # in turn, so that a busy machine is busy for both
                held += train(data, Path(parent) / f"{method}-{number}", method=method, **options)
    for a, b in zip(*runs.values(), strict=True):
        if abs(a["loss"] - b["loss"]) > 1e-4 * abs(a["loss"]):
            raise SystemExit(f"step {a['step']}: losses differ: {a['loss']} and {b['loss']}")
    print("balance   seconds a step (median)   load   own work   (max over mean of the ranks, mean over steps)")
    medians = {}
    for method, records in runs.items():
        later = [record for record in records if record["step"] > WARM_UP]
        medians[method] = statistics.median(record["seconds"] for record in later)
        load, work = (statistics.mean(r["imbalance"][name] for r in later) for name in ("load", "seconds"))
        print(f"{method:8s}  {medians[method]:24.4f}  {load:5.3f}  {work:8.3f}")
    print(f"gain: {medians['none'] / medians['global']:.3f}x")


if __name__ == "__main__":
    main()
