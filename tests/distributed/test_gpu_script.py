"""What runs on several GPUs runs end to end over gloo, so that a GPU host is not where its mistakes are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu" / "parallel.py"


@pytest.mark.slow
@pytest.mark.distributed
def test_dry_run_over_gloo(tmp_path):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--worlds", "1", "2"]
    done = subprocess.run(command, env=os.environ | {"OUT": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    worlds = json.loads((tmp_path / "parallel.json").read_text())["worlds"]
    assert {row["name"] for row in worlds["2"]["parity"]} >= {"replicate2.table2", "shard2.table2", "expert2.table2"}
    assert all(row["worst"] <= 1e-5 and row["loss"] <= 1e-5 for row in worlds["2"]["parity"])
    one, two = worlds["1"]["speed"]["rows"], worlds["2"]["speed"]["rows"]
    assert [row["variant"] for row in one] == ["overlap", "bf16"]
    for row in one:  # the share of the peak is what makes the prediction for one process its measurement
        assert row["predicted_s"] == pytest.approx(row["step_s"], rel=1e-6)
    assert {row["name"] for row in two} >= {"replicate2.table2", "shard2.table2", "expert2.table2", "shard2.sliced1x2"}
    for row in two:
        assert row["step_s"] > 0
        assert row["predicted_s"] > 0
        assert sum(row["bytes_by_group"].values()) > 0
    assert "shard2.table2" in done.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_balance_gain_over_gloo(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "balance_gain.py"), "--device", "cpu", "--steps", "8"]
    done = subprocess.run(command, env=os.environ | {"OUT": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "balance_gain.json").read_text())
    none, balanced = found["methods"]["none"], found["methods"]["global"]
    assert found["first_loss_difference"] <= 1e-5
    assert none["events"] == balanced["events"]
    assert balanced["load"] < none["load"]
    assert found["gain"] == pytest.approx(none["step_s"] / balanced["step_s"])
    assert f"gain: {found['gain']:.3f}x" in done.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_hangs_and_kills_over_gloo(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu" / "nccl_hang.py"), "--device", "cpu", "--only", "faults"]
    done = subprocess.run(command, env=os.environ | {"OUT": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads((tmp_path / "nccl_hang.json").read_text())["cases"]
    assert {name: case["failed"] for name, case in cases.items()} == {
        "stopped rank": [],
        "skipped collective": [],
        "skipped, without watchdog": [],
        "killed rank, torchrun": [],
    }
