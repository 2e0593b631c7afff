"""Two ranks of the balancer after a failed read, at different steps, and when the wait for a batch is interrupted.

Both are in this process: a group is the number of its rank, and collectives meet at a barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gem_data.api import build_loader, events_cost
from gem_data.interface import Batch, LoaderConfig
from gem_data.remote import ReadError
from gem_data.testing import write_tiny
from gem_pipelines import balance
from gem_pipelines.balance import BalancedLoader
from gem_pipelines.errors import RemoteError, RunError
from gem_pipelines.runtime import Runtime
from torch import Tensor

WORLD, BATCHES = 2, 7


class Meeting:
    """Collectives of two threads. A rank that does not come breaks them after some seconds."""

    def __init__(self) -> None:
        self.made = 0
        self.barrier = threading.Barrier(WORLD, timeout=5)
        self.given: list[Any] = [None] * WORLD

    def new_group(self, **_: Any) -> int:
        self.made += 1
        return self.made - 1

    def exchange(self, group: int, given: Any) -> list[Any]:
        self.given[group] = given
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def all_gather(self, parts: list[Tensor], mine: Tensor, group: int) -> None:
        for part, came in zip(parts, self.exchange(group, mine.clone()), strict=True):
            part.copy_(came)

    def all_to_all_single(self, received: Tensor, send: Tensor, *, group: int, **sizes: list[int]) -> None:
        came = [parts[group] for parts in self.exchange(group, torch.split(send, sizes["input_split_sizes"]))]
        assert [len(part) for part in came] == sizes["output_split_sizes"]
        received.copy_(torch.cat(came))


class Unsteady:
    """The loader inside of one rank: its read number `fails_at` fails once, or its epoch number `opens_not`."""

    def __init__(self, loader: Any, fails_at: int | None, opens_not: int | None) -> None:
        self._loader, self._fails_at, self._reads = loader, fails_at, 0
        self._opens_not, self._opened = opens_not, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def epoch(self) -> Iterator[Batch]:
        self._opened += 1
        if self._opened - 1 == self._opens_not:
            raise ReadError("the store cannot be opened")
        return self._epoch()

    def _epoch(self) -> Iterator[Batch]:
        inner = self._loader.epoch()
        while True:
            self._reads += 1
            if self._reads - 1 == self._fails_at:
                raise ReadError("the store did not answer")
            batch = next(inner, None)
            if batch is None:
                return
            yield batch


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[BalancedLoader]]]:
    meeting, made = Meeting(), list[BalancedLoader]()
    for name in ("new_group", "all_gather", "all_to_all_single"):
        monkeypatch.setattr(dist, name, getattr(meeting, name))
    write_tiny(tmp_path / "d")

    def make(fails_at: int | None = None, *, opens_not: int | None = None) -> list[BalancedLoader]:
        config = LoaderConfig(global_batch_size=16, logical_shards=2, prefetch=0)
        for rank in range(WORLD):
            inner = build_loader(tmp_path / "d", split="train", config=config, rank=rank, world_size=WORLD)
            runtime = Runtime(rank=rank, world_size=WORLD, device=torch.device("cpu"))
            loader = Unsteady(inner, *((fails_at, opens_not) if rank == 1 else (None, None)))
            cost = events_cost(inner.schema)
            made.append(BalancedLoader(loader, cost=cost, runtime=runtime, global_batch_size=16))
        return made

    yield make
    for loader in made:
        loader.close()


def on_both(work: Callable[[BalancedLoader], Any], loaders: list[BalancedLoader]) -> list[Any]:
    """What `work` returns or raises on each rank."""

    def run(loader: BalancedLoader) -> Any:
        try:
            return work(loader)
        except Exception as error:
            return error

    with ThreadPoolExecutor(WORLD) as threads:
        return list(threads.map(run, loaders))


def train(loader: BalancedLoader) -> list[tuple[int, list[int]]]:
    """(step, sample ids) of every batch to the end of the epoch."""
    seen = []
    for batch in loader.epoch():
        seen.append((batch.step, batch.sample_ids.tolist()))
        loader.mark_trained(batch)
    return seen


def test_after_a_failed_read_all_go_on_from_a_state_or_not_at_all(ranks) -> None:
    loaders = ranks(fails_at=2)
    failed = on_both(train, loaders)
    assert [type(error) for error in failed] == [RemoteError, ReadError]
    for error in on_both(train, loaders):
        assert isinstance(error, ValueError)
        assert "the store did not answer" in str(error)
        assert "load_state_dict" in str(error)
    state = loaders[0].state_dict()
    assert state["step"] == loaders[1].state_dict()["step"] == 2
    for loader in loaders:
        loader.load_state_dict(state)
    rest = on_both(train, loaders)
    assert [[step for step, _ in seen] for seen in rest] == [list(range(2, BATCHES))] * 2
    ids = [number for seen in rest for _, numbers in seen for number in numbers]
    assert len(ids) == len(set(ids)) == loaders[0].rows_per_epoch - 2 * 16


def test_a_failure_that_nobody_was_told_is_raised_first(ranks) -> None:
    """The batch that failed was read ahead when the epoch was left."""
    loaders = ranks(fails_at=1)
    assert on_both(lambda loader: next(loader.epoch()).step, loaders) == [0, 0]
    assert [type(error) for error in on_both(train, loaders)] == [RemoteError, ReadError]


@pytest.mark.parametrize("before", [0, 1])
def test_an_epoch_that_one_rank_cannot_open_is_told_to_all(ranks, before: int) -> None:
    """They wait for its rows. Nothing is lost: from a state all go on."""
    loaders = ranks(opens_not=before)
    for _ in range(before):
        assert [len(seen) for seen in on_both(train, loaders)] == [BATCHES] * 2
    told, own = on_both(train, loaders)
    assert isinstance(told, RemoteError), told
    assert str(told) == "rank 1 reported: the store cannot be opened"
    assert isinstance(own, ReadError)
    for loader in loaders:
        loader.load_state_dict(loader.state_dict())
    assert [[step for step, _ in seen] for seen in on_both(train, loaders)] == [
        list(range(BATCHES * before, BATCHES * (before + 1)))
    ] * 2


def test_an_epoch_that_cannot_be_opened_again_keeps_the_batch_that_waits(ranks) -> None:
    """Closed with a batch read ahead: that is handed out on both, and what cannot be read comes after it."""
    loaders = ranks(opens_not=1)
    assert on_both(lambda loader: next(loader.epoch()).step, loaders) == [0, 0]
    for loader in loaders:
        loader.close()
    steps: list[list[int]] = [[], []]

    def go_on(loader: BalancedLoader) -> None:
        for batch in loader.epoch():
            steps[loaders.index(loader)].append(batch.step)

    assert [type(error) for error in on_both(go_on, loaders)] == [RemoteError, ReadError]
    assert steps == [[1], [1]]


def test_a_batch_that_cannot_be_sent_is_told_to_all(ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are looked at before the others wait for them."""
    loaders, rows_of = ranks(), balance.rows_of_batch
    second = loaders[1].inner.epoch

    def other() -> Iterator[Batch]:
        return (replace(batch, timestamps=batch.timestamps[:0]) for batch in second())

    def checked(schema: Any, batch: Batch) -> Any:
        if not len(batch.timestamps):
            raise ValueError("a batch without times")
        return rows_of(schema, batch)

    monkeypatch.setattr(balance, "rows_of_batch", checked)
    loaders[1].inner.epoch = other
    told, own = on_both(train, loaders)
    assert [type(told), str(told)] == [RemoteError, "rank 1 reported: a batch without times"]
    assert [type(own), str(own)] == [ValueError, "a batch without times"]


