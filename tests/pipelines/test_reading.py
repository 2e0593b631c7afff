"""What a rank's loader raises, whatever it is, is told to the other ranks before they wait for its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gem_data.api import events_cost
from gem_pipelines.balance import RowExchange
from gem_pipelines.runtime import Runtime


class StoreError(Exception):
    """As libraries of stores have them: neither ValueError nor OSError."""


def failing(batches: list[Any]) -> Any:
    yield from batches
    raise StoreError("503")


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
    schema, gathered = make_job("run").schema, []
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    exchange = RowExchange(
        schema,
        cost=events_cost(schema),
        runtime=Runtime(rank=0, world_size=2, device=torch.device("cpu")),
        most_rows=4,
        method="lpt",
        counts="equal",
    )

    def gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        gathered.append(mine.flatten().tolist()[:1])
        for part in parts:
            part.copy_(mine) if part.shape == mine.shape else part.zero_()

    monkeypatch.setattr(dist, "all_gather", gather)
    with pytest.raises(StoreError, match="503"):
        exchange.fetch(failing([]))
    assert gathered[0] == [2]
    assert len(gathered) == 3  # the state, then how long the text is, and the text
