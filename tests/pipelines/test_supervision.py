"""Limits, records of what ranks do, the count of useless restarts, and the lines of the report."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest
import torch
from gem_data.interface import DataError
from gem_pipelines import job as job_module
from gem_pipelines import loop
from gem_pipelines.cli import main
from gem_pipelines.cli.launch import exit_code
from gem_pipelines.errors import ConfigError, MeetingError, RemoteError
from gem_pipelines.flight import CAPACITY, ENDED, FlightRecorder, clear_flights, read_flights
from gem_pipelines.refusals import VARIABLE, refusal, refusals_noted
from gem_pipelines.restarts import RestartLoopError, earlier_verdict, note_start
from gem_pipelines.runlock import LockError
from gem_pipelines.supervision import Supervision
from gem_pipelines.watchdog import StepLimit, Watchdog, last_collectives, process_state


def test_the_limit_of_a_step_follows_what_steps_take():
    limit = StepLimit(given_s=None, before_s=600.0)
    for _ in range(19):
        limit.add(5.0)
    assert limit.seconds() == 600.0
    limit.add(5.0)
    assert limit.seconds() == 50.0
    for number in range(980):
        limit.add(100.0 if number % 200 == 0 else 0.1)  # 5 of 1000 are slow: under one in a hundred
    assert limit.seconds() == 50.0  # the 20 first steps are still among the slowest hundredth
    for _ in range(1000):
        limit.add(0.1)
    assert limit.seconds() == 30.0
    assert StepLimit(given_s=2.5, before_s=600.0).seconds() == 2.5


def test_a_record_tells_step_phase_and_rows(tmp_path):
    recorder = FlightRecorder(tmp_path, rank=3, attempt=7)
    recorder.enter("step", step=41)
    recorder.rows(torch.tensor([5, 9]), torch.tensor([[0, 1, 2], [0, 1, 3]]))
    (flight,) = read_flights(tmp_path)
    assert (flight.rank, flight.pid, flight.attempt, flight.step, flight.phase) == (3, os.getpid(), 7, 41, "step")
    assert flight.rows.tolist() == [[5, 0, 1, 2], [9, 0, 1, 3]]
    assert 0 <= flight.seconds() < 10
    many = torch.arange(CAPACITY + 5)
    recorder.rows(many, torch.stack([many] * 3, dim=1))
    (flight,) = read_flights(tmp_path)
    assert (flight.row_count, len(flight.rows)) == (CAPACITY + 5, CAPACITY)
    recorder.enter("save", step=41)
    assert len(read_flights(tmp_path)[0].rows) == 0
    (tmp_path / "rank-00009.flight").write_bytes(b"no record")
    assert [flight.rank for flight in read_flights(tmp_path)] == [3]
    clear_flights(tmp_path)
    assert read_flights(tmp_path) == []


def entry(number, name, created):
    return {
        **{"collective_seq_id": number, "profiling_name": name, "input_sizes": [[33]], "input_dtypes": ["Float"]},
        **{"process_group": ["0", "default_pg"], "state": "scheduled", "retired": False, "time_created_ns": created},
    }


def test_collectives_of_both_recorders_in_the_order_of_time(monkeypatch):
    """On a CUDA build those of NCCL are in a recorder of their own; without entries it has no such key."""
    native = torch._C._distributed_c10d
    gloo = {"entries": [entry(7, "gloo:all_reduce", 1), entry(8, "gloo:all_reduce", 3)]}
    monkeypatch.setattr(native, "_dump_fr_trace_json", lambda: json.dumps(gloo).encode())
    monkeypatch.setattr(native, "_dump_nccl_trace_json", lambda: b'{"version": "2.10"}', raising=False)
    assert [line.split(" ")[0] for line in last_collectives()] == ["#7", "#8"]
    nccl = {"entries": [entry(4, "nccl:all_gather", 2)]}
    monkeypatch.setattr(native, "_dump_nccl_trace_json", lambda: json.dumps(nccl).encode())
    assert last_collectives() == [
        "#7 all_reduce [[33]] float of default_pg, scheduled",
        "#4 all_gather [[33]] float of default_pg, scheduled",
        "#8 all_reduce [[33]] float of default_pg, scheduled",
    ]


def die_in(directory, *, step, rank=0, phase="step"):
    recorder = FlightRecorder(directory, rank=rank, attempt=0)
    recorder.enter(phase, step=step)
    recorder.rows(torch.tensor([100 + rank]), torch.tensor([[1, 2, 3]]))


def start(directory, first_step, *, automatic=True):
    files = ["eval.parquet", "train.parquet"]
    return note_start(directory, first_step=first_step, automatic=automatic, limit=3, files=files)


def test_three_starts_from_the_same_checkpoint_are_enough(tmp_path):
    assert start(tmp_path, 0) == (0, "")
    for number, first in enumerate([10, 10, 10], start=1):
        die_in(tmp_path, step=17)
        die_in(tmp_path, step=17, rank=1)
        assert start(tmp_path, first) == (number, "")
    die_in(tmp_path, step=17, rank=1)
    number, verdict = start(tmp_path, 10)
    assert number == 4
    assert "3 restarts in a row began at step 10 and ended before a newer checkpoint, in step 17 (step)" in verdict
    assert "sample_id 101 (train.parquet, row group 2, row 3)" in verdict
    assert earlier_verdict(tmp_path) == verdict
    assert start(tmp_path, 10, automatic=False) == (5, "")
    assert earlier_verdict(tmp_path) == ""
    die_in(tmp_path, step=18)
    assert start(tmp_path, 10) == (6, "")


def test_progress_or_an_end_between_them_is_no_loop(tmp_path):
    start(tmp_path, 0)
    for first in (10, 20, 20, 30, 30, 40):
        die_in(tmp_path, step=first + 5)
        assert start(tmp_path, first)[1] == ""
    for _ in range(5):
        clear_flights(tmp_path)
        die_in(tmp_path, step=60, phase=ENDED)
        assert start(tmp_path, 40)[1] == ""
    failed = json.loads((tmp_path / "attempts.json").read_text())["failed"]
    assert [attempt["from_step"] for attempt in failed] == [0, 10, 20, 20, 30, 30]


def test_the_kernel_says_in_which_state_a_process_is():
    assert process_state(os.getpid()) == "R"
    assert process_state(2**22 + 1) == ""


@pytest.mark.parametrize(
    ("first", "codes", "expected"),
    [(1, [1, 1], 1), (-9, [-9, -15], 137), (1, [1, 4], 4), (-9, [-9, 5], 5), (3, [3, -15], 3)],
)
def test_the_exit_code_of_a_launch(first, codes, expected):
    assert exit_code(first, codes) == expected


def test_the_limit_counts_anew_for_closing_and_the_error_is_told(make_job, tmp_path, monkeypatch, capfd):
    """A loader that is slow to close: the step's record stays, its clock does not; the error is on stderr once."""
    monkeypatch.setattr(loop, "_CLOSING_SECONDS", 0.1)
    for name, seconds in (("slow", 0.4), ("quick", 0.0)):
        job = make_job(name)
        recorder = FlightRecorder(tmp_path / name / "supervision", rank=0, attempt=0)
        job.supervision = Supervision(
            recorder, Watchdog(tmp_path / name, recorder, rank=0, attempt=0, given_s=0, before_s=60)
        )
        failed, closing = [], []

        def fail(*_, failed=failed, **__):
            failed.append(time.monotonic_ns())
            raise OSError("the disk is gone")

        def close(inner=job.loader.close, name=name, closing=closing, seconds=seconds):
            closing.extend(read_flights(tmp_path / name / "supervision"))
            time.sleep(seconds)
            inner()

        monkeypatch.setattr(job.trainer, "step", fail)
        monkeypatch.setattr(job.loader, "close", close)
        with pytest.raises(OSError, match="the disk is gone"):
            job.train(resumed_from=None, survey=None)
        (flight,) = closing
        assert flight.since_ns >= failed[0]
        assert (flight.phase, flight.step, flight.row_count) == ("step", 1, 32)
        told = capfd.readouterr().err
        assert told.count("OSError: the disk is gone") == (name == "slow")
    assert "Traceback" not in told