@pytest.mark.parametrize("other", [1, BATCHES])
def test_ranks_at_different_steps_are_named_on_all(ranks, other: int) -> None:
    """Also where one is at the end of the epoch: the others would wait for its rows."""
    loaders = ranks()
    states = [loader.state_dict() for loader in loaders]
    first = loaders[0].inner.epoch()
    for _ in range(other):
        loaders[0].inner.mark_trained(next(first))
    loaders[1].load_state_dict(states[1])
    place = {1: "step 0 on rank 1; step 1 on rank 0", BATCHES: "step 0 on rank 1; step 7 on rank 0"}[other]
    for error in on_both(train, loaders):
        assert isinstance(error, RunError), error
        assert place in str(error)


def test_a_rank_at_the_end_of_its_epoch_is_named(ranks) -> None:
    loaders = ranks()
    loaders[0].inner.epoch = lambda: iter(())
    for error in on_both(train, loaders):
        assert isinstance(error, RunError), error
        assert "the end of the epoch on rank 0; step 0 on rank 1" in str(error)


@pytest.mark.parametrize("there", [False, True])
def test_an_interrupted_wait_keeps_the_batch(ranks, there: bool) -> None:
    """Whether it has come or not: a rank that drops it is a step ahead of the others."""
    loaders = ranks()
    iterators = [loader.epoch() for loader in loaders]
    assert [batch.step for batch in on_both(lambda loader: next(iterators[loaders.index(loader)]), loaders)] == [0, 0]
    waiting = loaders[0]._next
    assert waiting is not None
    waiting.result()

    def interrupted() -> Batch:
        raise KeyboardInterrupt

    waiting.result, done = interrupted, waiting.done  # type: ignore[method-assign]
    waiting.done = lambda: there  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        next(iterators[0])
    del waiting.result
    waiting.done = done  # type: ignore[method-assign]
    rest = on_both(train, loaders)
    assert [[step for step, _ in seen] for seen in rest] == [list(range(1, BATCHES))] * 2
