"""Two processes train what one does, on the same global batches; they resume bit for bit, and they stop together.

320 training rows in batches of 29: the twelfth batch of an epoch has one row, so that one rank has none.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from forked_ranks import gemline, run_worker
from gem_data.damage import refresh_block_hashes
from gem_pipelines.checkpoint_format import step_directory
from gem_pipelines.checkpoint_manifest import read_manifest, state_digest
from gem_pipelines.cli import main
from gem_pipelines.rundir import read_records

pytestmark = pytest.mark.distributed

STEPS, HALF = 14, 7
ARGUMENTS = [
    *("--recipe", "debug", "--data.global-batch-size", "29", "--train.steps", str(STEPS)),
    *("--train.checkpoint-every", str(HALF), "--train.peak-flops-per-s", "1e9", "--train.survey-rows", "0"),
    *("--train.tensorboard", "False", "--train.profile-every", "5", "--train.timeout-s", "60"),
]


def torchrun(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, "-m", "gem_pipelines", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row groups of 40 rows, so that the two ranks read different ones."""
    import gem_datasets
    from gem_data.api import write_dataset

    directory = tmp_path_factory.mktemp("data") / "synthetic"
    made = gem_datasets.load("synthetic", rows=400, users=40, items=60, streams=2, max_length=6)
    write_dataset(directory, made.schema, {"train": made.train, "eval": made.eval}, rows_per_group=40)
    return directory


@pytest.fixture(scope="module")
def two(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two processes."""
    run = tmp_path_factory.mktemp("two") / "run"
    done = torchrun(["train", *ARGUMENTS, "--data", str(data), "--run-dir", str(run)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("evaluated at step") == 1  # rank 0 alone speaks
    return run


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(run / "metrics.jsonl") if record["kind"] == kind]


def assert_close(found: dict[str, float | None], expected: dict[str, float | None], *, rel: float) -> None:
    """Equal within `rel`; undefined (None) only where the other is."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (None if value is None else pytest.approx(value, rel=rel)), name


def test_two_processes_give_the_losses_of_one(data, two, tmp_path):
    one = tmp_path / "one"
    assert main(["train", *ARGUMENTS, "--data", str(data), "--run-dir", str(one)]) == 0
    first, second = records(one, "train"), records(two, "train")
    assert len(first) == len(second) == STEPS
    for a, b in zip(first, second, strict=True):
        assert [a[name] for name in ("step", "epoch", "samples", "tokens")] == [
            b[name] for name in ("step", "epoch", "samples", "tokens")
        ]
        for name in ("loss_by_task", "window_ne", "lifetime_ne"):
            assert_close(b[name], a[name], rel=1e-5)
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5), a["step"]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3), a["step"]
    assert first[11]["samples"] - first[10]["samples"] == 1
    (a,), (b,) = records(one, "eval"), records(two, "eval")
    for task in ("click", "conversion"):
        assert_close(b["tasks"][task], a["tasks"][task], rel=1e-4)
    predictions = [pq.read_table(run / f"predictions-{STEPS}.parquet") for run in (one, two)]
    assert predictions[0]["sample_id"].equals(predictions[1]["sample_id"])
    np.testing.assert_allclose(*(table["prediction.click"].to_numpy() for table in predictions), rtol=1e-4)


def test_two_processes_resume_bit_for_bit(two, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(two, run)
    shutil.rmtree(step_directory(run / "checkpoints", STEPS))
    done = gemline(["train", "--resume", "--run-dir", str(run)])
    assert done.returncode == 0, done.stderr
    assert f"resumed from step {HALF}" in done.stdout
    digests = [state_digest(read_manifest(step_directory(path / "checkpoints", STEPS))) for path in (run, two)]
    assert digests[0] == digests[1]
    losses = [[(r["loss"], r["grad_norm"], r["window_ne"]) for r in records(path, "train")] for path in (run, two)]
    assert losses[0] == losses[1]


def test_one_process_goes_on_where_two_stopped(two, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(two, run)
    shutil.rmtree(step_directory(run / "checkpoints", STEPS))
    assert main(["train", "--resume", "--run-dir", str(run)]) == 0
    for a, b in zip(records(two, "train"), records(run, "train"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_a_bad_row_on_one_rank_stops_both_at_the_same_step(data, spoil, tmp_path):
    run = tmp_path / "run"
    spoilt, path = spoil(data)
    refresh_block_hashes(path)
    arguments = [*ARGUMENTS, "--data.shuffle", "False", "--data.global-batch-size", "40", "--data.window-groups", "1"]
    done = torchrun(["train", *arguments, "--data", str(spoilt), "--run-dir", str(run)])
    assert done.returncode == 1
    named = [line for line in done.stderr.splitlines() if "error: " in line and line.startswith("gemline rank")]
    assert len(named) == 2, done.stderr
    own = next(line for line in named if "reported" not in line)
    other = next(line for line in named if "reported" in line)
    for part in ("train-00000.parquet", "row group 3", "row 10", "label.click", "nan"):
        assert part in own
        assert part in other
    steps = [record["step"] for record in records(run, "train")]
    assert steps == list(range(1, len(steps) + 1))
    assert f"step {len(steps) + 1}: rank" in other
    assert list((run / "checkpoints").iterdir()) == []


def test_exchanges_with_unequal_parts():
    assert "all exchanges agree" in run_worker(Path(__file__).with_name("exchange_worker.py"), [], world=2)
