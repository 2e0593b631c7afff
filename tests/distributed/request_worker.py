"""One rank: trains on requests, and beside it on the same impressions as plain samples; rank 0 compares.

main(REQUESTS, SAMPLES, OUT) in a rank forked as torchrun would start it.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path

import torch
from gem_data.api import expand_batch
from gem_pipelines.config import BalanceConfig, ParallelConfig
from gem_pipelines.job import build
from gem_pipelines.recipes.debug import debug
from gem_pipelines.rundir import RunDirectory
from gem_pipelines.runtime import Runtime, start_runtime
from gem_pipelines.timing import PartClock

STEPS = 6
VARIANTS = {
    "table_wise": (ParallelConfig(), "none"),
    "row_wise": (ParallelConfig(table_sharding="row_wise"), "none"),
    "balanced": (ParallelConfig(), "global"),
}


def compare(name: str, requests: Path, samples: Path, out: Path, runtime: Runtime) -> None:
    parallel, balance = VARIANTS[name]
    jobs = []
    for source, method in ((requests, balance), (samples, "none")):
        base = debug()
        config = dataclasses.replace(
            base,
            # 100 requests in batches of 33: the last batch of an epoch has one, so that a rank has none
            data=dataclasses.replace(base.data, source=str(source), options=(), global_batch_size=33, prefetch=0),
            train=dataclasses.replace(base.train, steps=STEPS, survey_rows=0),
            parallel=parallel,
            balance=BalanceConfig(method=method),
        )
        directory = RunDirectory(out / f"{name}-{source.name}")
        jobs.append(build(config, data=source, directory=directory, runtime=runtime))
    one, other = jobs
    steps, empty = one._steps(), 0
    for _ in range(STEPS):
        (batch,) = one._read(steps)
        empty += batch.rows == 0
        plain = expand_batch(one.schema, batch)
        whole = int(runtime.sum(torch.tensor([float(plain.global_rows)], dtype=torch.float64)))
        first = one.trainer.step([batch], clock=PartClock(device=runtime.device))
        second = other.trainer.step(
            [dataclasses.replace(plain, global_rows=whole)], clock=PartClock(device=runtime.device)
        )
        one.loader.mark_trained(batch)
        assert first["rows"] == second["rows"] == whole
        assert abs(first["loss"] - second["loss"]) <= 1e-5 * abs(second["loss"]), (first["loss"], second["loss"])
    assert int(runtime.sum(torch.tensor([float(empty)]))) > 0, "a rank without requests was to be among them"
    for mine, plain_state in (
        (one.trainer.parallel.dense_state(), other.trainer.parallel.dense_state()),
        *zip(
            one.trainer.parallel.tables.table_state().values(),
            other.trainer.parallel.tables.table_state().values(),
            strict=True,
        ),
    ):
        assert mine.keys() == plain_state.keys()
        for key, value in mine.items():
            torch.testing.assert_close(value, plain_state[key], rtol=1e-5, atol=1e-5, msg=f"{name}: {key}")
    one.loader.close()
    other.loader.close()
    if runtime.is_main:
        print(f"{name}: equal after {STEPS} steps")


def main(requests: str, samples: str, out: str) -> None:
    runtime = start_runtime(device="cpu", threads=1, deterministic=True, timeout=timedelta(seconds=60))
    for name in VARIANTS:
        compare(name, Path(requests), Path(samples), Path(out), runtime)
    runtime.close()
