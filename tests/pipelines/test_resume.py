"""A run that is killed and resumed is the run that went through, byte for byte."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gem_pipelines.checkpoint_format import step_directory
from gem_pipelines.checkpoint_manifest import read_manifest, state_digest
from gem_pipelines.cli import main
from gem_pipelines.rundir import read_records

STEPS = 20
# 320 rows in batches of 24: an epoch ends after step 14, and step 10 lies inside one.
ARGUMENTS = [
    *("--data.global-batch-size", "24", "--train.steps", str(STEPS), "--train.checkpoint-every", "10"),
    *("--train.peak-flops-per-s", "1e9", "--train.survey-rows", "0", "--train.profile-every", "7"),
]
FIGURES = ("step", "epoch", "samples", "tokens", "loss", "loss_by_task", "window_ne", "lifetime_ne", "grad_norm")


def figures(run: Path) -> list[tuple]:
    """What a step computed, without times."""
    return [tuple(r[name] for name in FIGURES) for r in read_records(run / "metrics.jsonl") if r["kind"] == "train"]


def digest(run: Path, step: int) -> str:
    return state_digest(read_manifest(step_directory(run / "checkpoints", step)))


def start_and_kill(arguments: list[str], run: Path, *, after: int) -> int:
    """SIGKILL a training process once it has recorded `after` steps; returns how many it had recorded."""
    process = subprocess.Popen([sys.executable, "-m", "gem_pipelines", "train", *arguments], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            path = run / "metrics.jsonl"
            if path.exists() and path.read_text().count('"kind": "train"') >= after:
                break
            time.sleep(0.002)
        else:
            pytest.fail(f"the process ended or hung before step {after}: {process.poll()}")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    return len(figures(run))


@pytest.fixture(scope="module")
def straight(debug_data, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("straight") / "run"
    assert main(["train", "--recipe", "debug", "--data", str(debug_data), "--run-dir", str(run), *ARGUMENTS]) == 0
    return run


def test_killed_between_two_tens_of_steps_equals_twenty_in_one(straight, debug_data, tmp_path):
    run = tmp_path / "run"
    arguments = ["--recipe", "debug", "--data", str(debug_data), "--run-dir", str(run), *ARGUMENTS]
    recorded = start_and_kill(arguments, run, after=12)
    assert 12 <= recorded < STEPS
    assert main(["train", "--resume", "--run-dir", str(run)]) == 0
    assert figures(run) == figures(straight)
    assert digest(run, 10) == digest(straight, 10)
    assert digest(run, STEPS) == digest(straight, STEPS)
    evaluations = [
        [r["tasks"] for r in read_records(p / "metrics.jsonl") if r["kind"] == "eval"] for p in (run, straight)
    ]
    assert evaluations[0] == evaluations[1]
    assert len(evaluations[0]) == 1


def test_ten_steps_and_ten_more_equal_twenty(straight, debug_data, tmp_path):
    """Extending a finished run; the constant schedule does not know how long it is."""
    constant = ["--optimizer.schedule", "constant"]
    runs = [tmp_path / "whole", tmp_path / "halves"]
    base = ["train", "--recipe", "debug", "--data", str(debug_data), *ARGUMENTS, *constant]
    assert main([*base, "--run-dir", str(runs[0])]) == 0
    assert main([*base, "--run-dir", str(runs[1]), "--train.steps", "10"]) == 0
    assert main(["train", "--resume", "--run-dir", str(runs[1]), "--train.steps", str(STEPS)]) == 0
    assert figures(runs[1]) == figures(runs[0])
    assert figures(runs[0]) != figures(straight)


def test_a_schedule_laid_out_over_its_steps_cannot_be_extended(straight, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    assert main(["train", "--resume", "--run-dir", str(run), "--train.steps", str(STEPS + 5)]) == 1
    assert f"was laid out over {STEPS} steps, this run has {STEPS + 5}" in capsys.readouterr().err
    assert figures(run) == figures(straight)


def test_the_data_may_have_moved_but_not_changed(straight, debug_data, tmp_path, capsys):
    run, moved, other = tmp_path / "run", tmp_path / "moved", tmp_path / "other"
    shutil.copytree(straight, run)
    shutil.copytree(debug_data, moved)
    shutil.rmtree(step_directory(run / "checkpoints", STEPS))
    assert main(["data", "prepare", "synthetic", "rows=400", "seed=1", "--out", str(other)]) == 0
    assert main(["train", "--resume", "--run-dir", str(run), "--data", str(other)]) == 1
    assert capsys.readouterr().err.startswith("gemline: error: ")
    assert figures(run) == figures(straight)  # the refused attempt left the run as it was
    assert main(["train", "--resume", "--run-dir", str(run), "--data", str(moved)]) == 0
    assert digest(run, STEPS) == digest(straight, STEPS)


def test_killed_before_the_first_checkpoint_starts_over(straight, debug_data, tmp_path):
    run = tmp_path / "run"
    arguments = ["--recipe", "debug", "--data", str(debug_data), "--run-dir", str(run), *ARGUMENTS]
    assert start_and_kill(arguments, run, after=2) < 10
    assert main(["train", "--resume", "--run-dir", str(run)]) == 0
    assert figures(run) == figures(straight)
    assert digest(run, STEPS) == digest(straight, STEPS)


def test_a_damaged_last_checkpoint_costs_its_steps_and_nothing_else(straight, debug_data, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", "--recipe", "debug", "--data", str(debug_data), "--run-dir", str(run), *ARGUMENTS]) == 0
    (step_directory(run / "checkpoints", STEPS) / "state.json").write_text("{}")
    capsys.readouterr()
    assert main(["train", "--resume", "--run-dir", str(run)]) == 0
    out = capsys.readouterr().out
    assert "CHECKPOINT DAMAGED, passed over" in out
    assert "resumed from step 10" in out
    assert figures(run) == figures(straight)
    assert digest(run, STEPS) == digest(straight, STEPS)
