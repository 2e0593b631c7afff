"""The balancer is a Loader with the job's time limit; evaluation moves batches as training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gem_data.api import build_loader, events_cost, read_schema
from gem_data.interface import Batch, Loader, LoaderConfig
from gem_data.testing import Case, Quirks, conformance_cases, write_tiny
from gem_pipelines import evaluate
from gem_pipelines.balance import BalancedLoader
from gem_pipelines.config import BalanceConfig, DataConfig, RunConfig, TrainConfig
from gem_pipelines.job import training_loader
from gem_pipelines.quarantine import Quarantine
from gem_pipelines.runtime import Runtime


def test_the_exchange_waits_as_long_as_the_job_says(debug_data, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda **given: made.append(given))
    config = RunConfig(
        data=DataConfig(global_batch_size=8),
        balance=BalanceConfig(method="global"),
        train=TrainConfig(timeout_s=61.0),
    )
    loader = training_loader(
        config,
        data=debug_data,
        cost=events_cost(read_schema(debug_data)),
        runtime=Runtime(rank=0, world_size=2, device=torch.device("cpu")),
        quarantine=Quarantine(),
    )
    assert isinstance(loader, BalancedLoader)
    assert [(given["backend"], given["timeout"]) for given in made] == [("gloo", timedelta(seconds=61))]
    loader.close()


def test_evaluation_moves_a_batch_in_one_buffer(make_job, monkeypatch: pytest.MonkeyPatch) -> None:
    job, placed, place = make_job("evaluation"), [], evaluate.place

    def noted(packed: Any, device: torch.device) -> Any:
        batch = place(packed, device)
        buffer = packed.buffer.untyped_storage().data_ptr()
        placed.append(
            {tensor.untyped_storage().data_ptr() for tensor in (batch.labels, batch.ids.values())} == {buffer}
        )
        return batch

    monkeypatch.setattr(evaluate, "place", noted)
    found = evaluate.predict(job.trainer.parallel, job.loader, schema=job.schema, runtime=job.runtime)
    assert placed == [True] * 10
    assert len(found["sample_id"]) == 320


ALONE = Runtime(rank=0, world_size=1, device=torch.device("cpu"))


def balanced(loader: Loader) -> BalancedLoader:
    return BalancedLoader(loader, cost=events_cost(loader.schema), runtime=ALONE, global_batch_size=16)


# Bad input is for the loader inside to find; the job's tests have one that both ranks hear of.
CASES = [
    case
    for case in conformance_cases(Quirks(world_sizes=(1,)))
    if not case.name.startswith("bad") and case.skipped is None
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case: Case, tmp_path: Path) -> None:
    made: list[BalancedLoader] = []

    def factory(directory: Path, **arguments: Any) -> BalancedLoader:
        made.append(balanced(build_loader(directory, **arguments)))
        return made[-1]

    case.run(factory, tmp_path)
    for loader in made:
        loader.close()
    assert not balance_threads()


def balance_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gem_pipelines.balance")]


HELD = 3


class Watched:
    """The loader inside: its read number HELD waits until it is let on, and who reads at once is counted."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self.schema = loader, loader.schema
        self.rows_per_epoch, self.batches_per_epoch = loader.rows_per_epoch, loader.batches_per_epoch
        self.reads = self.reading = self.most = 0
        self.closed = self.read_after_close = False
        self.held, self.gate = threading.Event(), threading.Event()
        self.mark_trained, self.state_dict = loader.mark_trained, loader.state_dict

    def epoch(self) -> Iterator[Batch]:
        source = self.loader.epoch()
        while True:
            self.reading += 1
            self.most = max(self.most, self.reading)
            if self.reads == HELD:
                self.held.set()
                assert self.gate.wait(10)
                self.read_after_close = self.closed
            self.reads += 1
            batch = next(source, None)
            self.reading -= 1
            if batch is None:
                return
            yield batch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not self.reading, "moved while the thread reads"
        self.loader.load_state_dict(state)

    def close(self) -> None:
        self.closed = True
        self.loader.close()


@pytest.mark.parametrize("then", ["close", "epoch", "load_state_dict"])
def test_nobody_touches_the_loader_inside_while_it_reads_ahead(tmp_path: Path, then: str) -> None:
    """The consumer breaks and drops its iterator; the read that is under way ends only after the call began."""
    write_tiny(tmp_path / "d")
    config = LoaderConfig(global_batch_size=16, shuffle=False, prefetch=0)
    inner = Watched(build_loader(tmp_path / "d", split="train", config=config))
    loader = balanced(inner)
    start = loader.state_dict()
    for batch in loader.epoch():
        if batch.step == HELD - 1:
            break
    assert inner.held.wait(10)
    late = threading.Timer(0.1, inner.gate.set)
    late.start()
    if then == "close":
        loader.close()
        assert not balance_threads()
        assert not inner.read_after_close
    if then == "load_state_dict":
        loader.load_state_dict(start)
    wanted = 0 if then == "load_state_dict" else HELD
    assert [batch.step for batch in loader.epoch()] == list(range(wanted, 7))
    assert inner.most == 1
    loader.close()
    assert not balance_threads()


@pytest.mark.parametrize("after", range(1, 8))
def test_an_epoch_that_was_left_and_closed_at_any_batch_goes_on_there(tmp_path: Path, after: int) -> None:
    """Also where only its last batch was left, which had been read ahead."""
    write_tiny(tmp_path / "d")
    config = LoaderConfig(global_batch_size=16, seed=3)
    loader = balanced(build_loader(tmp_path / "d", split="train", config=config))
    steps, iterator = [], loader.epoch()
    for _ in range(after):
        batch = next(iterator)
        steps.append(batch.step)
    loader.close()
    loader.mark_trained(batch)
    assert loader.state_dict()["step"] == after
    rest = [batch.step for batch in loader.epoch()]
    whole = list(range(7)) if after < 7 else list(range(14))
    assert steps + rest == whole
    loader.close()


def test_what_is_read_ahead_is_not_marked(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d")
    config = LoaderConfig(global_batch_size=16, shuffle=False)
    plain = build_loader(tmp_path / "d", split="train", config=config)
    batches = list(plain.epoch())
    loader = balanced(build_loader(tmp_path / "d", split="train", config=config))
    with pytest.raises(ValueError, match="none yet"):
        loader.mark_trained(batches[0])
    iterator = loader.epoch()
    next(iterator)
    with pytest.raises(ValueError, match="up to step 0"):
        loader.mark_trained(batches[1])
    assert loader.state_dict()["step"] == 0
    loader.mark_trained(batches[0])
    assert loader.state_dict()["step"] == 1
    loader.close()
