"""Restarts through torchrun itself: `gemline launch` outlives a SIGKILL of any rank, and equals the run without one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from gem_pipelines.flight import read_flights
from super_jobs import Zygote, digests, losses
from test_super_kill import arguments

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

WORLD, STEPS = 2, 60


def test_t1_restarted_by_torchrun(debug_data, rng, counted, tmp_path):
    straight, run = tmp_path / "straight", tmp_path / "run"
    zygote = Zygote()
    pids = zygote.start(arguments(straight, debug_data, STEPS, beside=True), world=WORLD, output=tmp_path / "out")
    assert zygote.wait(pids, seconds=100) == [0] * WORLD
    zygote.close()
    given = [a for a in arguments(run, debug_data, STEPS, beside=True)[1:] if a != "--auto-resume"]
    command = [sys.executable, "-m", "gem_pipelines", "launch", "--processes", str(WORLD), "--restarts", "3", *given]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    killed = []
    try:
        for target in sorted(rng.sample(range(5, STEPS - 5), 2)):
            victim, deadline = rng.randrange(WORLD), time.monotonic() + 90
            while job.poll() is None:
                assert time.monotonic() < deadline
                flights = {flight.rank: flight for flight in read_flights(run / "supervision")}
                if len(flights) == WORLD and flights[victim].step >= target and flights[victim].pid not in killed:
                    break
                time.sleep(0.002)
            killed.append(flights[victim].pid)
            os.kill(killed[-1], signal.SIGKILL)
            begin = time.monotonic()
            while job.poll() is None and {f.pid for f in read_flights(run / "supervision")} & set(killed):
                assert time.monotonic() < begin + 60
                time.sleep(0.01)
            counted(f"recovery {len(killed)}", f"{time.monotonic() - begin:.1f} s from the kill to a new start of all")
        error = job.communicate(timeout=120)[1]
    finally:
        job.kill()
    assert job.returncode == 0, error[-3000:]
    assert losses(run) == losses(straight)
    assert digests(run) == digests(straight)
    assert len(killed) == 2


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (["--parallel.shard", "4"], "the mesh does not fit 2 ranks"),  # found when the processes have met
        (["--train.device", "cuda"], "torch sees no CUDA device"),  # before
        (["--data"], "argument --data: expected one argument"),  # in the command
    ],
)
def test_a_mistake_is_not_started_again(debug_data, mistake, words, tmp_path):
    run = tmp_path / "run"
    given = [a for a in arguments(run, debug_data, STEPS, beside=True)[1:] if a != "--auto-resume"]
    command = [sys.executable, "-m", "gem_pipelines", "launch", "--processes", "2", *given, *mistake]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 1, done.stderr[-3000:]
    assert words in done.stderr
    assert "fault of the program" not in done.stderr
    assert not run.exists()


def test_a_signal_ends_launch_with_its_number(debug_data, tmp_path):
    run = tmp_path / "run"
    given = [a for a in arguments(run, debug_data, 10**6, beside=True)[1:] if a != "--auto-resume"]
    command = [sys.executable, "-m", "gem_pipelines", "launch", "--processes", "2", *given]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while len(read_flights(run / "supervision")) < 2:
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        error = job.communicate(timeout=60)[1]
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGTERM, error[-3000:]
    assert "fault of the program" not in error
