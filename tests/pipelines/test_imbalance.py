"""Imbalance of a step, micro-batches within a budget, and balance in the job of one process."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from gem_data.api import batch_from_table, events_cost
from gem_data.interface import Batch, CostModel, CostTerm
from gem_data.testing import tiny_request_schema, tiny_request_table
from gem_pipelines import checkpoint, evaluate
from gem_pipelines import trainer as trainer_module
from gem_pipelines.balance import BalancedLoader
from gem_pipelines.cost import batch_loads
from gem_pipelines.errors import ConfigError
from gem_pipelines.imbalance import FIGURES, ImbalanceLog, StepLoad, batch_bytes, own_load, within_budget
from gem_pipelines.job import build
from gem_pipelines.report import write_report
from gem_pipelines.rundir import read_records
from gem_pipelines.runtime import Runtime


class TwoRanks:
    """This rank and one other, whose loads of all steps are `other`; `gathers` counts collectives."""

    def __init__(self, other: list[StepLoad]) -> None:
        self.other, self.gathers = torch.tensor([astuple(load) for load in other], dtype=torch.float64), 0

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        self.gathers += 1
        count = len(values) // len(FIGURES)
        came, self.other = self.other[:count], self.other[count:]
        return torch.stack([values, came.flatten()])


def load_of(tokens: int, *, seconds: float = 0.0) -> StepLoad:
    return StepLoad(load=1.0, seconds=seconds, tokens=tokens, bytes=10, rows=4)


def test_max_over_mean() -> None:
    log = ImbalanceLog()
    log.add(StepLoad(load=3.0, seconds=0.0, tokens=300, bytes=10, rows=4))
    other = StepLoad(load=1.0, seconds=0.0, tokens=100, bytes=30, rows=4)
    assert log.record(TwoRanks([other]))["imbalance"] == {
        "load": 1.5,
        "seconds": None,
        "tokens": 1.5,
        "bytes": 1.5,
        "rows": 1.0,
    }


def test_a_record_stands_for_all_steps_since_the_one_before() -> None:
    """One collective for all of them; what a checkpoint in between exchanged is in it, once."""
    mine, theirs = (4, 6, 5, 0, 9), (4, 2, 3, 0, 1)
    other = [load_of(tokens, seconds=float(n == 1)) for n, tokens in enumerate(theirs)]
    straight, halves, runtimes = ImbalanceLog(), ImbalanceLog(), (TwoRanks(other), TwoRanks(other))
    for n, tokens in enumerate(mine):
        for log in (straight, halves):
            log.add(load_of(tokens))
        if n == 1:
            state = json.loads(json.dumps(halves.state_dict(runtimes[1])))
            halves = ImbalanceLog()
            halves.load_state_dict(state)
    found = straight.record(runtimes[0])
    assert {name: value["tokens"] for name, value in found.items()} == {
        "imbalance": 1.8,
        "imbalance_mean": (1.0 + 1.5 + 1.25 + 1.8) / 4,  # nobody had a token in the fourth
        "imbalance_worst": 1.8,
        "imbalance_steps": 4,
    }
    assert {name: value["seconds"] for name, value in found.items()} == {
        "imbalance": None,
        "imbalance_mean": 2.0,
        "imbalance_worst": 2.0,
        "imbalance_steps": 1,
    }
    assert halves.record(runtimes[1]) == found
    assert [runtime.gathers for runtime in runtimes] == [1, 2]
    assert straight.record(runtimes[0]) == {}
    straight.add(load_of(4))
    assert straight.record(TwoRanks([load_of(4)]))["imbalance_steps"]["tokens"] == 1
    assert runtimes[0].gathers == 1


def test_many_steps_go_in_parts() -> None:
    log, other = ImbalanceLog(), [load_of(1 + n % 7) for n in range(2500)]
    for n in range(2500):
        log.add(load_of(1 + n % 5))
    runtime, ratios = TwoRanks(other), []
    for n in range(2500):
        a, b = 1 + n % 5, 1 + n % 7
        ratios.append(max(a, b) * 2 / (a + b))
    found = log.record(runtime)
    assert (runtime.gathers, found["imbalance_steps"]["tokens"]) == (3, 2500)
    assert found["imbalance_worst"]["tokens"] == max(ratios)
    assert found["imbalance_mean"]["tokens"] == sum(ratios) / 2500


PLANTED = {2: 3.0, 3: 7.0, 6: 19.0, 8: 5.0}  # step -> load of this rank; it is 1 in all others, and of the other rank


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Jobs see a second rank where loads are gathered; counts Runtime's collectives."""
    calls: Counter[str] = Counter()

    def own(batches: list[Batch], **_: Any) -> StepLoad:
        return StepLoad(load=PLANTED.get(batches[0].step + 1, 1.0), seconds=1.0, tokens=1, bytes=1, rows=1)

    def counted(name: str, inner: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            calls[name] += 1
            return inner(*given, **named)

        return call

    monkeypatch.setattr(trainer_module, "own_load", own)
    monkeypatch.setattr(Runtime, "gather", lambda self, values: torch.stack([values, torch.ones_like(values)]))
    for name in ("sum", "max", "gather", "gather_rows", "barrier"):
        monkeypatch.setattr(Runtime, name, counted(name, getattr(Runtime, name)))
    return calls


def planted(first: int, last: int, *, without: tuple[int, ...] = ()) -> dict[str, Any]:
    """What a record says of the load of steps `first` to `last`."""
    loads = [PLANTED.get(step, 1.0) for step in range(first, last + 1) if step not in without]
    ratios = [2 * load / (load + 1) for load in loads]
    return {"imbalance_mean": sum(ratios) / len(ratios), "imbalance_worst": max(ratios), "imbalance_steps": len(ratios)}


def said(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name]["load"] for name in ("imbalance_mean", "imbalance_worst", "imbalance_steps")}


