"""One rank of a job in which one rank alone meets what cannot be trained: every case must end alike on all ranks.

    torchrun ... bad_step_worker.py PLAN.json      {"data", "out", "parallel": {...}}

For every case: two good steps, the bad one on rank 0 or on the last rank, with and without leave to skip it. Writes
what this rank raised, and whether its state is that of before, to OUT/rank-<r>.json.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from gem_pipelines import trainer as trainer_module
from gem_pipelines.checkpoint import capture
from gem_pipelines.config import ParallelConfig
from gem_pipelines.job import build
from gem_pipelines.leaving import leave
from gem_pipelines.recipes.debug import debug
from gem_pipelines.rundir import RunDirectory
from gem_pipelines.runtime import Runtime, start_runtime
from gem_pipelines.timing import PartClock


def spoil(batch: Any, name: str, value: float) -> Any:
    changed = getattr(batch, name).clone()
    changed[1, 0] = value
    return dataclasses.replace(batch, **{name: changed})


def state_of(job: Any) -> str:
    """Digest of parameters, tables, moments, metrics and this rank's random state."""
    found = capture(job.trainer, job.loader)
    digest = hashlib.sha256()
    for key in sorted(found.tensors):
        digest.update(found.tensors[key].detach().cpu().contiguous().numpy().tobytes())
    digest.update(json.dumps([found.state[k] for k in ("metrics", "random")], sort_keys=True).encode())
    return digest.hexdigest()


CASES: dict[str, Any] = {
    "NaN label": lambda batch: spoil(batch, "labels", float("nan")),
    "label 7": lambda batch: spoil(batch, "labels", 7.0),
    "infinite weight": lambda batch: spoil(batch, "weights", float("inf")),
    "NaN dense": lambda batch: spoil(batch, "dense", float("nan")),
    "NaN gradient of one row": None,
    "gradient of 1e20 in one row": None,
}


def bad_gradient(value: float) -> Any:
    """Replaces to_model_input for one call."""
    original = trainer_module.to_model_input

    def spoiling(batch: Any, embeddings: Any, **options: Any) -> Any:
        def hook(grad: Any) -> Any:
            grad = grad.clone()
            grad[-1, 0] = value
            return grad

        embeddings["item"].register_hook(hook)
        return original(batch, embeddings, **options)

    return original, spoiling


def attempt(
    plan: dict[str, Any], runtime: Runtime, name: str, *, victim: int, skip: bool, number: int
) -> dict[str, Any]:
    base = debug()
    config = dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, source=plan["data"], options=(), global_batch_size=32, prefetch=0),
        train=dataclasses.replace(base.train, steps=9, survey_rows=0, max_skipped_steps=int(skip)),
        parallel=ParallelConfig(**plan["parallel"]),
    )
    directory = RunDirectory(Path(plan["out"]) / f"run-{number}")
    job = build(config, data=Path(plan["data"]), directory=directory, runtime=runtime)
    steps, clock = job._steps(), PartClock(device=torch.device("cpu"))
    for _ in range(2):
        job.trainer.step(next(steps), clock=clock)
    before, batches = state_of(job), next(steps)
    mine = runtime.rank == victim
    original, spoiling = bad_gradient(float("nan") if "NaN" in name else 1e20)
    if mine and CASES[name] is not None:
        batches = [CASES[name](batch) for batch in batches]
    elif mine:
        trainer_module.to_model_input = spoiling
    try:
        record = job.trainer.step(batches, clock=clock)
        said = [record["kind"], record["reason"], len(record["sample_ids"])]
    except ValueError as error:
        said = [type(error).__name__, str(error), 0]
    finally:
        trainer_module.to_model_input = original
    same = state_of(job) == before
    loss = job.trainer.step(next(steps), clock=clock)["loss"] if skip else None
    return {"said": said, "same": same, "loss": loss, "step": job.trainer.position.step}


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    runtime = start_runtime(device="cpu", threads=1, deterministic=True, timeout=timedelta(seconds=60))
    found = {}
    for name in CASES:
        for victim in (0, runtime.world_size - 1):
            for skip in (False, True):
                key = f"{name}, rank {victim}, {'skip' if skip else 'stop'}"
                found[key] = attempt(plan, runtime, name, victim=victim, skip=skip, number=len(found))
    (Path(plan["out"]) / f"rank-{runtime.rank}.json").write_text(json.dumps(found))
    runtime.close()


if __name__ == "__main__":
    main()
    leave(0)
