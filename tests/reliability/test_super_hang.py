"""T4, T7: a rank that stands still ends all of them in time, with stacks; restarts that get nowhere end with a code.

Two ranks over gloo. T4: limit 3 s; all ranks must have ended 2 s after it. The run then goes on to the end, and to the
last bit as if nothing had happened.
"""

from __future__ import annotations

import json
import signal
import time

import pyarrow.parquet as pq
import pytest
from gem_pipelines.flight import read_flights
from super_jobs import digests, losses

WORLD, STEPS, LIMIT_S = 2, 24, 3.0

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def arguments(run, data):
    return [
        *("train", "--recipe", "debug", "--data", str(data), "--run-dir", str(run), "--auto-resume"),
        *("--data.global-batch-size", "24", "--train.steps", str(STEPS), "--train.checkpoint-every", "10"),
        *("--train.peak-flops-per-s", "1e9", "--train.survey-rows", "0", "--train.profile-every", "0"),
        *("--train.tensorboard", "False", "--train.print-every", "1000", "--train.hang-limit-s", str(LIMIT_S)),
    ]


@pytest.fixture(scope="module")
def straight(zygote, debug_data, tmp_path_factory):
    run = tmp_path_factory.mktemp("straight") / "run"
    codes = zygote.wait(zygote.start(arguments(run, debug_data), world=WORLD, output=run.parent / "out"), seconds=100)
    assert codes == [0] * WORLD, (run.parent / "out").read_text()[-3000:]
    return losses(run), digests(run)


