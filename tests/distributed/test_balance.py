"""The balancer across ranks in the job: the losses of one process, a bit-for-bit resume, and errors that stop both.

Lists of 0 to 40 events, so that loads differ; 240 training rows in batches of 28, whose last batch of an epoch has 16.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from forked_ranks import gemline, run_worker
from gem_data.api import read_schema, write_dataset
from gem_data.streaming import time_windows
from gem_pipelines.checkpoint_format import step_directory
from gem_pipelines.checkpoint_manifest import read_manifest, state_digest
from gem_pipelines.cli import main
from gem_pipelines.ledger import verify_ledger
from gem_pipelines.report import write_report
from gem_pipelines.rundir import read_records

pytestmark = pytest.mark.distributed

STEPS, HALF = 12, 6
ARGUMENTS = [
    *("--recipe", "debug", "--data.global-batch-size", "28", "--train.steps", str(STEPS)),
    *("--train.checkpoint-every", str(HALF), "--train.peak-flops-per-s", "1e9", "--train.survey-rows", "0"),
    *("--train.tensorboard", "False", "--train.profile-every", "0", "--train.timeout-s", "60"),
]
GLOBAL = ["--balance.method", "global"]


def train(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return gemline(["train", *arguments])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import gem_datasets
    from gem_data.api import write_dataset

    directory = tmp_path_factory.mktemp("data") / "synthetic"
    made = gem_datasets.load("synthetic", rows=300, users=40, items=60, streams=2, max_length=40)
    write_dataset(directory, made.schema, {"train": made.train, "eval": made.eval}, rows_per_group=40)
    return directory


def records(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [record for record in read_records(run / "metrics.jsonl") if record["kind"] == kind]


def digest(run: Path) -> str:
    return state_digest(read_manifest(step_directory(run / "checkpoints", STEPS)))


@pytest.fixture(scope="module")
def one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, without balance."""
    run = tmp_path_factory.mktemp("one") / "run"
    assert main(["train", *ARGUMENTS, "--data", str(data), "--run-dir", str(run)]) == 0
    return run