def written(job: Any, kind: str = "train") -> dict[int, dict[str, Any]]:
    return {r["step"]: r for r in read_records(job.directory.metrics_file) if r["kind"] == kind}


EVERY = {"record_every": 5, "steps": 10, "report": False}


def test_a_step_between_records_is_seen_and_costs_no_collective(make_job, two_ranks, monkeypatch) -> None:
    job, calls = make_job(train={**EVERY, "checkpoint_every": 0, "replica_check_every": 0}), []
    one_step = job._one_step

    def counted(*given: Any) -> None:
        two_ranks.clear()
        one_step(*given)
        calls.append(dict(two_ranks))

    monkeypatch.setattr(job, "_one_step", counted)
    job.train(resumed_from=None, survey=None)
    records = written(job)
    assert {step: said(record) for step, record in records.items()} == {5: planted(1, 5), 10: planted(6, 10)}
    assert records[5]["imbalance"]["load"] == records[10]["imbalance"]["load"] == 1.0
    assert max(planted(1, 5).values()) > 1.5
    # The batches of the next step are agreed on, and the outcome of this one; the first agrees on its own too.
    sums = [3, *[2] * 8, 1]
    assert calls == [{"sum": n} | ({"gather": 1} if step in (5, 10) else {}) for step, n in enumerate(sums, start=1)]


def test_steps_left_out_are_not_counted_and_the_end_has_the_rest(make_job, two_ranks, monkeypatch) -> None:
    """Step 3 is left out, so it has no imbalance; as the last is, the end record has that of those before it."""
    job = make_job(train={**EVERY, "steps": 7, "max_skipped_steps": 2})
    fetch, steps = job._fetch, iter(range(1, 100))

    def fetching(reader: Any) -> list[Batch]:
        batches = fetch(reader)
        if next(steps) not in (3, 7):
            return batches
        return [replace(batch, weights=torch.full_like(batch.weights, -1.0)) for batch in batches]

    monkeypatch.setattr(job, "_fetch", fetching)
    job.train(resumed_from=None, survey=None)
    assert {step: said(record) for step, record in written(job).items()} == {5: planted(1, 5, without=(3,))}
    assert planted(1, 5, without=(3,))["imbalance_steps"] == 4
    assert sorted(written(job, "skip")) == [3, 7]
    assert not any("imbalance" in record for record in written(job, "skip").values())
    (end,) = written(job, "end").values()
    assert said(end) == planted(6, 6)
    assert end["imbalance"]["load"] == 1.9


def test_a_resumed_run_neither_loses_nor_repeats_a_step(make_job, two_ranks, monkeypatch) -> None:
    """Killed in step 6, which is behind a record, it goes on from step 3, before that record; killed in step 9 it goes
    on from step 6. The planted loads lie before these checkpoints.
    """
    job, resumed = make_job(train={**EVERY, "checkpoint_every": 3}), None
    for kill, behind in ((6, 3), (9, 6), (None, None)):
        with monkeypatch.context() as patched:

            def killed(*given: Any, one_step: Any = job._one_step, job: Any = job, kill: int | None = kill) -> None:
                if job.trainer.position.step + 1 == kill:
                    raise KeyboardInterrupt
                one_step(*given)

            patched.setattr(job, "_one_step", killed)
            with pytest.raises(KeyboardInterrupt) if kill else nullcontext():
                job.train(resumed_from=resumed, survey=None)
        if behind is not None:
            job.directory.forget_after(behind)
            job = build(job.config, data=job.data, directory=job.directory, runtime=job.runtime)
            resumed = job.restore_latest()
            assert resumed == behind
    assert {step: said(record) for step, record in written(job).items()} == {5: planted(1, 5), 10: planted(6, 10)}
    assert not any(name.startswith("imbalance") for name in written(job, "end")[10])


