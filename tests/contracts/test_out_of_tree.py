"""The worked example of docs/out-of-tree.md: a loader kept outside the packages proves itself and runs in the job."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from pathlib import Path

import pytest
from gem_data.testing import Case, Quirks, conformance_cases
from gem_pipelines.config_overrides import apply_overrides
from gem_pipelines.data_source import prepare_named
from gem_pipelines.job import build, loader_config
from gem_pipelines.loop import Job
from gem_pipelines.recipes import find_recipe
from gem_pipelines.rundir import RunDirectory, read_records
from gem_pipelines.runtime import start_runtime

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "ledger_loader.py"
spec = importlib.util.spec_from_file_location("ledger_loader", EXAMPLE)
assert spec is not None
assert spec.loader is not None
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


@pytest.mark.parametrize("case", conformance_cases(Quirks()), ids=lambda case: case.name)
def test_it_proves_itself(case: Case, tmp_path: Path):
    if case.skipped:
        pytest.skip(case.skipped)
    case.run(lambda directory, **arguments: example.LedgerLoader(directory, **arguments), tmp_path)


def test_it_runs_in_the_job_unchanged(tmp_path):
    data = tmp_path / "data"
    prepare_named(
        "synthetic", ("rows=400", "users=40", "items=60", "streams=2", "max_length=6"), data, say=lambda _: None
    )
    settings = ["--train.steps", "3", "--data.global-batch-size", "32", "--train.peak-flops-per-s", "1e9"]
    settings += ["--data.source", str(data), "--train.tensorboard", "false"]
    config = apply_overrides(find_recipe("debug"), settings)
    runtime = start_runtime(device="cpu", threads=1, deterministic=True, timeout=timedelta(seconds=60))
    losses, ledger = [], tmp_path / "ledger.txt"
    try:
        for name in ("shipped", "ours"):
            directory = RunDirectory(tmp_path / name)
            directory.create(config, command="test")
            job = build(config, data=data, directory=directory, runtime=runtime)
            if name == "ours":
                loader = example.LedgerLoader(data, split="train", config=loader_config(config), ledger=ledger)
                job = Job(
                    trainer=job.trainer, loader=loader, data=data, directory=directory, total_steps=job.total_steps
                )
            job.train(resumed_from=None, survey=None)
            losses.append([r["loss"] for r in read_records(directory.metrics_file) if r["kind"] == "train"])
    finally:
        runtime.close()
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    lines = [list(map(int, line.split())) for line in ledger.read_text().splitlines()]
    assert [line[0] for line in lines] == [0, 1, 2]
    assert all(len(set(line[1:])) == 32 for line in lines)
