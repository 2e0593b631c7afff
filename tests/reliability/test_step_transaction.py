"""D5 and D3: a step that fails leaves everything as it was, to the bit; a step that is left out leaves no trace."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from gem_pipelines import trainer as trainer_module
from gem_pipelines.batches import BatchError
from gem_pipelines.lookup import LARGEST_GRADIENT, join_ids
from gem_pipelines.optimizer import DenseOptimizer, GradientError
from gem_pipelines.trainer import LossError
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def spoil(name: str, value: float, row: int = 3):
    def change(batch):
        changed = getattr(batch, name).clone()
        changed[row, 0] = value
        return dataclasses.replace(batch, **{name: changed})

    return change


def spoil_vector_gradient(monkeypatch: pytest.MonkeyPatch, feature: str, value: float) -> list[int]:
    """The gradient of one element of the last vector of `feature` becomes `value`; returns the sample ids it hits."""
    original, hit = trainer_module.to_model_input, []

    def spoiling(batch, embeddings, **options):
        def hook(grad):
            grad = grad.clone()
            grad[-1, 1] = value
            return grad

        embeddings[feature].register_hook(hook)
        lengths = batch.ids[feature].lengths()
        hit.append(int(batch.sample_ids[int(torch.nonzero(lengths)[-1])]))
        return original(batch, embeddings, **options)

    monkeypatch.setattr(trainer_module, "to_model_input", spoiling)
    return hit


def read_late(job):
    """The step as it is on CUDA: the update is launched before the host knows whether the step is usable."""
    trainer = job.trainer
    trainer.optimizer = DenseOptimizer(
        trainer.parallel.module.named_parameters(),
        job.config.optimizer,
        total_steps=job.total_steps,
        placement=trainer.parallel.placement,
        fused=True,
    )
    trainer.reads_late = True
    return job


def test_an_update_that_the_host_does_not_wait_for_is_the_same_update(make_job, take_steps, state_of):
    """To the bit, against the same fused optimizer with the host waiting."""
    late, waiting = read_late(make_job("late")), read_late(make_job("waiting"))
    waiting.trainer.reads_late = False
    assert take_steps(late, 4) == take_steps(waiting, 4)
    assert state_of(late) == state_of(waiting)


@pytest.mark.parametrize("what", ["table", "dense", "loss"])
def test_an_update_that_the_host_does_not_wait_for_changes_nothing_when_it_must_not(
    make_job, take_steps, state_of, monkeypatch, what
):
    """The device leaves it out: parameters, moments, steps of AdamW, tables and their moments keep their bits."""
    job = read_late(make_job())
    take_steps(job, 2)
    before = state_of(job)
    updates, update = [], job.trainer.optimizer.update
    monkeypatch.setattr(job.trainer.optimizer, "update", lambda *a, **k: (updates.append(1), update(*a, **k))[1])
    if what == "table":
        spoil_vector_gradient(monkeypatch, "item", float("nan"))
    elif what == "dense":
        next(job.trainer.parallel.module.heads.parameters()).register_hook(lambda grad: grad * float("nan"))
    else:
        original = trainer_module.bce_by_task
        monkeypatch.setattr(trainer_module, "bce_by_task", lambda *a: original(*a) * float("inf"))
    with pytest.raises((GradientError, LossError), match=r"step 3: .* Nothing of it was trained"):
        take_steps(job, 1)
    assert updates == [1]  # the update ran
    assert state_of(job) == before
    assert all(parameter.grad is None for parameter in job.trainer.parallel.module.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e20])
@pytest.mark.parametrize("feature", ["item", "organic.item"])
def test_one_bad_element_in_a_table_gradient_changes_nothing(
    make_job, take_steps, state_of, monkeypatch, feature, value
):
    job = make_job()
    take_steps(job, 2)
    before = state_of(job)
    hit = spoil_vector_gradient(monkeypatch, feature, value)
    with pytest.raises(GradientError, match="a gradient that would enter a table is not finite or above 1e") as caught:
        take_steps(job, 1)
    assert f"step 3: a gradient that would enter a table is not finite or above {LARGEST_GRADIENT:g}: rank 0: " in str(
        caught.value
    )
    assert f"feature '{feature}' of sample_id {hit[0]}" in str(caught.value)
    assert state_of(job) == before
    assert all(parameter.grad is None for parameter in job.trainer.parallel.module.parameters())


def test_a_bad_dense_gradient_changes_nothing(make_job, take_steps, state_of):
    job = make_job()
    take_steps(job, 2)
    before = state_of(job)
    handle = next(job.trainer.parallel.module.heads.parameters()).register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(GradientError, match=r"step 3: the norm of the dense gradients is nan.*32 samples: \d+, "):
        take_steps(job, 1)
    assert state_of(job) == before
    handle.remove()
    (record,) = take_steps(job, 1)
    assert record["kind"] == "train"


def test_a_late_micro_batch_that_fails_takes_back_the_earlier_ones(make_job, take_steps, state_of, monkeypatch):
    """Three micro-batches a step, the last of which has a bad gradient: the first two update no table."""
    job = make_job(data={"global_batch_size": 16, "accumulate": 3})
    take_steps(job, 1)
    before, original, seen = state_of(job), trainer_module.to_model_input, []

    def spoiling(batch, embeddings, **options):
        seen.append(batch.step)
        if len(seen) == 3:
            embeddings["item"].register_hook(lambda grad: grad + float("nan"))
        return original(batch, embeddings, **options)

    monkeypatch.setattr(trainer_module, "to_model_input", spoiling)
    with pytest.raises(GradientError, match="would enter a table"):
        take_steps(job, 1)
    assert len(seen) == 3
    assert state_of(job) == before


@pytest.mark.parametrize("what", ["label", "gradient"])
def test_a_step_left_out_leaves_no_trace(make_job, take_steps, state_of, monkeypatch, what):
    """Parameters, tables, moments and random states are those of a run that never saw the batch."""
    settings = {"train": {"max_skipped_steps": 1, "steps": 10}}
    job, other = make_job("skipping", **settings), make_job("never", **settings)
    take_steps(job, 2)
    if what == "label":
        (record,) = take_steps(job, 1, change=spoil("labels", 7.0))
    else:
        with monkeypatch.context() as patched:
            spoil_vector_gradient(patched, "item", float("nan"))
            (record,) = take_steps(job, 1)
    assert (record["kind"], record["step"], record["skipped_steps"]) == ("skip", 3, 1)
    assert len(record["sample_ids"]) == 32
    assert record["error"] == {"label": "BatchError", "gradient": "GradientError"}[what]
    take_steps(job, 1)
    take_steps(other, 2)
    steps = other._steps()
    dropped = other._read(steps)
    assert dropped[0].sample_ids.tolist() == record["sample_ids"]
    other.loader.mark_trained(dropped[-1])
    other.trainer.position.step += 1
    take_steps(other, 1)
    left, right = state_of(job), state_of(other)
    skipped = left["state"]["position"]
    assert (skipped["skipped_steps"], skipped["skipped_samples"], skipped["samples"]) == (1, 32, 96)
    right["state"]["position"] |= {"skipped_steps": 1, "skipped_samples": 32}
    assert left == right


def test_the_cap_stops_the_run_with_the_state_as_it_was(make_job, take_steps, state_of):
    job = make_job(train={"max_skipped_steps": 2, "steps": 10})
    take_steps(job, 2, change=spoil("weights", -1.0))
    before = state_of(job)
    with pytest.raises(BatchError, match="weight"):
        take_steps(job, 1, change=spoil("weights", -1.0))
    assert state_of(job) == before
    assert job.trainer.position.skipped_steps == 2


def test_a_run_with_skips_ends_and_records_them(make_job, monkeypatch, capsys):
    """Through the loop: the record is written, the checkpoint counts the step, the run reaches its planned step."""
    from gem_pipelines.rundir import read_records

    job = make_job(train={"max_skipped_steps": 1, "steps": 4, "report": False})
    fetch, calls = job._fetch, []

    def fetching(steps):
        batches = fetch(steps)
        calls.append(batches)
        return [spoil("dense", float("nan"))(batch) for batch in batches] if len(calls) == 2 else batches

    monkeypatch.setattr(job, "_fetch", fetching)
    job.train(resumed_from=None, survey=None)
    records = read_records(job.directory.metrics_file)
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 3, 4]
    (skip,) = [record for record in records if record["kind"] == "skip"]
    assert skip["step"] == 2
    assert re.search(r"dense\.\w+ is nan", skip["reason"])
    assert "STEP 2 LEFT OUT (1 of at most 1)" in capsys.readouterr().out


CPU = torch.device("cpu")
BAD = [
    *[("labels", value) for value in (float("nan"), float("inf"), -float("inf"), 7.0, -1.0, 1e-40, 0.5)],
    *[("weights", value) for value in (float("nan"), float("inf"), -float("inf"), -1.0, -1e-40)],
    *[("dense", value) for value in (float("nan"), float("inf"), -float("inf"))],
]


def test_d5_bad_numbers_anywhere_change_nothing(make_job, take_steps, state_of):
    """NaN, infinities, a label that is neither 0 nor 1 (also denormal), a negative weight: in the first, a middle and
    the last row."""
    job = make_job()
    take_steps(job, 1)
    batches = job._read(job._steps())
    before = state_of(job)
    for name, value in BAD:
        for row in (0, 13, 31):
            sample = int(batches[0].sample_ids[row])
            with pytest.raises(BatchError, match=rf"sample_id {sample}:"):
                job.trainer.step(
                    [spoil(name, value, row)(batch) for batch in batches], clock=trainer_module.PartClock(device=CPU)
                )
    assert state_of(job) == before


def with_id(batch, feature: str, row: int, value: int):
    ids, key = batch.ids, batch.ids.keys().index(feature)
    lengths = ids.lengths().view(len(ids.keys()), -1)
    position = int(lengths[:key].sum() + lengths[key, :row].sum())
    values = ids.values().clone()
    values[position] = value
    return dataclasses.replace(batch, ids=KeyedJaggedTensor(keys=ids.keys(), values=values, lengths=ids.lengths()))


def test_d3_ids_outside_their_table_change_nothing(make_job, take_steps, state_of):
    """-1, rows, 2^31, 2^63 - 1 and the numbers that wrap to a valid id in 32 bits, in every feature."""
    job = make_job()
    take_steps(job, 1)
    before = state_of(job)
    tables = job.schema.table_rows()
    batches = job._read(job._steps())
    checked = 0
    for number, (feature, table) in enumerate(job.schema.id_features()):
        lengths = batches[0].ids.lengths().view(len(job.schema.id_features()), -1)[number]
        row = int(torch.nonzero(lengths)[0])
        sample = int(batches[0].sample_ids[row])
        for value in (-1, tables[table], 2**31, 2**63 - 1, 2**32, 2**32 + 1, -(2**63)):
            with pytest.raises(BatchError) as caught:
                job.trainer.step(
                    [with_id(batch, feature, row, value) for batch in batches],
                    clock=trainer_module.PartClock(device=CPU),
                )
            for part in (f"id {value} of feature {feature!r}", f"table {table!r}", f"sample_id {sample}:"):
                assert part in str(caught.value)
            checked += 1
    assert checked == 7 * len(job.schema.id_features())
    assert state_of(job) == before


def test_joined_ids_keep_rows_in_order():
    left = KeyedJaggedTensor(keys=["a", "b"], values=torch.tensor([1, 2, 3, 9]), lengths=torch.tensor([1, 2, 0, 1]))
    right = KeyedJaggedTensor(keys=["a", "b"], values=torch.tensor([4, 8, 7]), lengths=torch.tensor([1, 2]))
    joined = join_ids([left, right])
    assert joined["a"].values().tolist() == [1, 2, 3, 4]
    assert joined["a"].lengths().tolist() == [1, 2, 1]
    assert joined["b"].values().tolist() == [9, 8, 7]
    assert joined["b"].lengths().tolist() == [0, 1, 2]


def test_a_loss_that_is_not_finite_names_the_samples(make_job, take_steps, state_of):
    job = make_job()
    with torch.no_grad():
        next(job.trainer.parallel.module.heads.parameters()).fill_(float("nan"))
    before = state_of(job)
    with pytest.raises(
        LossError, match=r"step 1: the loss of task click, conversion is not finite.*\(32 samples: \d+,"
    ):
        take_steps(job, 1)
    assert state_of(job) == before