def test_a_launcher_that_dies_while_the_processes_meet_is_missed(tmp_path, monkeypatch, capfd):
    """Meeting waits inside torch, for minutes, for a peer that died with the launcher."""
    begun = os.getppid()
    parents, ended, left = [begun], [], threading.Event()

    def meet(**options):
        parents[0] = begun + 1
        assert left.wait(5), "the launcher is gone and this process still waits"
        raise SystemExit

    def leave(code):  # called again and again, as it does not end the process
        ended.append(code)
        left.set()

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    monkeypatch.setattr(os, "getppid", lambda: parents[0])
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(job_module, "start_runtime", meet)
    with pytest.raises(SystemExit):
        main(["train", "--recipe", "debug", "--run-dir", str(tmp_path / "run")])
    assert set(ended) == {1}
    assert f"the launcher, process {begun}, is gone" in capfd.readouterr().err


def made_of(cause):
    """A user's mistake, as code makes it of an error of the system."""
    try:
        try:
            raise cause
        except OSError:
            raise DataError("cannot be read") from None
    except DataError as error:
        return error


@pytest.mark.parametrize(
    ("error", "noted"),
    [
        (ConfigError("no such key"), ("no such key", 1)),
        (RestartLoopError("stopped"), ("stopped", 4)),
        (RemoteError("rank 0 reported: disk"), None),  # rank 0 itself knows whether another start would meet it
        (OSError("the store does not answer"), None),
        (made_of(TimeoutError("no answer")), None),  # whatever the message is made of
        (made_of(FileNotFoundError("no such file")), ("cannot be read", 1)),
        (LockError("another job holds it"), None),
        (MeetingError("rank 1 did not come"), None),
        (RuntimeError("a fault"), None),
    ],
)
def test_a_mistake_of_the_set_up_is_noted_for_launch(tmp_path, monkeypatch, error, noted):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "note.json"))
    with pytest.raises(type(error)), refusals_noted():
        raise error
    assert refusal(tmp_path / "note.json") == noted
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(type(error)), refusals_noted():
        raise error
    assert len(list(tmp_path.iterdir())) == (noted is not None)
