"""A step: transactional, independent of how a batch is cut, and learning what can be learnt."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from gem_pipelines.metrics import evaluate_task
from gem_pipelines.timing import PartClock
from gem_pipelines.trainer import LossError, resolve_task_weights


def spoil(name: str, value: float):
    def change(batch):
        changed = getattr(batch, name).clone()
        changed[3, 0] = value
        return dataclasses.replace(batch, **{name: changed})

    return change


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("labels", float("nan"), "label.click is nan"),
        ("labels", 7.0, "label.click is 7.0"),
        ("weights", -1.0, "weight.click"),
    ],
)
def test_a_bad_batch_changes_nothing_to_the_bit(make_job, take_steps, state_of, name, value, message):
    job = make_job()
    take_steps(job, 2)
    before = state_of(job)
    with pytest.raises(ValueError, match=message):
        take_steps(job, 1, change=spoil(name, value))
    assert state_of(job) == before


def test_a_loss_that_is_not_finite_changes_nothing_to_the_bit(make_job, take_steps, state_of):
    job = make_job()
    take_steps(job, 2)
    with torch.no_grad():
        next(job.trainer.parallel.module.heads.parameters()).fill_(float("nan"))
    before = state_of(job)
    with pytest.raises(LossError, match=r"step 3: the loss of task click, conversion is not finite"):
        take_steps(job, 1)
    assert state_of(job) == before


def test_accumulated_micro_batches_are_one_batch(make_job, take_steps):
    """4 micro-batches of 16 rows train what one batch of 64 does: dense parameters, tables and their moments."""
    rates = {"tables": {"lr": 0.1}, "optimizer": {"schedule": "constant", "warmup_steps": 0}}
    whole = make_job("whole", data={"global_batch_size": 64, "shuffle": False}, **rates)
    cut = make_job("cut", data={"global_batch_size": 16, "accumulate": 4, "shuffle": False}, **rates)
    one, four = take_steps(whole, 3), take_steps(cut, 3)
    for a, b in zip(one, four, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert (a["samples"], a["tokens"]) == (b["samples"], b["tokens"])
    assert one[0]["samples"] == 64
    states = [job.trainer.parallel.tables.table_state() for job in (whole, cut)]
    for name, table in states[0].items():
        assert table["momentum"].count_nonzero() > 0
        torch.testing.assert_close(states[1][name]["momentum"], table["momentum"], rtol=1e-3, atol=1e-12)
        torch.testing.assert_close(states[1][name]["weight"], table["weight"], rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_weighted_mean_over_tasks(make_job, take_steps):
    equal, tilted = make_job("equal"), make_job("tilted", train={"task_weights": (1.0, 0.25)})
    a, b = take_steps(equal, 1)[0], take_steps(tilted, 1)[0]
    assert a["loss_by_task"] == b["loss_by_task"]
    assert a["loss"] == pytest.approx(sum(a["loss_by_task"].values()), rel=1e-12)
    click, conversion = a["loss_by_task"].values()
    assert b["loss"] == pytest.approx(click + 0.25 * conversion, rel=1e-12)


def test_it_learns_the_rows_it_sees(make_job):
    """The same 32 rows again and again: far below what any constant prediction reaches on them."""
    job = make_job(optimizer={"lr": 1e-2, "warmup_steps": 0, "schedule": "constant"})
    batches = job._read(job._steps())
    clock = PartClock(device=torch.device("cpu"))
    for _ in range(30):
        record = job.trainer.step(batches, clock=clock)
    clicks = float(batches[0].labels[:, 0].mean())
    assert 0 < clicks < 1
    entropy = -(clicks * math.log(clicks) + (1 - clicks) * math.log(1 - clicks))
    assert record["loss_by_task"]["click"] < 0.3 * entropy


def test_records_count_rows_events_and_epochs(make_job, take_steps):
    job = make_job(data={"global_batch_size": 100})
    records = take_steps(job, 8)
    assert [record["samples"] for record in records] == [100, 200, 300, 320, 420, 520, 620, 640]
    assert [record["epoch"] for record in records] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert records[7]["tokens"] == 2 * records[3]["tokens"]
    assert records[0]["window_ne"]["click"] == records[0]["lifetime_ne"]["click"]


def test_window_and_lifetime_hold_the_four_figures_of_their_rows(make_job, take_steps, monkeypatch):
    """Against the metrics of all predictions at once: of the last two steps, and of all."""
    job = make_job(train={"metric_window": 2})
    forward, seen = job.trainer._forward, []

    def recording(batch, embeddings, **options):
        logits_BT = forward(batch, embeddings, **options)
        seen.append((logits_BT.detach().sigmoid().double().numpy(), batch.labels.numpy(), batch.weights.numpy()))
        return logits_BT

    monkeypatch.setattr(job.trainer, "_forward", recording)
    record = take_steps(job, 5)[-1]
    for span, steps in (("window", seen[-2:]), ("lifetime", seen)):
        assert list(record[span]) == ["click", "conversion"]
        for t, task in enumerate(record[span]):
            p_N, y_N, w_N = (np.concatenate([step[part][:, t] for step in steps]) for part in range(3))
            wanted = evaluate_task(np.zeros(len(p_N), dtype=np.int64), p_N, y_N, w_N)
            figures = record[span][task]
            assert list(figures) == ["log_loss", "ne", "calibration", "rate"]
            assert figures == pytest.approx({name: wanted[name] for name in figures}, rel=1e-5)
            assert record[f"{span}_ne"][task] == figures["ne"]
    assert record["window"]["click"]["calibration"] != record["lifetime"]["click"]["calibration"]


def test_the_tables_follow_the_schedule(make_job, take_steps, monkeypatch):
    job = make_job(optimizer={"warmup_steps": 4, "schedule": "constant"}, tables={"lr": 0.5})
    rates = []
    monkeypatch.setattr(job.trainer.parallel.tables, "set_learning_rate", rates.append)
    assert [record["learning_rate"] for record in take_steps(job, 5)] == pytest.approx(
        [3e-3 * factor for factor in (0.25, 0.5, 0.75, 1, 1)]
    )
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])


def test_task_weights():
    assert resolve_task_weights((), ("a", "b")) == (1.0, 1.0)
    with pytest.raises(ValueError, match="task_weights has 1 values, the data has 2 tasks: a, b"):
        resolve_task_weights((1.0,), ("a", "b"))


def test_bfloat16_trains_as_float32_does(make_job, take_steps):
    """12 steps: the losses are those of float32 within 1 %, parameters and moments stay float32."""
    records = {
        compute: take_steps(make_job(compute, model={"compute": compute}), 12) for compute in ("float32", "bfloat16")
    }
    wide, narrow = ([record["loss"] for record in records[compute]] for compute in ("float32", "bfloat16"))
    assert narrow == pytest.approx(wide, rel=1e-2)
    assert narrow != wide
    for task, ne in records["float32"][-1]["window_ne"].items():
        assert records["bfloat16"][-1]["window_ne"][task] == pytest.approx(ne, rel=5e-3)
