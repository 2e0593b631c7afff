"""One rank that trains, flips a bit of its memory after step 3, and writes down what the check of copies says."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from gem_pipelines.config import ParallelConfig
from gem_pipelines.job import build
from gem_pipelines.leaving import leave
from gem_pipelines.recipes.debug import debug
from gem_pipelines.replica_check import ReplicaError, copied_tensors
from gem_pipelines.rundir import RunDirectory
from gem_pipelines.runtime import start_runtime


def flip(tensor: torch.Tensor) -> None:
    """A bit of the exponent of a number of usual size: 256 times larger or smaller, which training survives."""
    flat = tensor.detach().view(-1)
    present = flat.nonzero().view(-1)
    sizes = flat[present].abs()
    place = int(present[(sizes - sizes.median()).abs().argmin()])
    flat.view(torch.int32)[place] ^= 1 << 26


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    runtime = start_runtime(device="cpu", threads=1, deterministic=True, timeout=timedelta(seconds=60))
    base = debug()
    config = dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, source=plan["data"], options=(), global_batch_size=32, prefetch=0),
        train=dataclasses.replace(
            base.train,
            steps=6,
            survey_rows=0,
            profile_every=0,
            peak_flops_per_s=1e9,
            tensorboard=False,
            replica_check_every=2,
        ),
        parallel=ParallelConfig(**plan["parallel"]),
        tables=dataclasses.replace(base.tables, **{key: tuple(value) for key, value in plan["tables"].items()}),
    )
    directory = RunDirectory(Path(plan["out"]) / "run")
    if runtime.is_main:
        directory.create(config, command="test")
    runtime.barrier()
    job = build(config, data=Path(plan["data"]), directory=directory, runtime=runtime)
    step = job.trainer.step

    def stepping(*arguments: object, **options: object) -> object:
        record = step(*arguments, **options)
        if job.trainer.position.step == 3 and runtime.rank == runtime.world_size - 1:
            held = [
                found
                for one in copied_tensors(job.trainer.parallel, job.trainer.optimizer, runtime)
                for found in one.tensors.items()
            ]
            flip(next(value for name, value in held if name.startswith(plan["tensor"]) and bool(value.any())))
        return record

    job.trainer.step = stepping
    said = "nothing"
    try:
        job.train(resumed_from=None, survey=None)
    except ReplicaError as error:
        said = str(error)
    (Path(plan["out"]) / f"rank-{runtime.rank}.txt").write_text(said)
    runtime.close()


if __name__ == "__main__":
    main()
    leave(0)
