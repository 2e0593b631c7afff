"""T1 and T2 of whole jobs: killed with SIGKILL at random moments and at named places, restarted, equal to the last bit.

Two ranks over gloo, 60 steps, a checkpoint every 10. The supervisor of these tests starts the same command again
(`--auto-resume`) whenever the job has ended before its end. The model has two attention layers, one a stream.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from gem_pipelines import failpoints
from super_jobs import digests, losses

WORLD, STEPS = 2, 60
RANK_LIMIT_S = 30.0  # how long the others may live on after a rank died


def arguments(run, data, steps, *, beside):
    return [
        *("train", "--recipe", "debug", "--data", str(data), "--run-dir", str(run), "--auto-resume"),
        *("--data.global-batch-size", "24", "--train.steps", str(steps), "--train.checkpoint-every", "10"),
        *("--train.peak-flops-per-s", "1e9", "--train.survey-rows", "0", "--train.profile-every", "0"),
        *("--train.tensorboard", "False", "--train.print-every", "1000", "--train.restart-limit", "50"),
        *("--train.checkpoint-async", str(beside), "--train.keep-checkpoints", "4", "--train.predictions", "False"),
        *("--model.layers", "1", "--model.stream.blocks", "hstu"),
    ]


@pytest.fixture(scope="module")
def straight(zygote, debug_data, tmp_path_factory):
    """The job that nothing happened to: (losses by step, digests by step, seconds)."""
    run = tmp_path_factory.mktemp("straight") / "run"
    begin = time.monotonic()
    pids = zygote.start(arguments(run, debug_data, STEPS, beside=True), world=WORLD, output=run.parent / "out")
    codes = zygote.wait(pids, seconds=200)
    assert codes == [0] * WORLD, (run.parent / "out").read_text()[-3000:]
    return losses(run), digests(run), time.monotonic() - begin


def end_of(zygote, pids, output):
    """Exit codes of all ranks. As torchrun does, the others are sent SIGTERM; they see the death by themselves, too,
    but not where the dead rank had not yet joined the group.
    """
    deadline = time.monotonic() + 100
    while all(code is None for code in zygote.wait(pids, seconds=0.0)):
        assert time.monotonic() < deadline, output.read_text()[-3000:]
        time.sleep(0.02)
    codes = zygote.wait(pids, seconds=1.0)
    for pid in pids:
        if pid in zygote.running:
            os.kill(pid, signal.SIGTERM)
    late = zygote.wait([pid for pid, code in zip(pids, codes, strict=True) if code is None], seconds=RANK_LIMIT_S)
    assert None not in late, output.read_text()[-3000:]
    return [code if code is not None else late.pop(0) for code in codes]


def finish(zygote, run, command, straight, *, seen):
    """Start until the end is reached; then everything must be as it is in the run that went through."""
    output = run.parent / "out"
    codes = zygote.wait(zygote.start(command, world=WORLD, output=output), seconds=200)
    assert codes == [0] * WORLD, output.read_text()[-3000:]
    expected, states, _ = straight
    assert losses(run) == expected
    assert digests(run) == states
    for step, figures in seen:
        assert figures == expected[step], f"step {step} was computed otherwise before a kill"
    assert [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []
    assert zygote.running == set()


@pytest.mark.slow
@pytest.mark.distributed
def test_t1_killed_at_random_moments(zygote, debug_data, straight, rng, count, counted, tmp_path):
    runs, most, kills, lost = count(fast=2, full_count=50), count(fast=2, full_count=4, whole=True), 0, 0
    for number in range(runs):
        (tmp_path / f"run-{number}.d").mkdir()
        run = tmp_path / f"run-{number}.d" / "run"
        command = arguments(run, debug_data, STEPS, beside=rng.random() < 0.7)
        seen = []
        for _ in range(rng.randint(1, most)):
            pids = zygote.start(command, world=WORLD, output=run.parent / "out")
            time.sleep(rng.uniform(0.2, straight[2] * 0.8))
            victims = pids if rng.random() < 0.25 else [rng.choice(pids)]
            alive = [pid for pid in victims if zygote.wait([pid], seconds=0) == [None]]
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            codes = end_of(zygote, pids, run.parent / "out")
            kills += bool(alive)
            before = losses(run)
            seen += before.items()
            durable = max(digests(run), default=0)
            lost = max(lost, max(before, default=0) - durable)
            assert not alive or 0 not in codes or durable == STEPS
        finish(zygote, run, command, straight, seen=seen)
    counted("runs equal to the bit", f"{runs} of {runs}, {kills} kills")
    counted("most steps lost", lost)
    assert lost <= 20  # the interval, and the checkpoint that was being written beside


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "in line"])
def test_t2_jobs_killed_at_named_places(zygote, debug_data, straight, rng, count, counted, beside, tmp_path):
    places = [(place, 0) for place in failpoints.WRITER]
    places += [(place, rank) for place in failpoints.EVERY_RANK for rank in range(WORLD)]
    chosen = rng.sample(places, count(fast=3, full_count=len(places)))
    for place, rank in chosen:
        (tmp_path / f"{place}-{rank}").mkdir()
        run = tmp_path / f"{place}-{rank}" / "run"
        command = arguments(run, debug_data, STEPS, beside=beside)
        hit = rng.randint(1, 2) if place == "during_gc" else rng.randint(2, 5)
        fault = {"name": "failpoint", "place": place, "hit": hit}
        pids = zygote.start(command, world=WORLD, output=run.parent / "out", faults={rank: fault})
        codes = end_of(zygote, pids, run.parent / "out")
        assert codes[rank] == -signal.SIGKILL, (place, rank, codes)
        assert 0 not in codes, (place, rank, codes)
        finish(zygote, run, command, straight, seen=list(losses(run).items()))
    counted("places", f"{len(chosen)} of {len(places)}: " + ", ".join(f"{place} {rank}" for place, rank in chosen))