def test_a_checkpoint_of_a_version_without_imbalance_is_resumed(make_job, monkeypatch) -> None:
    job, captured = make_job(), checkpoint.capture

    def without(*given: Any) -> Any:
        found = captured(*given)
        return replace(found, about={name: value for name, value in found.about.items() if name != "imbalance"})

    monkeypatch.setattr(checkpoint, "capture", without)
    checkpoint.save(job.directory.checkpoints, job.trainer, job.loader, keep=1)
    assert job.restore_latest() == 0
    assert job.trainer.imbalance.record(job.runtime) == {}


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
    parts = cut.trainer.cut([batch])
    most = max(100.0 + float(batch_loads(memory, part).sum()) for part in parts)
    assert 400 < most <= 500
    assert [s for part in parts for s in part.sample_ids.tolist()] == batch.sample_ids.tolist()
    by_time = make_job("time", balance={"cost": str(path), "budget": 500.0})
    assert len(by_time.trainer.cut([batch])) == 1
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


def test_evaluation_stays_within_the_budget(make_job, monkeypatch) -> None:
    """80 rows, which are one batch of it, in parts as small as training's; the figures stay."""
    packed: list[list[float]] = [[], []]
    wanted = None
    for number, balance in enumerate(({"cost": "events"}, {"cost": "events", "budget": 60.0})):
        job = make_job(f"run{number}", balance=balance, train={"steps": 1})

        def spy(batch, schema, original=evaluate.pack, loads=packed[number], **settings):
            loads.append(float(batch_loads(events_cost(schema), batch).sum()))
            return original(batch, schema, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(evaluate, "pack", spy)
            found = job.train(resumed_from=None, survey=None).evaluation
        wanted = found if wanted is None else wanted
        assert found["samples"] == 80
        for task, figures in found["tasks"].items():
            assert figures == pytest.approx(wanted["tasks"][task], rel=1e-4)
    assert len(packed[0]) == 1
    assert packed[0][0] > 300
    assert max(packed[1]) <= 60
    assert sum(packed[1]) == packed[0][0]


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

    def report() -> str:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        write_report(tmp_path)
        return (tmp_path / "report.md").read_text()

    def shown(text: str, name: str) -> list[str]:
        line = next(line for line in text.splitlines() if name in line)
        return [cell.strip() for cell in line.strip("| ").split("|")][1:]

    text = report()  # of a version that kept only the recorded steps'
    assert shown(text, "predicted load") == ["1.200", "1.300"]
    assert "over 3 steps of 2 processes" in text
    assert "Balance of the processes" in (tmp_path / "report.html").read_text()
    del records[2:]
    for step, mean, worst, steps in ((11, 1.4, 1.9, 9), (12, None, None, 0)):  # one of ten was left out
        later = {"kind": "train", "step": step, "loss": 1.0, "seconds": 1.0, "imbalance": {"load": None}}
        groups = {"imbalance_mean": mean, "imbalance_worst": worst, "imbalance_steps": steps}
        records.append(later | {name: {"load": value} for name, value in groups.items()})
    text = report()
    assert shown(text, "predicted load") == [f"{(1.1 + 9 * 1.4) / 10:.3f}", "1.900"]
    assert "over 10 steps of 2 processes" in text
    assert "points: the worst of them" in (tmp_path / "report.html").read_text()
    tail = {"imbalance": 2.0, "imbalance_mean": 1.8, "imbalance_worst": 2.0, "imbalance_steps": 2}
    records.append({"kind": "end", "step": 15, **{name: {"load": value} for name, value in tail.items()}})
    text = report()
    assert shown(text, "predicted load") == [f"{(1.1 + 9 * 1.4 + 2 * 1.8) / 12:.3f}", "2.000"]
    assert "over 12 steps of 2 processes" in text
    records[-1]["imbalance_mean"] = {"load": "much"}
    with pytest.raises(ValueError, match=r'line 5: "imbalance_mean.load": expected a number or null'):
        report()
    del records[-1]
    records[0]["world_size"] = 1
    assert "predicted load" not in report()
