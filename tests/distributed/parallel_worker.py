"""One rank of the parity tests: trains the same model on the same global batches under several factorizations.

main(PLAN), a JSON file (see `test_parallel.py`), in a rank forked as torchrun would start it.

Each run of the plan: {"name", "parallel": {...}, "model": "dhen" | "experts", "steps", "save": step or 0, "resume":
name of a run whose checkpoint is loaded, or "", "tables": values of the tables section, as lists}. Rank 0 writes
OUT/<name>.safetensors (the whole training state, under canonical names) and OUT/<name>.json (losses, norms, rows).
"""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from gem_pipelines import checkpoint
from gem_pipelines.checkpoint_format import step_directory
from gem_pipelines.config import ParallelConfig
from gem_pipelines.evaluate import predict
from gem_pipelines.job import build
from gem_pipelines.model.config import InteractionConfig
from gem_pipelines.recipes.debug import debug
from gem_pipelines.rundir import RunDirectory
from gem_pipelines.runtime import Runtime, start_runtime
from gem_pipelines.timing import PartClock
from safetensors.torch import save_file

BATCH = 29  # of 146 rows: the sixth batch of an epoch has one row, so all ranks but one have none
DHEN = InteractionConfig(
    kind="dhen", fm_tokens=2, linear_tokens=2, rank=4, hidden=(16,), members=("fm", "linear", "dcn", "mlp"), dcn_rank=4
)
EXPERTS = InteractionConfig(kind="experts", fm_tokens=8, linear_tokens=8, rank=4, hidden=(16,), experts=8)


def config_of(run: dict[str, Any], data: str) -> Any:
    base = debug()
    interaction = {"dhen": DHEN, "experts": EXPERTS}[run["model"]]
    return dataclasses.replace(
        base,
        data=dataclasses.replace(
            base.data,
            source=data,
            options=(),
            global_batch_size=BATCH,
            prefetch=0,
            accumulate=run.get("accumulate", 1),
        ),
        model=dataclasses.replace(base.model, interaction=interaction),
        tables=dataclasses.replace(base.tables, **{k: tuple(v) for k, v in run.get("tables", {}).items()}),
        train=dataclasses.replace(base.train, steps=run["steps"], survey_rows=0),
        parallel=ParallelConfig(**run["parallel"]),
    )


def train(run: dict[str, Any], plan: dict[str, Any], runtime: Runtime) -> None:
    config, out = config_of(run, plan["data"]), Path(plan["out"])
    job = build(config, data=Path(plan["data"]), directory=RunDirectory(out / run["name"]), runtime=runtime)
    if run.get("resume"):
        checkpoint.restore(step_directory(out / run["resume"], run["at"]), job.trainer, job.loader)
    steps, records = job._steps(), []
    while job.trainer.position.step < run["steps"]:
        batches = job._read(steps)
        upcoming = job._announce(steps, batches)
        records.append(job.trainer.step(batches, clock=PartClock(device=runtime.device), upcoming=upcoming))
        job.loader.mark_trained(batches[-1])
        if job.trainer.position.step == run.get("save"):
            (out / run["name"]).mkdir(exist_ok=True)
            checkpoint.save(out / run["name"], job.trainer, job.loader, keep=1)
    state = checkpoint.capture(job.trainer, job.loader)
    if run.get("predict"):
        state.tensors["predictions"] = _predictions(job, config, runtime)
    if runtime.is_main:
        save_file({key: value.contiguous() for key, value in state.tensors.items()}, out / f"{run['name']}.safetensors")
        keep = ("step", "loss", "grad_norm", "samples", "tokens")
        (out / f"{run['name']}.json").write_text(json.dumps([{key: r[key] for key in keep} for r in records]))
        (out / f"{run['name']}.local.json").write_text(json.dumps(_held(job)))


def _held(job: Any) -> dict[str, int]:
    """Numbers that rank 0 keeps between steps, of dense parameters and of their gradients' moments."""
    local = [p.to_local() if hasattr(p, "to_local") else p for p in job.trainer.parallel.module.parameters()]
    whole = sum(torch.Size(shape).numel() for shape in job.trainer.parallel.placement.shapes.values())
    return {"held": sum(p.numel() for p in local), "whole": whole}


def _predictions(job: Any, config: Any, runtime: Runtime) -> torch.Tensor:
    from gem_data.api import build_loader
    from gem_data.interface import LoaderConfig

    loader = build_loader(
        job.data,
        split="eval",
        config=LoaderConfig(global_batch_size=37, shuffle=False, prefetch=0),
        rank=runtime.rank,
        world_size=runtime.world_size,
    )
    try:
        return predict(job.trainer.parallel, loader, schema=job.schema, runtime=runtime)["prediction"]
    finally:
        loader.close()


def main(plan_file: str) -> None:
    plan = json.loads(Path(plan_file).read_text())
    runtime = start_runtime(device="cpu", threads=1, deterministic=True, timeout=timedelta(seconds=120))
    for run in plan["runs"]:
        train(run, plan, runtime)
    runtime.close()
