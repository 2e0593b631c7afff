"""pytest-benchmark at the desk: not under xdist, and no file when nothing was measured."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


def desk(*arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", "benchmarks/desk"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_refuses_xdist():
    done = desk("-n", "2")
    assert done.returncode == 4
    assert "must not run under xdist" in done.stderr


def test_nothing_measured_writes_nothing(tmp_path):
    path = tmp_path / "desk.json"
    done = desk("-k", "pipelines.auc", "--benchmark-disable", f"--benchmark-json={path}")
    assert done.returncode == 5
    assert not path.exists()


@pytest.mark.parametrize("option", ["benchmark_json", "benchmark_save", "benchmark_autosave"])
@pytest.mark.parametrize("measured", [False, True])
def test_every_option_that_writes_needs_a_measurement(option, measured):
    place = importlib.util.spec_from_file_location("desk_conftest", ROOT / "benchmarks" / "desk" / "conftest.py")
    conftest = importlib.util.module_from_spec(place)
    place.loader.exec_module(conftest)
    option = argparse.Namespace(**{option: True})
    config = SimpleNamespace(option=option, getoption=lambda name, default=None: getattr(option, name, default))
    config._benchmarksession = SimpleNamespace(benchmarks=["one"] if measured else [])
    session = SimpleNamespace(config=config, exitstatus=0)
    conftest.pytest_sessionfinish(session, 0)
    assert session.exitstatus == (0 if measured else 5)


def test_what_is_measured_is_written_with_its_counters(tmp_path):
    path = tmp_path / "desk.json"
    done = desk("-k", "pipelines.auc", f"--benchmark-json={path}")
    assert done.returncode == 0, done.stdout
    (found,) = json.loads(path.read_text())["benchmarks"]
    assert found["stats"]["min"] > 0
    assert found["extra_info"]["python_calls"] > 100
