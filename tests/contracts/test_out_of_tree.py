"""The worked example of docs/out-of-tree.md: a loader kept outside the packages proves itself and runs in the job."""

from __future__ import annotations

import importlib.util
import re
import textwrap
import unittest
from datetime import timedelta
from pathlib import Path

import gem_data.testing
import pytest
from gem_data.api import build_loader
from gem_data.testing import Quirks, conformance_cases
from gem_pipelines.config_overrides import apply_overrides
from gem_pipelines.data_source import prepare_named
from gem_pipelines.job import build, loader_config
from gem_pipelines.loop import Job
from gem_pipelines.recipes import find_recipe
from gem_pipelines.rundir import RunDirectory, read_records
from gem_pipelines.runtime import start_runtime

DOCUMENT = Path(__file__).parents[2] / "docs" / "out-of-tree.md"
EXAMPLE = DOCUMENT.parent / "examples" / "ledger_loader.py"
spec = importlib.util.spec_from_file_location("ledger_loader", EXAMPLE)
assert spec is not None
assert spec.loader is not None
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
LedgerLoader = example.LedgerLoader
(SNIPPET,) = re.findall(r"```{code-block} python\n(@pytest.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
exec(SNIPPET)  # defines test_conformance, as the document says it


def test_the_suite_says_the_same_as_the_document():
    said = gem_data.testing.__doc__.split("    from gem_data.testing import Quirks, conformance_cases\n")[1]
    assert textwrap.dedent(said) == SNIPPET.replace("LedgerLoader", "MyLoader")


class NoResume:
    """A loader without a state, and without what belongs to it."""

    def __init__(self, directory, **arguments):
        inner = build_loader(directory, **arguments)
        for name in ("schema", "rows_per_epoch", "batches_per_epoch", "epoch", "close"):
            setattr(self, name, getattr(inner, name))


class Outcomes:
    """A pytest plugin that keeps what became of each test."""

    def __init__(self):
        self.found = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid.partition("[")[2].rstrip("]")] = report.outcome


def test_cases_that_quirks_leave_out_are_skipped_by_pytest(tmp_path):
    text = SNIPPET.replace("Quirks()", "Quirks(resumes=False)").replace("LedgerLoader", "NoResume")
    head = "import pytest\nfrom gem_data.testing import Quirks, conformance_cases\n"
    (tmp_path / "test_it.py").write_text(f"{head}from {__name__} import NoResume\n{text}")
    outcomes = Outcomes()
    without = [f"-pno:{name}" for name in ("terminal", "hypothesispytest", "cacheprovider", "unraisableexception")]
    options = [*without, "-c", "/dev/null", "--rootdir", str(tmp_path)]
    pytest.main([*options, "-k", "mark_trained or trained or foreign or drop_last", str(tmp_path)], [outcomes])
    assert outcomes.found == {
        "drop_last": "passed",
        "setting: drop_last": "passed",
        "mark_trained refuses what was not yielded": "skipped",
        "the state is of what was trained": "skipped",
        "refuses a foreign state and changes nothing": "skipped",
    }


def test_no_case_left_out_touches_the_loader(tmp_path):
    def factory(directory, **arguments):
        raise AssertionError("a case that is left out built a loader")

    quirks = Quirks(resumes=False, requests=False, shuffles=False, skipped_settings={"cost": "no"})
    skipped = [case for case in conformance_cases(quirks) if case.skipped]
    assert len(skipped) > 20
    for case in skipped:
        with pytest.raises(unittest.SkipTest, match=re.escape(case.skipped)):
            case.run(factory, tmp_path)


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
