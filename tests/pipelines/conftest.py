"""Small data, one process group, and jobs of the `debug` recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

OPTIONS = ("rows=400", "users=40", "items=60", "streams=2", "max_length=6")


@pytest.fixture(scope="session")
def debug_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated data set of 320 training and 80 evaluation rows, two tasks, two streams."""
    from gem_pipelines.data_source import prepare_named

    directory = tmp_path_factory.mktemp("data") / "synthetic"
    prepare_named("synthetic", OPTIONS, directory, say=lambda line: None)
    return directory


@pytest.fixture
def runtime() -> Iterator[Any]:
    """A process group of one; global switches of torch are put back."""
    from gem_pipelines.runtime import start_runtime

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    started = start_runtime(device="cpu", threads=1, deterministic=True, timeout=timedelta(seconds=60))
    yield started
    started.close()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def debug_config(debug_data: Path) -> Callable[..., Any]:
    """debug_config(section={"key": value}) -> RunConfig on the small data."""
    from gem_pipelines.recipes.debug import debug

    def make(**sections: dict[str, Any]) -> Any:
        config = debug()
        base = {
            "data": {"source": str(debug_data), "options": (), "global_batch_size": 32, "prefetch": 0},
            "train": {"steps": 4, "tensorboard": False, "peak_flops_per_s": 1e9, "survey_rows": 0, "profile_every": 0},
        }
        for name in {*base, *sections}:
            values = {**base.get(name, {}), **sections.get(name, {})}
            config = dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **values)})
        return config

    return make


@pytest.fixture
def make_job(runtime: Any, debug_data: Path, debug_config: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """make_job("name", section={...}) -> Job whose run directory is new."""
    from gem_pipelines.job import build
    from gem_pipelines.rundir import RunDirectory

    def make(name: str = "run", **sections: dict[str, Any]) -> Any:
        config = debug_config(**sections)
        directory = RunDirectory(tmp_path / name)
        directory.create(config, command="test")
        return build(config, data=debug_data, directory=directory, runtime=runtime)

    return make


@pytest.fixture
def take_steps() -> Callable[..., list[dict[str, Any]]]:
    """take_steps(job, n) trains n steps outside Job.train and returns the records."""

    def take(job: Any, count: int, *, change: Callable[[Any], Any] = lambda batch: batch) -> list[dict[str, Any]]:
        from gem_pipelines.timing import PartClock

        steps, records = job._steps(), []
        for _ in range(count):
            batches = job._read(steps)
            clock = PartClock(device=torch.device("cpu"))
            records.append(job.trainer.step([change(batch) for batch in batches], clock=clock))
            job.loader.mark_trained(batches[-1])
        return records

    return take


@pytest.fixture
def state_of() -> Callable[[Any], dict[str, Any]]:
    """state_of(job) -> every tensor's bytes and the rest of the training state: equal if and only if the bits are."""

    def state(job: Any) -> dict[str, Any]:
        from gem_pipelines.checkpoint import capture

        captured = capture(job.trainer, job.loader)
        tensors = {key: value.detach().cpu().numpy().tobytes() for key, value in captured.tensors.items()}
        return {**tensors, "state": captured.state}

    return state
