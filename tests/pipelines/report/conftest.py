"""A factory of run directories, written as the trainer writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

PARTS = ("read", "tables", "sequence", "interaction", "cross", "heads", "optimizer", "other")


def start_record(tasks: tuple[str, ...]) -> dict[str, Any]:
    shares = ("0", "0.25", "0.5", "0.75", "0.9", "0.99", "1")
    lengths = {"history": (0, 9, 28, 80, 160, 190, 200), "search": (0, 0, 2, 5, 9, 11, 12)}
    streams = {
        name: {
            "total": 40 * max(values),
            "mean": sum(values) / 7,
            "quantiles": dict(zip(shares, map(float, values), strict=True)),
            "max_length": 100,
            "cut_rows": 3,
        }
        for name, values in lengths.items()
    }
    labels = {task: {"rate": 0.3125, "positives": 300, "weight_sum": 960.0} for task in tasks}
    split = {"files": 2, "row_groups": 4, "bytes": 3 << 20, "users": 944, "labels": labels, "streams": streams}
    return {
        "kind": "start",
        "time": "2026-01-05T10:00:00+00:00",
        "config": {"name": "synthetic_cpu"},
        "world_size": 1,
        "parameters": {"dense": 123_456, "tables": 4_500_000},
        "peak_flops_per_s": 6.5e10,
        "peak_source": "measured",
        "data": {
            "name": "synthetic",
            "facts": {"best_ne": {"click": 0.8421, "convert": 0.7777}},
            "splits": {
                "train": split | {"rows": 80_000, "time": {"first": 1_767_225_600, "last": 1_767_312_000}},
                "eval": split | {"rows": 20_000, "time": {"first": 1_767_312_001, "last": 1_767_398_400}},
            },
        },
    }


def train_record(step: int, tasks: tuple[str, ...], random: np.random.Generator) -> dict[str, Any]:
    decay = 0.35 * float(np.exp(-step / 40))
    record = {
        "kind": "train",
        "step": step,
        "epoch": 0,
        "samples": step * 512,
        "tokens": step * 512 * 30,
        "loss": 0.52 + decay + float(random.normal(0, 0.02)),
        "loss_by_task": {task: 0.52 + 0.02 * i + decay + float(random.normal(0, 0.02)) for i, task in enumerate(tasks)},
        "window_ne": {task: 0.85 + 0.01 * i + decay + float(random.normal(0, 0.01)) for i, task in enumerate(tasks)},
        "learning_rate": 1e-3 * min(1.0, step / 20),
        "grad_norm": 1.0 + decay,
        "seconds": 0.11,
        "samples_per_s": 4600.0 + float(random.normal(0, 100)),
        "tokens_per_s": 140_000.0 + float(random.normal(0, 3000)),
        "flops": 900_000_000,
        "flops_by_part": {"sequence": 5e8, "interaction": 3e8, "cross": 8e7, "heads": 2e7},
        "flops_per_s": 8.2e9,
        "mfu": 0.126,
        "memory_bytes": 900_000_000 + step * 100_000,
    }
    if step % 10 == 1:
        shares = (0.01, 0.02, 0.04, 0.012, 0.005, 0.003, 0.015, 0.005)
        record["seconds_by_part"] = dict(zip(PARTS, shares, strict=True))
    return record


def eval_record(step: int, tasks: tuple[str, ...]) -> dict[str, Any]:
    values = {"ne": 0.86 + 2 / (step + 20), "auc": 0.74, "gauc": 0.69, "log_loss": 0.53, "calibration": 1.012}
    values |= {"rate": 0.3, "count": 20_000}
    by_task = {task: dict(values) for task in tasks}
    return {"kind": "eval", "step": step, "samples": 20_000, "seconds": 2.0, "tasks": by_task}


def end_record(steps: int) -> dict[str, Any]:
    throughput = {"samples_per_s": 4500.0, "tokens_per_s": 139_000.0, "share_by_part": {"read": 0.1, "sequence": 0.9}}
    floors = {
        "logistic": {"auc": 0.7055, "ne": 0.907, "task": "click"},
        "running_rates": {"auc": 0.7377, "ne": 0.8683, "task": "click"},
    }
    return {
        "kind": "end",
        "step": steps,
        "seconds": 31.5,
        "throughput": throughput,
        "floors": floors,
        "best_ne": 0.8421,
        "status": "completed",
    }


def write_predictions(path: Path, tasks: tuple[str, ...], rows: int, random: np.random.Generator) -> None:
    columns: dict[str, np.ndarray] = {
        "sample_id": np.arange(rows, dtype=np.int64),
        "user_id": random.integers(0, 50, rows),
    }
    for task in tasks:
        chance = random.beta(2, 4, rows)
        columns[f"label.{task}"] = (random.random(rows) < chance).astype(np.float32)
        columns[f"weight.{task}"] = np.ones(rows, dtype=np.float32)
        columns[f"prediction.{task}"] = chance.astype(np.float32)
    pq.write_table(pa.table(columns), path)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """make_run(tasks=..., steps=..., rows=..., name=...) -> a completed run directory."""

    def make(
        *, tasks: tuple[str, ...] = ("click", "convert"), steps: int = 60, rows: int = 2000, name: str = "run"
    ) -> Path:
        return write_run(tmp_path / name, tasks=tasks, steps=steps, rows=rows)

    return make


@pytest.fixture(scope="session")
def completed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A completed run directory of 60 steps and two tasks, for tests that do not change it."""
    return write_run(tmp_path_factory.mktemp("completed") / "run", tasks=("click", "convert"), steps=60, rows=2000)


def write_run(run: Path, *, tasks: tuple[str, ...], steps: int, rows: int) -> Path:
    """A completed run directory at `run`."""
    random = np.random.default_rng(7)
    run.mkdir()
    config = {
        "name": "synthetic_cpu",
        "data": {"source": "data/synthetic", "max_length": None},
        "model": {"dim": 32, "layers": 2, "streams": ["history", "search"]},
        "train": {"steps": steps, "global_batch_size": 512, "seed": 3},
    }
    (run / "config.json").write_text(json.dumps(config))
    (run / "command.txt").write_text("gemline train --recipe synthetic_cpu --data data/synthetic --train.seed 3\n")
    versions = {"python": "3.11.9", "torch": "2.13.0+cpu", "machine": {"cpu": "2 cores"}}
    (run / "versions.json").write_text(json.dumps(versions))
    records = [start_record(tasks)]
    for step in range(1, steps + 1):
        records.append(train_record(step, tasks, random))
        if step % 20 == 0:
            records.append(eval_record(step, tasks))
    records.append(end_record(steps))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_predictions(run / f"predictions-{steps}.parquet", tasks, rows, random)
    return run
