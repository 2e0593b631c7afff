"""The balancer's process group has the job's limit; evaluation moves batches as training does."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gem_data.api import events_cost, read_schema
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
