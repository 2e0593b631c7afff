"""C4: a checkpoint written beside training holds exactly its step; saves wait in turn; no failure is lost."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from gem_pipelines import failpoints
from gem_pipelines.checkpoint import capture
from gem_pipelines.checkpoint_format import list_steps, read_checkpoint, step_directory
from gem_pipelines.errors import CheckpointError


@pytest.fixture
def gate():
    """Holds the writer at its first shard until `open` is set; `reached` tells that it is there."""

    class Gate:
        reached, open = threading.Event(), threading.Event()

        def __call__(self, name):
            if name == "after_shard_open":
                self.reached.set()
                assert self.open.wait(30)

    gate = Gate()
    failpoints.install(gate)
    yield gate
    gate.open.set()
    failpoints.install(None)


def bits(tensors):
    return {key: value.detach().cpu().numpy().tobytes() for key, value in tensors.items()}


def test_c4_the_file_holds_the_step_of_its_snapshot(make_job, take_steps, gate):
    job = make_job(train={"checkpoint_async": True})
    take_steps(job, 2)
    captured = capture(job.trainer, job.loader)
    expected, state = bits(captured.tensors), captured.state
    job.saver.save(job.trainer, job.loader)
    assert gate.reached.wait(30)
    assert list_steps(job.directory.checkpoints) == []  # save has returned, nothing is published
    take_steps(job, 3)
    with torch.no_grad():
        for parameter in job.trainer.parallel.module.parameters():
            parameter.fill_(float("nan"))
        for moments in job.trainer.optimizer.adamw.state.values():
            moments["exp_avg"].fill_(float("nan"))
    spoilt = {
        name: {k: torch.full_like(v, 7.0) for k, v in parts.items()}
        for name, parts in job.trainer.parallel.tables.table_state().items()
    }
    job.trainer.parallel.tables.load_table_state(spoilt)
    gate.open.set()
    job.saver.close()
    read = read_checkpoint(step_directory(job.directory.checkpoints, 2))
    assert bits(read.tensors) == expected
    assert read.state == state
    job.saver.finish(2)


def test_c4_a_save_waits_for_the_one_before_it(make_job, take_steps, gate, monkeypatch):
    job = make_job(train={"checkpoint_async": True})
    take_steps(job, 1)
    job.saver.save(job.trainer, job.loader)
    assert gate.reached.wait(30)
    assert not gate.open.is_set()  # the first has returned, and cannot have been written
    take_steps(job, 1)
    waiting, inner = threading.Event(), job.saver._join

    def join():
        waiting.set()
        inner()

    def open_later():
        assert waiting.wait(30)
        time.sleep(0.3)
        gate.open.set()

    monkeypatch.setattr(job.saver, "_join", join)
    opener = threading.Thread(target=open_later)
    opener.start()
    job.saver.save(job.trainer, job.loader)
    assert gate.open.is_set()
    opener.join()
    job.saver.finish(2)
    first, second = job.saver.records()
    assert (first["step"], second["step"]) == (1, 2)
    assert first["waited_seconds"] < 0.3 <= second["waited_seconds"] <= second["stall_seconds"]
    assert first["seconds"] >= 0.3
    assert list_steps(job.directory.checkpoints) == [1, 2]


def test_c4_the_end_waits_and_tells(make_job, take_steps, gate):
    job = make_job(train={"checkpoint_async": True})
    take_steps(job, 1)
    with pytest.raises(CheckpointError, match="step 1 is not durable: the newest that this job has written is of"):
        job.saver.finish(1)
    job.saver.save(job.trainer, job.loader)
    threading.Timer(0.3, gate.open.set).start()
    job.saver.finish(1)
    assert list_steps(job.directory.checkpoints) == [1]


def test_a_failed_write_is_known_at_the_next_step(make_job, take_steps):
    job = make_job(train={"checkpoint_async": True})
    take_steps(job, 1)

    def hook(name):
        if name == "before_rename":
            raise OSError(5, "Input/output error")

    failpoints.install(hook)
    try:
        job.saver.save(job.trainer, job.loader)
        job.saver.close()
    finally:
        failpoints.install(None)
    with pytest.raises(CheckpointError, match=r"step-00000001 was not written: .*Input/output error"):
        take_steps(job, 1)
    assert job.trainer.position.step == 1