def wait_for_step(run, rank, step):
    """When the rank entered the step, on this machine's monotonic clock."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for flight in read_flights(run / "supervision"):
            if flight.rank == rank and flight.step == step and flight.phase == "step":
                return flight.since_ns / 1e9
        time.sleep(0.01)
    pytest.fail(f"rank {rank} never came to step {step}")


CASES = {
    "stop": ("STOPPED (SIGSTOP)", "in stop"),
    "hold_gil": ("its Python threads do not run", "in hold_gil"),
    "sleep": ("", "in sleep"),
    "skip_collective": ("", "in skip_collective"),
    "read_forever": ("", "in read_forever"),
}


@pytest.mark.parametrize("fault", CASES)
def test_t4_a_rank_that_stands_still_ends_all(zygote, debug_data, straight, rng, count, counted, fault, tmp_path):
    took = []
    for number in range(count(fast=1, full_count=5)):
        rank, step = rng.randrange(WORLD), rng.choice([7, 14, 17])
        (tmp_path / str(number)).mkdir()
        run = tmp_path / str(number) / "run"
        command, output = arguments(run, debug_data), run.parent / "out"
        faults = {rank: {"name": fault, "step": step}}
        at = step - (fault == "read_forever")  # the batch is asked for during the step before
        pids = zygote.start(command, world=WORLD, output=output, faults=faults)
        since = wait_for_step(run, rank, at)
        codes = zygote.wait(pids, seconds=LIMIT_S + 10)
        took.append(time.monotonic() - since)
        assert None not in codes, output.read_text()[-3000:]
        assert 0 not in codes
        assert 5 in codes
        assert took[-1] <= LIMIT_S + 2
        (directory,) = (run / "hang").iterdir()
        report = (directory / "report.txt").read_text()
        sign, function = CASES[fault]
        parts = report.split("\nrank ")
        assert parts[0].startswith("HANG: rank ")
        assert f"the limit is {LIMIT_S:.1f} s" in parts[0]
        assert [part[0] for part in parts[1:]] == [str(r) for r in range(WORLD)]
        stuck, other = parts[1 + rank], parts[1 + 1 - rank]
        assert f"in step {at} for" in stuck
        assert sign in stuck
        assert function in stuck, stuck
        for part in (other,) if fault == "hold_gil" else (stuck, other):
            assert "all_reduce [[" in part, part
        for part in (stuck, other):
            assert part.count("File ") > 5
        assert "stop_together" not in other
        codes = zygote.wait(zygote.start(command, world=WORLD, output=output), seconds=100)
        assert codes == [0] * WORLD, output.read_text()[-3000:]
        assert (losses(run), digests(run)) == straight
    counted(f"{fault}: ended after", ", ".join(f"{seconds:.1f} s" for seconds in took) + f" at a limit of {LIMIT_S} s")


def test_t4_a_reader_that_stands_still_does_not_keep_a_job_whose_other_rank_died(
    zygote, debug_data, straight, rng, counted, tmp_path
):
    """The rank that learns of the death closes its loader, whose thread never ends: it is watched there, too."""
    rank, run, output = rng.randrange(WORLD), tmp_path / "run", tmp_path / "out"
    faults = {rank: {"name": "read_forever", "step": 19}, 1 - rank: {"name": "die", "step": 17}}
    pids = zygote.start(arguments(run, debug_data), world=WORLD, output=output, faults=faults)
    since = wait_for_step(run, rank, 17)
    codes = zygote.wait(pids, seconds=LIMIT_S + 10)
    took = time.monotonic() - since
    assert codes[rank] == 5, (codes, output.read_text()[-3000:])
    assert codes[1 - rank] == -signal.SIGKILL
    assert took <= LIMIT_S + 2
    assert "in read_forever" in (run / "hang" / "start-0" / "report.txt").read_text()
    codes = zygote.wait(zygote.start(arguments(run, debug_data), world=WORLD, output=output), seconds=100)
    assert codes == [0] * WORLD, output.read_text()[-3000:]
    assert (losses(run), digests(run)) == straight
    counted("ended after", f"{took:.1f} s at a limit of {LIMIT_S} s")


def test_t7_restarts_that_get_nowhere_end(zygote, debug_data, straight, rng, counted, tmp_path):
    run, output = tmp_path / "run", tmp_path / "out"
    command, rank = arguments(run, debug_data), rng.randrange(WORLD)
    starts = 0
    while True:
        starts += 1
        assert starts <= 8
        fault = {rank: {"name": "die", "step": 17}}
        codes = zygote.wait(zygote.start(command, world=WORLD, output=output, faults=fault), seconds=60)
        assert None not in codes
        assert 0 not in codes
        if 4 in codes:
            break
    assert codes == [4] * WORLD
    assert starts == 5  # one from step 0 to 17, three from 10 to 17, and the one that found out
    message = output.read_text().splitlines()[-1]
    assert "3 restarts in a row began at step 10 and ended before a newer checkpoint, in step 17 (step)" in message
    failed = json.loads((run / "supervision" / "attempts.json").read_text())["failed"]
    rows = failed[0]["rows"]
    assert [attempt["rows"] for attempt in failed] == [rows] * 4
    assert len(rows) == 24
    for sample_id, file, group, row in rows[:5]:
        assert f"sample_id {sample_id} (train-00000.parquet, row group {group}, row {row})" in message
        table = pq.ParquetFile(debug_data / "train-00000.parquet").read_row_group(group, columns=["sample_id"])
        assert table["sample_id"][row].as_py() == sample_id
        assert file == json.loads((debug_data / "schema.json").read_text())["files"].index(
            next(f for f in json.loads((debug_data / "schema.json").read_text())["files"] if f["split"] == "train")
        )
    # Another automatic start ends at once; a person may decide otherwise.
    begin = time.monotonic()
    assert zygote.wait(zygote.start(command, world=WORLD, output=output), seconds=20) == [4] * WORLD
    counted("seconds of a start after the verdict", f"{time.monotonic() - begin:.1f}")
    by_hand = ["train", "--resume", "--run-dir", str(run)]
    assert zygote.wait(zygote.start(by_hand, world=WORLD, output=output), seconds=60) == [0] * WORLD
    assert (losses(run), digests(run)) == straight
