"""What the recipes reach, against figures known without a model. Minutes each; `pytest -m slow -s` prints the figures.

docs/results.md quotes these runs.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from gem_pipelines.cli import main
from gem_pipelines.rundir import read_records

pytestmark = pytest.mark.slow


def train(directory: Path, *arguments: str) -> tuple[dict, dict]:
    """(last evaluation's tasks, end record) of one run."""
    run = directory / f"run-{len(list(directory.iterdir()))}"
    common = ["--run-dir", str(run), "--data.cache", str(directory / "data"), "--train.tensorboard", "false"]
    assert main(["train", *arguments, *common]) == 0
    records = read_records(run / "metrics.jsonl")
    return [r for r in records if r["kind"] == "eval"][-1]["tasks"], records[-1]


def test_movielens_passes_the_counting_floors(tmp_path):
    """Mean of three seeds above both floors that the run itself computes. Fetches MovieLens-100K."""
    runs = [train(tmp_path, "--recipe", "ml100k_cpu", "--train.seed", str(seed)) for seed in range(3)]
    auc, ne = ([tasks["like"][name] for tasks, _ in runs] for name in ("auc", "ne"))
    floors = runs[0][1]["floors"]
    for name, values in (("AUC", auc), ("NE", ne)):
        print(f"ml100k_cpu {name}: mean {statistics.mean(values):.4f}, {min(values):.4f} to {max(values):.4f}")
    print(f"floors: {floors}")
    assert statistics.mean(auc) > max(floor["auc"] for floor in floors.values())
    assert statistics.mean(ne) < min(floor["ne"] for floor in floors.values())


def test_synthetic_comes_within_one_percent_of_the_best_ne(tmp_path):
    """800,000 samples, each seen once; the best NE follows from the planted probabilities."""
    tasks, end = train(tmp_path, "--recipe", "synthetic_cpu", "--data.options", "rows=1000000")
    click = tasks["click"]
    print(f"synthetic_cpu click: NE {click['ne']:.4f}, best {end['best_ne']:.4f}, AUC {click['auc']:.4f}")
    assert click["ne"] <= 1.01 * end["best_ne"]


def test_parity_of_the_last_item_is_learnt(tmp_path):
    """Only the id of the last event tells the label: nothing may be lost on the way from the table to the head."""
    tasks, _ = train(tmp_path, "--recipe", "synthetic_cpu", "--data", "parity")
    print(f"parity: AUC {tasks['parity']['auc']:.4f}")
    assert tasks["parity"]["auc"] > 0.95
