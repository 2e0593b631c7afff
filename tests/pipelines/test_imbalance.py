"""Imbalance of a step, micro-batches within a budget, and balance in the job of one process."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from gem_data.api import batch_from_table, events_cost
from gem_data.interface import CostModel, CostTerm
from gem_data.testing import tiny_request_schema, tiny_request_table
from gem_pipelines.balance import BalancedLoader
from gem_pipelines.cost import batch_loads
from gem_pipelines.errors import ConfigError
from gem_pipelines.imbalance import StepLoad, batch_bytes, measure_imbalance, own_load, within_budget
from gem_pipelines.report import write_report


class TwoRanks:
    """This rank and one other."""

    world_size = 2

    def __init__(self, other: list[float]) -> None:
        self.other = torch.tensor(other, dtype=torch.float64)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values, self.other])


def test_max_over_mean() -> None:
    mine = StepLoad(load=3.0, seconds=0.0, tokens=300, bytes=10, rows=4)
    assert measure_imbalance(mine, TwoRanks([1.0, 0.0, 100, 30, 4])) == {
        "load": 1.5,
        "seconds": None,
        "tokens": 1.5,
        "bytes": 1.5,
        "rows": 1.0,
    }


def test_own_load_counts_the_batch(make_job) -> None:
    job = make_job()
    batch = next(job.loader.epoch())
    load = own_load([batch, batch], cost=events_cost(job.schema), seconds=0.5)
    events = sum(int(s.offsets[-1]) for s in batch.streams.values())
    assert (load.tokens, load.rows, load.load, load.seconds) == (2 * events, 64, 2 * events, 0.5)
    # 8 bytes: three keys, three places; 4 bytes: labels, weights, dense; ids and lengths, offsets, actions and times.
    rows, tasks, dense = 32, len(job.schema.labels), len(job.schema.dense)
    ids = batch.ids.values().numel() + batch.ids.lengths().numel()
    assert load.bytes == 2 * batch_bytes(batch)
    assert batch_bytes(batch) == 8 * (6 * rows + ids + 2 * (rows + 1) + 2 * events) + 4 * rows * (2 * tasks + dense)


def test_bytes_of_requests_are_those_of_all_their_tensors() -> None:
    schema = tiny_request_schema()
    batch = batch_from_table(schema, tiny_request_table(rows=9, seed=0))
    tensors = [value for value in vars(batch).values() if isinstance(value, torch.Tensor)]
    tensors += [batch.ids.values(), batch.ids.lengths()]
    tensors += [part for stream in batch.streams.values() for part in vars(stream).values()]
    assert batch.requests is not None
    assert any(tensor is batch.requests for tensor in tensors)
    assert batch_bytes(batch) == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_records_hold_the_imbalance_of_every_step(make_job, take_steps) -> None:
    records = take_steps(make_job(), 2)
    assert all(
        record["imbalance"] == dict.fromkeys(("load", "seconds", "tokens", "bytes", "rows"), 1.0) for record in records
    )


def test_micro_batches_stay_within_the_budget_and_keep_the_rows(make_job) -> None:
    job = make_job()
    batch = next(job.loader.epoch())
    cost = events_cost(job.schema)
    loads = batch_loads(cost, batch)
    budget = float(loads.sum()) / 5
    cut = within_budget([batch], job.schema, cost, budget, job.runtime)
    assert len(cut) > 4
    assert [s for part in cut for s in part.sample_ids.tolist()] == batch.sample_ids.tolist()
    assert max(batch_loads(cost, part).sum() for part in cut) <= budget
    assert within_budget([batch], job.schema, cost, None, job.runtime) == [batch]

    class MoreElsewhere:
        def max(self, values: torch.Tensor) -> torch.Tensor:
            return values + 2

    more = within_budget([batch], job.schema, cost, budget, MoreElsewhere())
    assert [part.sample_ids.numel() for part in more[len(cut) :]] == [0, 0]


def test_a_budget_of_memory_bounds_the_bytes_that_the_file_predicts(make_job, take_steps, tmp_path) -> None:
    """Not the time of the same file; and the step is the same."""
    whole = make_job("whole")
    name = whole.schema.streams[0].name
    path = tmp_path / "cost.json"
    model = {"unit": "bytes", "per_step": 100.0, "per_sample": 10.0, "terms": [{"stream": name, "coefficient": 7.0}]}
    path.write_text(json.dumps({"time": {"unit": "seconds", "per_sample": 1.0}, "memory": model}))
    memory = CostModel(unit="bytes", per_step=100.0, per_sample=10.0, terms=(CostTerm(stream=name, coefficient=7.0),))
    cut = make_job("cut", balance={"cost": str(path), "budget": 500.0, "budget_of": "memory"})
    batch = next(whole.loader.epoch())
    parts = cut.trainer._cut([batch])
    most = max(100.0 + float(batch_loads(memory, part).sum()) for part in parts)
    assert 400 < most <= 500
    assert [s for part in parts for s in part.sample_ids.tolist()] == batch.sample_ids.tolist()
    by_time = make_job("time", balance={"cost": str(path), "budget": 500.0})
    assert len(by_time.trainer._cut([batch])) == 1
    (a,), (b,) = take_steps(make_job("again"), 1), take_steps(cut, 1)
    assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
    for balance, message in (
        ({"cost": "events", "budget": 500.0}, "balance.cost 'events': expected a file with a model of memory"),
        ({"cost": str(path), "budget": 99.0}, "expected above the 100 bytes"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_job("bad", balance={**balance, "budget_of": "memory"})
    path.write_text(json.dumps({"time": {"unit": "seconds", "per_sample": 1.0}}))
    with pytest.raises(ConfigError, match="expected the key 'memory'"):
        make_job("worse", balance={"cost": str(path), "budget": 500.0, "budget_of": "memory"})


def test_a_budget_changes_memory_and_not_the_step(make_job, take_steps) -> None:
    whole = take_steps(make_job("whole"), 4)
    cut = take_steps(make_job("cut", balance={"cost": "events", "budget": 60.0}), 4)
    for a, b in zip(whole, cut, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert (a["samples"], a["tokens"]) == (b["samples"], b["tokens"])


def test_base_batches_in_the_job_and_resume_bit_for_bit(make_job, take_steps, state_of) -> None:
    sections = {"data": {"global_batch_size": 32, "logical_shards": 2}, "balance": {"method": "base", "base_batch": 4}}
    plain = make_job("plain", data=sections["data"])
    straight, halves = make_job("straight", **sections), make_job("halves", **sections)
    take_steps(straight, 4)
    take_steps(halves, 2)
    state = json.loads(json.dumps(halves.loader.state_dict()))
    halves.loader.load_state_dict(state)
    take_steps(halves, 2)
    assert state_of(straight) == state_of(halves)
    orders = [next(job.loader.epoch()).sample_ids.tolist() for job in (plain, make_job("again", **sections))]
    assert orders[0] != orders[1]


def test_the_balanced_loader_of_one_process_is_its_loader(make_job) -> None:
    job = make_job()
    terms = (CostTerm(stream=job.schema.streams[0].name),)
    balanced = BalancedLoader(
        job.loader, cost=CostModel(unit="events", terms=terms), runtime=job.runtime, global_batch_size=32
    )
    iterator = balanced.epoch()
    first, second = next(iterator), next(iterator)
    assert (first.step, second.step) == (0, 1)
    balanced.mark_trained(first)
    state = balanced.state_dict()
    assert state["step"] == 1
    rest = [second, *iterator]
    assert len(rest) == balanced.batches_per_epoch - 1
    balanced.load_state_dict(state)
    with pytest.raises(ValueError, match="load_state_dict moved this loader"):
        next(iterator)
    again = list(balanced.epoch())
    assert [b.sample_ids.tolist() for b in again] == [b.sample_ids.tolist() for b in rest]
    stopped = balanced.epoch()
    balanced.close()
    with pytest.raises(ValueError, match="was closed"):
        next(stopped)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"base_batch": 0}, "balance.base_batch is 0, expected at least 1"),
        ({"budget": 0.0}, "balance.budget is 0.0, expected above 0"),
        ({"method": "all"}, "balance.method is 'all'"),
        ({"budget_of": "memory"}, "expected with it balance.budget in bytes"),
    ],
)
def test_wrong_settings_are_named(debug_config, section, message) -> None:
    with pytest.raises(ConfigError, match=message):
        debug_config(balance=section)


def test_the_report_tells_of_balance(tmp_path) -> None:
    records = [{"kind": "start", "world_size": 2, "config": {}}]
    records += [
        {"kind": "train", "step": n, "loss": 1.0, "seconds": 1.0, "imbalance": {"load": 1.0 + n / 10, "rows": 1.0}}
        for n in (1, 2, 3)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    line = next(line for line in text.splitlines() if "predicted load" in line)
    steady = [1.0 + n / 10 for n in (1, 2, 3)]
    assert "1.300" in line
    assert f"{np.mean(steady):.3f}" in line or f"{steady[-1]:.3f}" in line
    assert "Balance of the processes" in (tmp_path / "report.html").read_text()
    records[0]["world_size"] = 1
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_report(tmp_path)
    assert "predicted load" not in (tmp_path / "report.md").read_text()
