"""Two processes on requests: what plain samples train, what one process trains, and resuming at another world size."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import gemline, run_worker
from gem_pipelines.checkpoint_format import step_directory
from gem_pipelines.cli import main
from gem_pipelines.rundir import read_records

pytestmark = pytest.mark.distributed

STEPS, HALF = 8, 4
ARGUMENTS = [
    *("--recipe", "debug", "--data.global-batch-size", "33", "--train.steps", str(STEPS)),
    *("--train.checkpoint-every", str(HALF), "--train.peak-flops-per-s", "1e9", "--train.survey-rows", "0"),
    *("--train.tensorboard", "False", "--train.profile-every", "0", "--train.timeout-s", "60"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """100 requests to train on, in row groups of 12, and the same as plain samples."""
    import gem_datasets
    from gem_data.api import expand_requests, write_dataset

    directory = tmp_path_factory.mktemp("data")
    made = gem_datasets.load(
        "synthetic", rows=520, users=40, items=60, streams=2, max_length=12, impressions=4, requests=True
    )
    train = made.train.slice(0, 100)
    assert train.num_rows == 100
    write_dataset(directory / "requests", made.schema, {"train": train, "eval": made.eval}, rows_per_group=12)
    expand_requests(directory / "requests", directory / "samples")
    return directory / "requests", directory / "samples"


def records(run: Path) -> list[dict[str, Any]]:
    return [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "train"]


def test_two_processes_train_on_requests_what_they_train_on_samples(data, tmp_path):
    requests, samples = data
    worker = Path(__file__).with_name("request_worker.py")
    said = run_worker(worker, [str(requests), str(samples), str(tmp_path)], world=2)
    for name in ("table_wise", "row_wise", "balanced"):
        assert f"{name}: equal after 6 steps" in said


@pytest.fixture(scope="module")
def two(data: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("two") / "run"
    done = gemline(["train", *ARGUMENTS, "--data", str(data[0]), "--run-dir", str(run)])
    assert done.returncode == 0, done.stderr
    return run


def test_two_processes_give_the_losses_of_one_on_requests(data, two, tmp_path):
    one = tmp_path / "one"
    assert main(["train", *ARGUMENTS, "--data", str(data[0]), "--run-dir", str(one)]) == 0
    for a, b in zip(records(one), records(two), strict=True):
        assert [a[name] for name in ("step", "epoch", "samples", "tokens")] == [
            b[name] for name in ("step", "epoch", "samples", "tokens")
        ]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


def test_one_process_goes_on_where_two_stopped_on_requests(two, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(two, run)
    shutil.rmtree(step_directory(run / "checkpoints", STEPS))
    assert main(["train", "--resume", "--run-dir", str(run)]) == 0
    for a, b in zip(records(two), records(run), strict=True):
        assert (a["samples"], a["epoch"]) == (b["samples"], b["epoch"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
