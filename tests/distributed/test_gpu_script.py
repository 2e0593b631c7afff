"""benchmarks/gpu/parallel.py runs end to end over gloo, so that a GPU host is not where its mistakes are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "parallel.py"


@pytest.mark.slow
@pytest.mark.distributed
def test_dry_run_over_gloo(tmp_path):
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--worlds", "1", "2"]
    done = subprocess.run(command, env=os.environ | {"OUT": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    worlds = json.loads((tmp_path / "parallel.json").read_text())["worlds"]
    assert {row["name"] for row in worlds["2"]["parity"]} >= {"replicate2.table2", "shard2.table2", "expert2.table2"}
    assert all(row["worst"] <= 1e-5 and row["loss"] <= 1e-5 for row in worlds["2"]["parity"])
    (one,), two = worlds["1"]["speed"]["rows"], worlds["2"]["speed"]["rows"]
    # the share of the peak is what makes the prediction for one process its measurement
    assert one["predicted_s"] == pytest.approx(one["step_s"], rel=1e-6)
    assert {row["name"] for row in two} >= {"replicate2.table2", "shard2.table2", "expert2.table2", "shard2.sliced1x2"}
    for row in two:
        assert row["step_s"] > 0
        assert row["predicted_s"] > 0
        assert sum(row["bytes_by_group"].values()) > 0
    assert "shard2.table2" in done.stdout
