"""T6, T8: whoever dies, and however, the job recovers or ends with a code that is not 0 and a cause; and never hangs.

T8 forks its jobs from the zygote; T6 starts torchrun, and kills torchrun, its processes, or all at once. What goes on
afterwards must be, to the last bit, the run that nothing happened to.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from gem_pipelines.flight import read_flights
from gem_pipelines.rundir import read_records
from gem_pipelines.watchdog import process_state
from super_jobs import digests, losses
from test_super_kill import arguments

WORLD, STEPS = 2, 40
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


@pytest.fixture(scope="module")
def straight(zygote, debug_data, tmp_path_factory):
    run = tmp_path_factory.mktemp("straight") / "run"
    pids = zygote.start(arguments(run, debug_data, STEPS, beside=True), world=WORLD, output=run.parent / "out")
    assert zygote.wait(pids, seconds=100) == [0] * WORLD, (run.parent / "out").read_text()[-3000:]
    return losses(run), digests(run)


def finish(zygote, run, data, straight, *, beside=True):
    """One more start, to the end; then all is as if nothing had happened."""
    output = run.parent / "out"
    pids = zygote.start(arguments(run, data, STEPS, beside=beside), world=WORLD, output=output)
    assert zygote.wait(pids, seconds=100) == [0] * WORLD, output.read_text()[-3000:]
    assert (losses(run), digests(run)) == straight


LAST_SAVE = {"name": "failpoint", "place": "before_rename", "hit": 4, "error": True}
FAULTS = {
    "a rank leaves with code 0": ({"name": "leave", "step": 17}, None, ()),
    "a fault of the program": ({"name": "fail", "step": 17}, None, ()),
    "the reader dies": ({"name": "reader_is_gone", "step": 17}, None, ()),
    "a fault at the end": ({"name": "finally"}, None, ()),
    "the last save fails": (LAST_SAVE, 0, ()),
    "the last save fails, others may": (LAST_SAVE, 0, ("--train.on-save-error", "continue")),
}


@pytest.mark.parametrize("beside", [True, False], ids=["beside", "in line"])
@pytest.mark.parametrize("name", FAULTS)
def test_t8_code_0_means_done(zygote, debug_data, straight, rng, name, beside, tmp_path):
    fault, where, more = FAULTS[name]
    rank = rng.randrange(WORLD) if where is None else where
    run, output = tmp_path / "run", tmp_path / "out"
    command = [*arguments(run, debug_data, STEPS, beside=beside), *more]
    begin = time.monotonic()
    pids = zygote.start(command, world=WORLD, output=output, faults={rank: fault})
    codes = zygote.wait(pids, seconds=60)
    assert None not in codes, output.read_text()[-3000:]
    assert time.monotonic() - begin < 60
    assert any(codes), "no process says that something went wrong"
    if fault["name"] == "leave":
        assert codes[1 - rank] != 0
    elif fault["name"] != "finally":  # where only closing failed, the other one was done
        assert 0 not in codes, output.read_text()[-3000:]
        ends = [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "end"]
        assert ends == [], "the record of an end that was not reached"
    text = output.read_text()
    assert re.search(r"gemline( rank \d)?: error|Traceback", text), text[-2000:]
    finish(zygote, run, debug_data, straight, beside=beside)


def test_t6_twenty_restarts_in_a_row(zygote, debug_data, straight, rng, count, counted, tmp_path):
    """Rank 0, which writes, records and holds the lock, dies in every start."""
    run, output, restarts = tmp_path / "run", tmp_path / "out", count(fast=4, full_count=20)
    for _ in range(restarts):
        done = max(digests(run), default=0)
        fault = {0: {"name": "die", "step": min(STEPS, done + rng.randint(1, 3))}}
        pids = zygote.start(arguments(run, debug_data, STEPS, beside=True), world=WORLD, output=output, faults=fault)
        codes = zygote.wait(pids, seconds=30)
        assert None not in codes, output.read_text()[-3000:]
        assert codes[0] == -signal.SIGKILL
        assert codes[1] != 0
    finish(zygote, run, debug_data, straight)
    counted("restarts in a row", restarts)


class Launched:
    """A job under torchrun, in a process group of its own."""

    def __init__(self, command, log):
        self.log = log
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with open(log, "ab") as out:
            self.job = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait_for_step(self, run, step):
        """Pids of the ranks when all are in `step` or further."""
        deadline = time.monotonic() + 90
        while self.job.poll() is None and time.monotonic() < deadline:
            flights = [f for f in read_flights(run / "supervision") if process_state(f.pid) not in ("", "Z")]
            if len(flights) == WORLD and min(f.step for f in flights) >= step:
                return [f.pid for f in flights]
            time.sleep(0.002)
        pytest.fail(f"step {step} was not reached, code {self.job.poll()}:\n" + self.log.read_text()[-3000:])

    def code(self, seconds):
        try:
            return self.job.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self):
        if self.job.poll() is None:
            os.killpg(self.job.pid, signal.SIGKILL)


def gone(pids, seconds):
    """Whether all of these processes ended within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(process_state(pid) in ("", "Z") for pid in pids):
            return True
        time.sleep(0.02)
    return False


