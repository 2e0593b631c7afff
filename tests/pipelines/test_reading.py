"""What a rank's loader raises, whatever it is, is told to the other ranks before they wait for its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gem_data.api import events_cost
from gem_data.interface import Schema
from gem_pipelines.balance import RowExchange
from gem_pipelines.errors import ExchangeError
from gem_pipelines.runtime import Runtime


class StoreError(Exception):
    """As libraries of stores have them: neither ValueError nor OSError."""


def failing(batches: list[Any]) -> Any:
    yield from batches
    raise StoreError("503")


def two_ranks(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> RowExchange:
    """Of the first one; what it sends and gets is for the test to say."""
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    return RowExchange(
        schema,
        cost=events_cost(schema),
        runtime=Runtime(rank=0, world_size=2, device=torch.device("cpu")),
        most_rows=64,
        method="lpt",
        counts="equal",
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_is_stopped_together(make_job, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    job = make_job("run", parallel={"overlap": overlap})
    told: list[Exception] = []
    stop = job.trainer.stop_together
    monkeypatch.setattr(job.trainer, "stop_together", lambda error: (told.append(error), stop(error)))
    inner = job.loader.epoch()
    job.loader = SimpleNamespace(
        epoch=lambda: failing([next(inner), next(inner)]),
        mark_trained=job.loader.mark_trained,
        batches_per_epoch=job.loader.batches_per_epoch,
        close=job.loader.close,
    )
    with pytest.raises(StoreError, match="503"):
        job.train(resumed_from=None, survey=None)
    assert job.trainer.position.step == 2
    assert [str(error) for error in told] == ["503"]


def test_an_exchange_tells_it(make_job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that this rank gathers is "failed", and every rank raises; it does not leave the others waiting."""
    gathered: list[list[float]] = []
    exchange = two_ranks(make_job("run").schema, monkeypatch)

    def gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        gathered.append(mine.flatten().tolist()[:1])
        for part in parts:
            part.copy_(mine) if part.shape == mine.shape else part.zero_()

    monkeypatch.setattr(dist, "all_gather", gather)
    with pytest.raises(StoreError, match="503"):
        exchange.fetch(failing([]))
    assert gathered[0] == [2]
    assert len(gathered) == 3  # the state, then how long the text is, and the text


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_exchange_stops_this_rank_at_once(make_job, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """The other ranks may be gone: no collective is entered to tell them, and the first error is the one seen."""
    job = make_job("run", parallel={"overlap": overlap})
    told: list[Exception] = []
    failed: list[int] = []
    monkeypatch.setattr(job.trainer, "stop_together", told.append)
    monkeypatch.setattr(job.supervision, "failing", lambda: failed.append(job.trainer.position.step))
    inner, schema = job.loader.epoch(), job.schema
    reading = [next(inner), next(inner)]

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    exchange = two_ranks(schema, monkeypatch)
    monkeypatch.setattr(dist, "all_gather", refused)

    def epoch() -> Any:
        yield from reading
        yield exchange.fetch(inner)

    job.loader = SimpleNamespace(
        epoch=epoch,
        mark_trained=job.loader.mark_trained,
        batches_per_epoch=job.loader.batches_per_epoch,
        close=job.loader.close,
    )
    with pytest.raises(
        RuntimeError, match="rank 0: the all-gather of the balancer failed: Connection closed"
    ) as caught:
        job.train(resumed_from=None, survey=None)
    assert str(caught.value.__cause__) == "Connection closed by peer"
    assert told == []
    assert failed == [1 if overlap else 2]


@pytest.mark.parametrize("broken", ["all_gather", "all_to_all_single", "pack"])
def test_what_fails_between_ranks_is_an_exchange_error(make_job, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Also where a rank fails by itself while the others are in the exchange."""
    job = make_job("run")
    exchange = two_ranks(job.schema, monkeypatch)

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("timed out")

    monkeypatch.setattr(dist, "all_gather", lambda parts, mine, group: [part.copy_(mine) for part in parts])
    if broken == "pack":
        monkeypatch.setattr("gem_pipelines.balance.pack_rows", refused)
    else:
        monkeypatch.setattr(dist, broken, refused)
    with pytest.raises(ExchangeError, match="timed out") as caught:
        exchange.fetch(job.loader.epoch())
    assert str(caught.value.__cause__) == "timed out"


def test_a_batch_that_cannot_be_weighed_is_told(make_job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait in the all-gather for this one's loads."""
    job, gathered = make_job("run"), []
    exchange = two_ranks(job.schema, monkeypatch)

    def refused(*_: Any, **__: Any) -> None:
        raise ValueError("no lengths")

    def gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        gathered.append(mine.flatten().tolist()[:1])
        for part in parts:
            part.copy_(mine)

    monkeypatch.setattr("gem_pipelines.balance.batch_loads", refused)
    monkeypatch.setattr(dist, "all_gather", gather)
    with pytest.raises(ValueError, match="no lengths"):
        exchange.fetch(job.loader.epoch())
    assert gathered[0] == [2]
