"""The next step's ids are sent while this one is computed: the same bits, and errors stay with their own step."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gem_pipelines.batches import BatchError
from gem_pipelines.ready import NotReady
from gem_pipelines.timing import PartClock


def run(job, count, *, announce, change=lambda batches, step: batches):
    """Steps outside Job.train; the next step's batches are announced or not."""
    steps, records, clock = job._steps(), [], PartClock(device=torch.device("cpu"))
    batches = change(job._read(steps), 1)
    for step in range(1, count + 1):
        coming = change(job._read(steps), step + 1)
        records.append(job.trainer.step(batches, clock=clock, upcoming=coming if announce else None))
        batches = coming
    return records


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_same_bits_as_without(make_job, state_of, accumulate):
    made = [make_job(f"{announce}", data={"accumulate": accumulate}) for announce in (False, True)]
    found = [run(job, 4, announce=announce) for job, announce in zip(made, (False, True), strict=True)]
    assert found[0] == found[1]
    first, second = (state_of(job) for job in made)
    assert {k: v for k, v in first.items() if k != "state"} == {k: v for k, v in second.items() if k != "state"}


@pytest.mark.parametrize("settings", [{}, {"data": {"accumulate": 2}}, {"balance": {"budget": 1e5}}])
def test_the_same_bits_where_a_thread_checks_and_packs(make_job, state_of, settings):
    plain, job = make_job("alone", **settings), make_job("thread", **settings)
    job.trainer.threads = ThreadPoolExecutor(1)
    for one in (plain, job):
        run(one, 4, announce=True)
    first, second = state_of(plain), state_of(job)
    assert {k: v for k, v in first.items() if k != "state"} == {k: v for k, v in second.items() if k != "state"}


def test_what_a_thread_finds_is_raised_at_its_own_step(make_job):
    spoil = lambda batches, step: with_label(batches, 7.0) if step == 3 else batches  # noqa: E731
    job = make_job("thread")
    job.trainer.threads = ThreadPoolExecutor(1)
    with pytest.raises(BatchError, match=r"label\.click is 7\.0"):
        run(job, 4, announce=True, change=spoil)
    assert job.trainer.position.step == 2


def with_label(batches, value):
    labels = batches[0].labels.clone()
    labels[0, 0] = value
    return [dataclasses.replace(batches[0], labels=labels), *batches[1:]]


def test_a_bad_batch_stops_its_own_step(make_job, state_of):
    """Step 3 holds a label of 7: steps 1 and 2 are trained, with it announced in step 2, and step 3 raises."""
    spoil = lambda batches, step: with_label(batches, 7.0) if step == 3 else batches  # noqa: E731
    plain, job = make_job("plain"), make_job("spoilt")
    run(plain, 2, announce=False)
    with pytest.raises(BatchError, match=r"label\.click is 7\.0"):
        run(job, 4, announce=True, change=spoil)
    assert job.trainer.position.step == 2
    first, second = state_of(plain), state_of(job)
    assert {k: v for k, v in first.items() if k != "state"} == {k: v for k, v in second.items() if k != "state"}


def test_a_step_left_out_leaves_the_announced_one(make_job):
    spoil = lambda batches, step: with_label(batches, 7.0) if step == 2 else batches  # noqa: E731
    job = make_job("skip", train={"max_skipped_steps": 1})
    records = run(job, 4, announce=True, change=spoil)
    assert [record["kind"] for record in records] == ["train", "skip", "train", "train"]


def test_batches_that_cannot_be_read_stop_the_step_that_needs_them(make_job):
    job = make_job("broken")
    steps, clock = job._steps(), PartClock(device=torch.device("cpu"))
    error = ValueError("column label.click of row 5 is broken")
    job.trainer.step(job._read(steps), clock=clock, upcoming=error)
    assert isinstance(job.trainer._ahead, NotReady)
    with pytest.raises(ValueError, match="row 5 is broken") as caught:
        job.trainer.stop_together(error)
    assert caught.value is error


def test_nothing_is_announced_across_checkpoints_evaluations_and_epochs(make_job):
    """10 steps an epoch: checkpoints at 4 and 8, evaluations at 6 and 12, an epoch's end at 10, the end at 12."""
    job = make_job("border", train={"steps": 12, "checkpoint_every": 4, "eval_every": 6})
    steps, announced = job._steps(), []
    for step in range(1, 13):
        job.trainer.position.step = step - 1
        if job._announce(steps, job._read(steps)) is not None:
            announced.append(step)
    assert announced == [1, 2, 3, 5, 7, 9, 11]
    off = make_job("off", train={"steps": 12}, parallel={"overlap": False})
    assert off._announce(off._steps(), off._read(off._steps())) is None


def test_a_batch_reaches_the_model_as_one_buffer(make_job, monkeypatch):
    """Every tensor that the step computes with lies in one storage, and holds the bits that were read."""
    from gem_data.testing import batch_difference
    from gem_pipelines import trainer as module

    seen = []
    original = module.to_model_input
    monkeypatch.setattr(
        module, "to_model_input", lambda batch, *a, **k: (seen.append(batch), original(batch, *a, **k))[1]
    )
    job = make_job("packed")
    batches = job._read(job._steps())
    job.trainer.step(batches, clock=PartClock(device=torch.device("cpu")))
    (batch,) = seen
    tensors = [batch.labels, batch.ids.values(), batch.ids.lengths(), *(s.times for s in batch.streams.values())]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert batch_difference(batch, batches[0]) is None
    assert batches[0].labels.untyped_storage().data_ptr() != batch.labels.untyped_storage().data_ptr()


def test_a_packed_batch_moves_by_one_transfer(make_job, monkeypatch):
    """The path of a device, with the CPU's copy in its place: one call for each micro-batch, the same bits."""
    from types import SimpleNamespace

    from gem_data.testing import batch_difference
    from gem_pipelines import ready as module

    job = make_job("moved", data={"accumulate": 2})
    batches = job._read(job._steps())
    ready = module.make_ready(batches, step=1, **job.trainer._ready_parts())
    calls, move = [], module.move_batch
    monkeypatch.setattr(module, "move_batch", lambda packed, device: (calls.append(packed), move(packed, "cpu"))[1])
    moved = ready.on_device(SimpleNamespace(type="elsewhere"))
    assert len(calls) == 2
    assert [batch_difference(there, here) for there, here in zip(moved, batches, strict=True)] == [None, None]