def torchrun(run, data):
    return [*TORCHRUN, "--standalone", "-m", "gem_pipelines", *arguments(run, data, STEPS, beside=True)]


def test_t6_torchrun_itself_is_killed(zygote, debug_data, straight, rng, counted, tmp_path):
    """Its processes must not train on unseen, with the lock held."""
    run, log = tmp_path / "run", tmp_path / "log"
    launched = Launched(torchrun(run, debug_data), log)
    try:
        pids = launched.wait_for_step(run, rng.randint(3, 12))
        os.kill(launched.job.pid, signal.SIGKILL)
        begin = time.monotonic()
        assert gone(pids, 10), log.read_text()[-3000:]
        counted("processes ended after torchrun", f"{time.monotonic() - begin:.1f} s")
    finally:
        launched.close()
    assert "the launcher, process" in log.read_text()
    assert max(losses(run)) < STEPS
    finish(zygote, run, debug_data, straight)


def test_t1_the_whole_group_is_killed(zygote, debug_data, straight, rng, count, counted, tmp_path):
    """torchrun and all its processes at one random moment, then the same command again."""
    rounds = count(fast=1, full_count=4)
    for number in range(rounds):
        (tmp_path / str(number)).mkdir()
        run, log = tmp_path / str(number) / "run", tmp_path / str(number) / "out"
        for _ in range(2):
            launched = Launched(torchrun(run, debug_data), log)
            try:
                pids = launched.wait_for_step(run, rng.randint(1, STEPS - 8))
                time.sleep(rng.uniform(0, 0.1))
                os.killpg(launched.job.pid, signal.SIGKILL)
                for pid in pids:  # torchrun gives each a session of its own
                    if process_state(pid):
                        os.kill(pid, signal.SIGKILL)
                assert launched.code(10) == -signal.SIGKILL
                assert gone(pids, 10)
            finally:
                launched.close()
        launched = Launched(torchrun(run, debug_data), log)
        try:
            assert launched.code(100) == 0, log.read_text()[-3000:]
        finally:
            launched.close()
        assert (losses(run), digests(run)) == straight
    counted("groups killed twice, equal to the bit", f"{rounds} of {rounds}")


def test_t6_the_port_is_taken(debug_data, tmp_path):
    """By a program that does not answer: the job ends within 30 s of work, and says which port."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [*TORCHRUN, "--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "gem_pipelines"]
        launched = Launched([*command, *arguments(tmp_path / "run", debug_data, STEPS, beside=True)], tmp_path / "log")
        try:
            code = launched.code(60)
        finally:
            launched.close()
    text = (tmp_path / "log").read_text()
    assert code not in (0, None), text[-3000:]
    assert str(port) in text
    assert "EADDRINUSE" in text or "in use" in text
