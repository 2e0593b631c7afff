"""What a run writes ahead of the checkpoint beside it: on resume it is cut back to what is durable.

The ledger's segment, records, predictions and TensorBoard events of step k are there before the checkpoint of step k
is. Where that one never becomes durable, the run goes on from an earlier step and all of them are made again: each
sample once in the ledger, each step once in the records, no figure of a step that the run has not reached.
"""

from __future__ import annotations

import signal

import pyarrow.parquet as pq
import pytest
from gem_pipelines import failpoints
from gem_pipelines.checkpoint_format import list_steps
from gem_pipelines.errors import CheckpointError
from gem_pipelines.job import Request, _run
from gem_pipelines.ledger import read_ledger, verify_ledger
from gem_pipelines.rundir import RunDirectory, read_records
from super_jobs import Zygote, digests, losses

STEPS, EVERY = 28, 5  # two epochs of 14 steps of 24 rows


def request(config, run, *, resume):
    return Request(config=config, run_dir=run, resume=resume, command="test")


def test_a_write_that_fails_beside_training(debug_config, debug_data, runtime, tmp_path):
    """The second save fails after ledger and evaluation of its step are written; the run goes on from the first."""
    train = {"steps": 20, "ledger": True, "checkpoint_every": 4, "report": False, "checkpoint_async": True}
    config = debug_config(train={**train, "eval_every": 8, "predictions": True})
    run, hits = RunDirectory(tmp_path / "run"), []

    def fail_second(name):
        hits.append(name)
        if name == "before_rename" and hits.count(name) == 2:
            raise OSError(5, "Input/output error")

    failpoints.install(fail_second)
    try:
        with pytest.raises(CheckpointError, match="step-00000008 was not written"):
            _run(request(config, run.path, resume=False), run, None, runtime)
    finally:
        failpoints.install(None)
    assert list_steps(run.checkpoints) == [4]
    assert (run.path / "ledger" / "step-00000008.parquet").exists()
    assert run.predictions_file(8).exists()
    # On resume neither checkpoints nor evaluations fall on the steps of before.
    later = debug_config(train={**train, "eval_every": 0, "checkpoint_every": 7, "predictions": True})
    _run(request(later, run.path, resume=True), run, None, runtime)
    report = verify_ledger(run.path / "ledger", debug_data)
    assert (report.lost, report.twice, report.steps, report.trained) == ((), (), 20, 640)
    assert read_ledger(run.path / "ledger")["step"].tolist() == [s for s in range(1, 21) for _ in range(32)]
    records = read_records(run.metrics_file)
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 21))
    assert [r["step"] for r in records if r["kind"] == "eval"] == [20]
    assert [path.name for path in run.path.glob("predictions-*")] == ["predictions-20.parquet"]


def arguments(run, data):
    return [
        *("train", "--recipe", "debug", "--data", str(data), "--run-dir", str(run), "--auto-resume"),
        *("--data.global-batch-size", "24", "--train.steps", str(STEPS), "--train.checkpoint-every", str(EVERY)),
        *("--train.peak-flops-per-s", "1e9", "--train.survey-rows", "0", "--train.profile-every", "0"),
        *("--train.tensorboard", "False", "--train.print-every", "1000", "--train.ledger", "True"),
        *("--train.report", "False", "--train.eval-every", str(EVERY), "--train.checkpoint-async", "True"),
    ]


@pytest.mark.slow
def test_killed_between_the_ledger_and_the_durable_checkpoint(debug_data, rng, count, counted, tmp_path):
    """At every named place, by SIGKILL: the ledger is the straight run's to the byte, and so is everything else."""
    zygote = Zygote()
    places = list(failpoints.NAMES)
    chosen = rng.sample(places, count(fast=4, full_count=len(places)))
    try:
        run = tmp_path / "straight"
        assert zygote.wait(zygote.start(arguments(run, debug_data), world=1, output=tmp_path / "out"), seconds=60) == [
            0
        ]
        ahead = 0
        expected = (losses(run), digests(run), segments(run))
        for place in chosen:
            again = tmp_path / place
            hit = 1 if place == "during_gc" else 2
            fault = {0: {"name": "failpoint", "place": place, "hit": hit}}
            command, output = arguments(again, debug_data), tmp_path / f"{place}.out"
            killed = zygote.wait(zygote.start(command, world=1, output=output, faults=fault), seconds=60)
            assert killed == [-signal.SIGKILL], output.read_text()[-3000:]
            steps = [int(path.stem.removeprefix("step-")) for path in (again / "ledger").glob("step-*")]
            ahead += max(steps) > max(digests(again), default=0)
            assert zygote.wait(zygote.start(command, world=1, output=output), seconds=60) == [0], output.read_text()[
                -3000:
            ]
            assert (losses(again), digests(again), segments(again)) == expected, place
            report = verify_ledger(again / "ledger", debug_data)
            assert (report.lost, report.twice, report.complete) == ((), (), 2), (place, report)
    finally:
        zygote.close()
    counted("places", f"{len(chosen)} of {len(places)}, in {ahead} the ledger was ahead of the checkpoint")
    assert ahead > 0


def segments(run):
    return {path.name: pq.read_table(path).to_pydict() for path in sorted((run / "ledger").iterdir())}