@pytest.fixture(scope="module", params=["lpt-equal", pytest.param("kk-free", marks=pytest.mark.slow)])
def two(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes with the global balancer."""
    method, counts = request.param.split("-")
    run = tmp_path_factory.mktemp("two") / "run"
    choice = [*GLOBAL, "--balance.partition", method, "--balance.counts", counts]
    done = train([*ARGUMENTS, *choice, "--data", str(data), "--run-dir", str(run)])
    assert done.returncode == 0, done.stderr
    return run


def test_balanced_processes_give_the_losses_of_one(one, two) -> None:
    first, second = records(one), records(two)
    assert len(first) == len(second) == STEPS
    for a, b in zip(first, second, strict=True):
        assert [a[name] for name in ("step", "epoch", "samples", "tokens")] == [
            b[name] for name in ("step", "epoch", "samples", "tokens")
        ]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5), a["step"]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3), a["step"]
    for a, b in zip(records(one, "eval"), records(two, "eval"), strict=True):
        assert b["tasks"]["click"]["ne"] == pytest.approx(a["tasks"]["click"]["ne"], rel=1e-4)


def test_loads_are_even_and_were_not(data, two, tmp_path) -> None:
    run = tmp_path / "run"
    done = train([*ARGUMENTS, "--data", str(data), "--run-dir", str(run), "--train.steps", "4"])
    assert done.returncode == 0, done.stderr
    before = statistics.mean(record["imbalance"]["load"] for record in records(run))
    after = max(record["imbalance"]["load"] for record in records(two) if record["samples"] % 240)
    assert after <= 1.02 < before


@pytest.mark.slow
def test_records_of_every_fifth_step_have_the_imbalance_of_all(data, tmp_path) -> None:
    """Mean and worst are those of the run that records every step, exactly, and so are they after a resume from a
    checkpoint between two records. Measured seconds differ from run to run.
    """
    runs = [tmp_path / "every", tmp_path / "fifth"]
    for run, each in zip(runs, ("1", "5"), strict=True):
        done = train([*ARGUMENTS, "--train.record-every", each, "--data", str(data), "--run-dir", str(run)])
        assert done.returncode == 0, done.stderr
    every = {record["step"]: record["imbalance"] for record in records(runs[0])}
    wanted = {}
    for last, steps in ((5, range(1, 6)), (10, range(6, 11)), (12, range(11, 13))):
        for name in ("load", "tokens", "bytes", "rows"):
            values = [every[step][name] for step in steps]
            mean = sum(values) / len(values)
            wanted[last, name] = (values[-1], mean, max(values), len(values))
    assert max(worst - mean for _, mean, worst, _ in wanted.values()) > 0.05
    keys = ("imbalance", "imbalance_mean", "imbalance_worst", "imbalance_steps")

    def found() -> dict[tuple[int, str], tuple[Any, ...]]:
        return {
            (record["step"], name): tuple(record[key][name] for key in keys)
            for record in records(run)
            for name in ("load", "tokens", "bytes", "rows")
        }

    assert found() == wanted
    assert all(1.0 <= record["imbalance_mean"]["seconds"] <= 2.0 for record in records(run))
    shutil.rmtree(step_directory(run / "checkpoints", STEPS))
    done = train(["--resume", "--run-dir", str(run)])
    assert done.returncode == 0, done.stderr
    assert f"resumed from step {HALF}" in done.stdout
    assert found() == wanted
    write_report(run)
    assert "over 12 steps of 2 processes" in (run / "report.md").read_text()


def test_a_balanced_run_resumes_bit_for_bit(two, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two, run)
    shutil.rmtree(step_directory(run / "checkpoints", STEPS))
    done = train(["--resume", "--run-dir", str(run)])
    assert done.returncode == 0, done.stderr
    assert f"resumed from step {HALF}" in done.stdout
    assert digest(run) == digest(two)


def test_base_batches_are_the_same_on_one_and_two_processes(data, tmp_path) -> None:
    arguments = [
        *(*ARGUMENTS, "--data", str(data), "--data.global-batch-size", "32", "--train.steps", "6"),
        *("--balance.method", "base", "--balance.base-batch", "4", "--balance.cost", "events"),
    ]
    runs = [tmp_path / "one", tmp_path / "two"]
    assert main(["train", *arguments, "--run-dir", str(runs[0])]) == 0
    done = train([*arguments, "--run-dir", str(runs[1])])
    assert done.returncode == 0, done.stderr
    for a, b in zip(*(records(run) for run in runs), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5), a["step"]


def test_ranks_whose_cost_files_differ_train_every_row_once(data, tmp_path) -> None:
    """Each rank has another cost.json in its directory: all order the rows by that of rank 0, and stop at its error."""
    names = [stream.name for stream in read_schema(data).streams]
    for rank, name in enumerate(names):
        (tmp_path / str(rank)).mkdir()
        cost = {"time": {"unit": "events", "terms": [{"stream": name}]}}
        (tmp_path / str(rank) / "cost.json").write_text(json.dumps(cost))
    arguments = [
        *(*ARGUMENTS, "--data", str(data), "--data.global-batch-size", "32", "--data.logical-shards", "4"),
        *("--balance.method", "base", "--balance.base-batch", "2", "--balance.cost", "cost.json"),
        *("--train.steps", "None", "--train.ledger", "True", "--train.checkpoint-every", "0"),
    ]

    def train_apart(name: str, code: int) -> str:
        worker = Path(__file__).with_name("own_folder_worker.py")
        started = ["train", *arguments, "--run-dir", str(tmp_path / name)]
        return run_worker(worker, [str(tmp_path), str(code), *started], world=2)

    train_apart("run", 0)
    report = verify_ledger(tmp_path / "run" / "ledger", data)
    assert (report.lost, report.twice) == ((), ())
    assert json.loads((tmp_path / "run" / "cost.json").read_text())["time"]["terms"][0]["stream"] == names[0]
    (tmp_path / "0" / "cost.json").write_text("{")
    said = train_apart("bad", 1)
    assert said.count("balance.cost is 'cost.json'") == 2, said
    assert said.count("rank 0 reported") == 1, said


@pytest.mark.slow
def test_a_stream_is_balanced_across_its_edge(data, tmp_path) -> None:
    """Two processes with the balancer, which reads ahead, and one without: the same windows, steps and losses; and a
    run that stopped at an edge goes on as the one that went through.
    """
    log = tmp_path / "log"
    tables = {file.split: pq.read_table(data / file.path) for file in read_schema(data).files}
    write_dataset(log, read_schema(data), tables, rows_per_group=10)
    seconds = 150_000
    windows = time_windows(log, seconds=seconds)
    edge = -(-windows[0].rows // 28)
    assert len(windows) > 2
    arguments = [
        *(*ARGUMENTS, "--data", str(log), "--data.stream-seconds", str(seconds), "--train.steps", str(2 * edge + 1)),
        *("--train.checkpoint-every", str(edge)),
    ]
    runs = [tmp_path / "one", tmp_path / "two"]
    assert main(["train", *arguments, "--run-dir", str(runs[0])]) == 0
    done = train([*arguments, *GLOBAL, "--run-dir", str(runs[1])])
    assert done.returncode == 0, done.stderr
    first, second = (records(run) for run in runs)
    assert len(first) == len(second) == 2 * edge + 1
    for a, b in zip(first, second, strict=True):
        assert [a[name] for name in ("step", "samples", "tokens")] == [
            b[name] for name in ("step", "samples", "tokens")
        ]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5), a["step"]
    whole = [b["imbalance"]["load"] for b in second if b["step"] % edge == 1]
    assert len(whole) == 3
    assert max(whole) <= 1.02
    for step in (2 * edge + 1, 2 * edge):
        shutil.rmtree(step_directory(runs[1] / "checkpoints", step), ignore_errors=True)
    done = train(["--resume", "--run-dir", str(runs[1])])
    assert done.returncode == 0, done.stderr
    assert f"resumed from step {edge}" in done.stdout
    assert [(r["step"], r["loss"]) for r in records(runs[1])] == [(r["step"], r["loss"]) for r in second]


def test_quarantined_rows_are_the_same_with_the_balancer(data, spoil, tmp_path) -> None:
    """A group that one of two processes cannot use: both train the other rows once, and the ledger says so."""
    spoilt = without_hashes(spoil(data)[0])
    run = tmp_path / "run"
    arguments = ["--data", str(spoilt), "--train.ledger", "True", "--data.max-quarantined-rows", "40"]
    done = train(
        [*ARGUMENTS, *GLOBAL, *arguments, "--train.steps", "9", "--train.checkpoint-every", "9", "--run-dir", str(run)]
    )
    assert done.returncode == 0, done.stderr
    (noted,) = records(run, "quarantine")
    assert [(group["row_group"], group["rows"]) for group in noted["groups"]] == [(3, 40)]
    assert records(run)[-1]["samples"] == 200
    assert main(["data", "ledger", str(run)]) == 0
    assert verify_ledger(run / "ledger", data, quarantined=ids_of_group(data, 3)).ok


def ids_of_group(data: Path, group: int) -> frozenset[int]:
    path = next(data.glob("train-*.parquet"))
    return frozenset(pq.ParquetFile(path).read_row_group(group, columns=["sample_id"])["sample_id"].to_pylist())


@pytest.mark.slow
def test_a_budget_is_cut_alike_on_both(one, data, tmp_path) -> None:
    """A small budget in events: ranks need different numbers of micro-batches, and the losses stay."""
    run = tmp_path / "run"
    choice = ["--balance.cost", "events", "--balance.budget", "200"]
    done = train([*ARGUMENTS, *choice, "--data", str(data), "--run-dir", str(run)])
    assert done.returncode == 0, done.stderr
    for a, b in zip(records(one), records(run), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5), a["step"]


def without_hashes(data: Path) -> Path:
    """As version 1.0 wrote it: the value itself must be found, not the changed file."""
    schema = json.loads((data / "schema.json").read_text())
    schema["files"] = [{key: file[key] for key in ("path", "split", "rows")} for file in schema["files"]]
    (data / "schema.json").write_text(json.dumps(schema))
    return data


def test_a_row_that_one_rank_cannot_read_stops_both(data, spoil, tmp_path) -> None:
    run = tmp_path / "run"
    spoilt = without_hashes(spoil(data)[0])
    order = ["--data.shuffle", "False", "--data.global-batch-size", "40", "--data.window-groups", "1"]
    done = train([*ARGUMENTS, *GLOBAL, *order, "--data", str(spoilt), "--run-dir", str(run)])
    assert done.returncode == 1
    named = [line for line in done.stderr.splitlines() if "error: " in line and line.startswith("gemline rank")]
    assert len(named) == 2, done.stderr
    for line in named:
        assert "row group 3, row 10" in line
        assert "label.click" in line
    assert sum("reported" in line for line in named) == 1
