"""C3: two jobs in one run directory: exactly one goes on, the others name it; a dead holder's lock is free at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from gem_pipelines import runlock
from gem_pipelines.checkpoint_format import list_steps, step_directory
from gem_pipelines.checkpoint_manifest import find_damage
from gem_pipelines.runlock import Holder, LockError, RunLock, this_process


def fork(action):
    """Run `action` in a fork; its exit code is what `action` returns."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = action()
        finally:
            os._exit(code)
    return pid


def exit_code(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_for(path):
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)


def contend(path, start, done, *, delay=0.0):
    """0: got it and kept it; 1: refused, naming the holder; 2: refused, but too late or namelessly."""
    while time.monotonic() < start:
        pass
    begin = time.monotonic()
    try:
        lock = RunLock.acquire(path)
    except LockError as error:
        named = all(part in str(error) for part in ("in use by job ", "pid ", "host "))
        return 1 if named and time.monotonic() - begin < 5 else 2
    wait_for(done)
    lock.release()
    return 0


def test_c3_of_many_at_the_same_moment_one_goes_on(tmp_path, count, counted):
    rounds = count(fast=3, full_count=60)
    for number in range(rounds):
        path, done = tmp_path / f"{number}.lock", tmp_path / f"{number}.done"
        start = time.monotonic() + 0.05
        pids = [fork(lambda p=path, s=start, d=done: contend(p, s, d)) for _ in range(4)]
        codes = []
        for _ in range(3):  # the three that are refused end by themselves
            pid, status = os.waitpid(-1, 0)
            pids.remove(pid)
            codes.append(os.waitstatus_to_exitcode(status))
        done.touch()
        assert sorted([*codes, exit_code(pids[0])]) == [0, 1, 1, 1]
        assert json.loads(path.read_text())["released"] is True
    counted("rounds of 4 jobs", f"{rounds} of {rounds}")


def hold_until_killed(path, here, *, leave_orphan):
    RunLock.acquire(path)
    if leave_orphan:
        orphan = fork(lambda: time.sleep(30) or 0)
        (here.parent / "orphan").write_text(str(orphan))
    here.touch()
    time.sleep(60)
    return 0


@pytest.mark.parametrize("leave_orphan", [False, True])
def test_c3_the_lock_of_a_killed_job_is_free_at_once(tmp_path, leave_orphan):
    """By the kernel's word, and although a process that it forked lives on."""
    path, here = tmp_path / "run.lock", tmp_path / "here"
    pid = fork(lambda: hold_until_killed(path, here, leave_orphan=leave_orphan))
    wait_for(here)
    with pytest.raises(LockError, match=f"in use by job [0-9a-f]{{12}}, pid {pid} on host "):
        RunLock.acquire(path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    begin = time.monotonic()
    RunLock.acquire(path).release()
    assert time.monotonic() - begin < 0.5
    if leave_orphan:
        os.kill(int((tmp_path / "orphan").read_text()), signal.SIGKILL)


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """The lock of a job on another machine, on a file system that does not pass flock on."""
    monkeypatch.setattr(runlock, "WATCH_SECONDS", 0.5)
    path = tmp_path / "run.lock"
    holder = Holder(job="j0b", pid=1, started="1", host="elsewhere", machine="another")
    path.write_text(json.dumps(vars(holder)))
    return path


def test_c3_another_machine_is_alive_while_it_beats(foreign):
    beating = fork(lambda: [time.sleep(0.1) or os.utime(foreign) for _ in range(8)] and 0)
    with pytest.raises(LockError, match="in use by job j0b, pid 1 on host elsewhere"):
        RunLock.acquire(foreign)
    exit_code(beating)
    old = time.time() - 3600  # its clock may be anywhere: a beat is a change, not a time
    os.utime(foreign, (old, old))
    beating = fork(lambda: [time.sleep(0.1) or os.utime(foreign, (old + n, old + n)) for n in range(8)] and 0)
    with pytest.raises(LockError, match="in use by job j0b"):
        RunLock.acquire(foreign)
    exit_code(beating)


def test_c3_another_machine_is_dead_by_silence_and_age(foreign):
    with pytest.raises(LockError, match=r"last sign of life is \d s old: it counts as dead after 60 s"):
        RunLock.acquire(foreign)
    old = time.time() - 61
    os.utime(foreign, (old, old))
    lock = RunLock.acquire(foreign)
    assert json.loads(foreign.read_text())["pid"] == os.getpid()
    lock.release()


def test_a_lock_that_was_taken_away_stops_the_writing(make_job, take_steps, tmp_path):
    path = tmp_path / "run.lock"
    lock = RunLock.acquire(path)
    lock.check_held()
    job = make_job(train={"checkpoint_async": False})
    job.saver._lock = lock
    take_steps(job, 1)
    path.unlink()
    with pytest.raises(ValueError, match="was removed or replaced while job"):
        job.saver.save(job.trainer, job.loader)
    other = RunLock.acquire(path)
    with pytest.raises(LockError, match="removed or replaced"):
        lock.check_held()
    path.write_text(json.dumps(vars(this_process())))
    with pytest.raises(LockError, match="names job"):
        other.check_held()
    assert list_steps(job.directory.checkpoints) == []
    lock.release()
    other.release()


@pytest.mark.slow
def test_c3_two_jobs_of_one_command(debug_data, tmp_path):
    run = tmp_path / "run"
    arguments = ["--recipe", "debug", "--data", str(debug_data), "--run-dir", str(run), "--train.survey-rows", "0"]
    arguments += ["--train.steps", "60", "--train.checkpoint-every", "1", "--train.keep-checkpoints", "60"]
    arguments += ["--optimizer.schedule", "constant", "--data.global-batch-size", "24"]
    command = [sys.executable, "-m", "gem_pipelines", "train", *arguments]
    jobs = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [job.communicate(timeout=200)[1] for job in jobs]
    assert sorted(job.returncode for job in jobs) == [0, 1]
    loser = next(error for job, error in zip(jobs, errors, strict=True) if job.returncode == 1)
    winner = next(job.pid for job in jobs if job.returncode == 0)
    assert f"pid {winner} on host" in loser or "holds a run already" in loser
    assert list_steps(run / "checkpoints") == list(range(1, 61))
    assert [find_damage(step_directory(run / "checkpoints", step)) for step in range(1, 61)] == [[]] * 60
