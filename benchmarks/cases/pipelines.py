"""The training job: the dense model, the end-to-end step in one process and in two, metrics, checkpoints.

The step is measured on batches of the generated data set: ragged as they come, uniform with every stream cut to the
latest 6 events of rows that have that many. Truth of the step is the same step with every part replaced by its
reference (attention, tables) on the same batches.
"""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from cases.case import Case, scratch
from cases.counting import count_tensors, python_calls
from cases.memory import count_all, count_memory
from cases.process_group import ensure_world_of_one
from cases.ranks import run_ranks

BATCH = 64
UNIFORM_LENGTH = 6


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """A trainer under test, one made of references, and a batch."""

    trainer: Any
    reference: Any
    batch: Any


@cache
def generated_data() -> tempfile.TemporaryDirectory[str]:
    """The data set of recipe `debug`, written once a process."""
    import gem_datasets
    from gem_data.api import schema_from_dict, write_dataset

    data = gem_datasets.load("synthetic", rows=2000, users=100, items=200, streams=2, max_length=12)
    directory = scratch()
    tables = {"train": data.train, "eval": data.eval}
    write_dataset(directory.name + "/set", schema_from_dict(data.schema), tables)
    return directory


def config_of(*, impl: str) -> Any:
    """Recipe debug with every implementation named: the ones in use, or the references."""
    from gem_pipelines.recipes.debug import debug

    config = debug()
    attention, tables = ("eager", "torchrec") if impl == "used" else ("reference", "reference")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, attention=attention),
        tables=dataclasses.replace(config.tables, impl=tables),
    )


def make_trainer(*, impl: str, runtime: Any, **axes: int) -> Any:
    """A trainer at step 0; axes: how it lies on the processes (ParallelConfig)."""
    from gem_data.api import read_schema
    from gem_pipelines.config import ParallelConfig
    from gem_pipelines.model import build_model, table_specs
    from gem_pipelines.parallelize import parallelize
    from gem_pipelines.trainer import Trainer

    schema = read_schema(generated_data().name + "/set")
    config = dataclasses.replace(config_of(impl=impl), parallel=ParallelConfig(**axes))
    parallel = parallelize(
        build_model(schema, config.model, seed=1),
        table_specs(schema, config.model),
        config=config.tables,
        parallel=config.parallel,
        seed=1,
        runtime=runtime,
    )
    return Trainer(parallel, schema=schema, config=config, runtime=runtime, total_steps=20)


def make_step(*, shape: str) -> StepInputs:
    import torch
    from gem_pipelines.runtime import Runtime

    ensure_world_of_one()
    runtime = Runtime(rank=0, world_size=1, device=torch.device("cpu"))
    return StepInputs(
        trainer=make_trainer(impl="used", runtime=runtime),
        reference=make_trainer(impl="reference", runtime=runtime),
        batch=batch_of(shape),
    )


def batch_of(shape: str, *, rank: int = 0, world_size: int = 1) -> Any:
    """The first batch in file order; uniform: of the rows that have 6 events in every stream, the latest 6."""
    from gem_data.api import build_loader, read_schema, write_dataset
    from gem_data.interface import LoaderConfig

    directory = Path(generated_data().name)
    source, limit = directory / "set", None
    if shape == "uniform":
        source, limit = directory / "uniform", UNIFORM_LENGTH
        if not source.exists():
            import pyarrow.compute as pc
            import pyarrow.parquet as pq

            schema = read_schema(directory / "set")
            table = pq.read_table(sorted((directory / "set").glob("train-*.parquet"))[0])
            for stream in schema.streams:
                lengths = pc.list_value_length(table.column(f"stream.{stream.name}.time"))
                table = table.filter(pc.greater_equal(lengths, UNIFORM_LENGTH))
            write_dataset(source, dataclasses.replace(schema, files=()), {"train": table})
    settings = LoaderConfig(global_batch_size=BATCH, shuffle=False, prefetch=0, max_length=limit)
    loader = build_loader(source, split="train", config=settings, rank=rank, world_size=world_size)
    return next(loader.epoch())


def run_step(inputs: StepInputs) -> dict[str, Any]:
    return train_once(inputs.trainer, inputs.batch)


def train_once(trainer: Any, batch: Any) -> dict[str, Any]:
    """One step; returns its record."""
    import torch
    from gem_pipelines.timing import PartClock

    return trainer.step([batch], clock=PartClock(device=torch.device("cpu")))


def check_step(inputs: StepInputs, record: dict[str, Any]) -> None:
    """Loss and gradient norm of the step, and afterwards every parameter and table, as with the references."""
    import torch

    expected = train_once(inputs.reference, inputs.batch)
    for name in ("loss", "grad_norm"):
        assert abs(record[name] - expected[name]) <= 1e-5 * abs(expected[name]), (name, record[name], expected[name])
    used, plain = inputs.trainer.parallel, inputs.reference.parallel
    for (name, ours), theirs in zip(used.module.named_parameters(), plain.module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    expected_tables = plain.tables.table_state()
    for table, tensors in used.tables.table_state().items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected_tables[table][name], rtol=1e-4, atol=1e-6)


def useful_flops(inputs: StepInputs) -> dict[str, int]:
    """Forward and backward FLOPs of real lengths and masks, by the job's own count."""
    from gem_pipelines.batches import event_lengths
    from gem_pipelines.model import training_flops

    trainer = inputs.trainer
    counts = training_flops(trainer.config.model, trainer.schema, event_lengths(inputs.batch), rows=BATCH)
    return {"useful_flops": sum(counts.values())}


# Two copies of a dense model cut in two, tables over all four. Groups over the same ranks are one group, and one over
# all ranks is the default group: so it takes four ranks to count a dense axis by itself.
MESH = {"shard": 2, "replicate": 2, "table_shard": 4}


def train_rank(world_size: int, axes: dict[str, int]) -> None:
    """One rank of several: three steps on its part of the batch; prints losses, gradient norms, counts of the third."""
    import json
    from datetime import timedelta

    from gem_pipelines.runtime import start_runtime

    from cases.counting import TensorCounter

    runtime = start_runtime(device="cpu", threads=1, deterministic=False, timeout=timedelta(seconds=60))
    trainer = make_trainer(impl="used", runtime=runtime, **axes)
    batch = batch_of("ragged", rank=runtime.rank, world_size=world_size)
    records = [train_once(trainer, batch) for _ in range(2)]
    with TensorCounter() as counter:
        records.append(train_once(trainer, batch))
    found = {name: [record[name] for record in records] for name in ("loss", "grad_norm")}
    print(json.dumps({**found, "counts": counter.totals()}))
    runtime.close()


def run_on_ranks(memory: dict[str, Any], *, world_size: int, axes: dict[str, int]) -> dict[str, Any]:
    """Three steps on gloo processes over their parts of the batch; keeps what rank 0 said."""
    code = f"from cases import pipelines; pipelines.train_rank({world_size}, {axes})"
    memory |= run_ranks(code, world_size)[0]
    return memory


@cache
def one_process() -> dict[str, list[float]]:
    """Losses and gradient norms of three steps of one process, made of references."""
    inputs = make_step(shape="ragged")
    records = [train_once(inputs.reference, inputs.batch) for _ in range(3)]
    return {name: [record[name] for record in records] for name in ("loss", "grad_norm")}


def check_on_ranks(memory: dict[str, Any], result: dict[str, Any]) -> None:
    """They train the model that one process does: the same three losses and gradient norms."""
    for name, expected in one_process().items():
        for ours, theirs in zip(result[name], expected, strict=True):
            assert abs(ours - theirs) <= 1e-5 * abs(theirs), (name, ours, theirs)


def make_metrics() -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(3)
    count = 6000
    return {
        "user_N": rng.integers(0, 300, count),
        "p_N": np.round(rng.random(count), 3),  # ties
        "y_N": (rng.random(count) < 0.3).astype(np.float64),
        "w_N": rng.integers(0, 3, count).astype(np.float64),
    }


def run_metrics(inputs: dict[str, Any]) -> tuple[Any, Any]:
    from gem_pipelines.metrics import auc, grouped_auc

    return auc(inputs["p_N"], inputs["y_N"], inputs["w_N"]), grouped_auc(**inputs)


def check_metrics(inputs: dict[str, Any], result: tuple[Any, Any]) -> None:
    """AUC of all rows and GAUC, by counting pairs."""
    import numpy as np

    def pairs(p: Any, y: Any, w: Any) -> tuple[float, float]:
        positive, negative = y == 1, y == 0
        weight = w[positive][:, None] * w[negative][None, :]
        ahead = np.sign(p[positive][:, None] - p[negative][None, :]) / 2 + 0.5
        return float((weight * ahead).sum()), float(weight.sum())

    p, y, w = inputs["p_N"], inputs["y_N"], inputs["w_N"]
    won, total = pairs(p, y, w)
    assert abs(result[0] - won / total) < 1e-12
    areas, weights = [], []
    for user in np.unique(inputs["user_N"]):
        of = inputs["user_N"] == user
        won, total = pairs(p[of], y[of], w[of])
        if total > 0:
            areas.append(won / total)
            weights.append(w[of].sum())
    assert abs(result[1].gauc - np.average(areas, weights=weights)) < 1e-12


def count_python(inputs: Any, run: Any) -> dict[str, int]:
    """For code without tensors."""
    return {"python_calls": python_calls(lambda: run(inputs)), **count_memory(inputs, run)}


def make_checkpoint() -> dict[str, Any]:
    import torch
    from gem_pipelines.checkpoint_format import Checkpoint

    generator = torch.Generator().manual_seed(6)
    tensors = {f"model/layer.{i}.weight": torch.randn(256, 256, generator=generator) for i in range(8)}
    tensors |= {f"tables/t{i}/weight": torch.randn(4000, 32, generator=generator) for i in range(2)}
    return {
        "checkpoint": Checkpoint(tensors=tensors, state={"step": 3}, about={"by": "benchmark"}),
        "directory": scratch(),
        "number": iter(range(1, 1_000_000)),
    }


def run_checkpoint(inputs: dict[str, Any]) -> Any:
    """Write a checkpoint of 3 MB, read it back, which verifies every block, and remove it."""
    import shutil

    from gem_pipelines.checkpoint_format import read_checkpoint, write_checkpoint

    path = Path(inputs["directory"].name) / f"step-{next(inputs['number']):08d}"
    write_checkpoint(path, inputs["checkpoint"])
    read = read_checkpoint(path)
    inputs["bytes"] = sum(file.stat().st_size for file in path.iterdir())
    shutil.rmtree(path)
    return read


def check_checkpoint(inputs: dict[str, Any], read: Any) -> None:
    import torch

    written = inputs["checkpoint"]
    assert read.state == written.state
    assert read.tensors.keys() == written.tensors.keys()
    assert all(torch.equal(read.tensors[key], tensor) for key, tensor in written.tensors.items())


class _NoLoader:
    """A loader of which nothing is kept."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def run_snapshot(inputs: StepInputs) -> Any:
    """How long training stands still for a checkpoint that is written beside it: gather, and copy to host memory."""
    from gem_pipelines.checkpoint import capture
    from gem_pipelines.checkpoint_saver import snapshot

    return snapshot(capture(inputs.trainer, _NoLoader()), keep=True)  # type: ignore[arg-type]


def check_snapshot(inputs: StepInputs, taken: Any) -> None:
    """The state of now, and no later step changes it."""
    import torch
    from gem_pipelines.checkpoint import capture

    live = capture(inputs.trainer, _NoLoader()).tensors  # type: ignore[arg-type]
    before = {key: value.clone() for key, value in live.items()}
    assert taken.tensors.keys() == before.keys()
    run_step(inputs)
    assert all(torch.equal(taken.tensors[key], value) for key, value in before.items())
    assert {key.split(".")[0] for key in live if not torch.equal(live[key], before[key])} >= {"dense"}


STEPS = tuple(
    Case(
        name=f"pipelines.step_{shape}",
        make=partial(make_step, shape=shape),
        run=run_step,
        check=check_step,
        count=count_tensors,
        formula=useful_flops,
        repeat=20,
    )
    for shape in ("ragged", "uniform")
)
CASES = (
    *STEPS,
    Case(
        name="pipelines.step_two_ranks_ragged",
        make=dict,
        run=partial(run_on_ranks, world_size=2, axes={}),
        check=check_on_ranks,
        count=lambda memory, run: memory["counts"],
        timed=False,
    ),
    Case(
        name="pipelines.step_mesh_ragged",
        make=dict,
        run=partial(run_on_ranks, world_size=4, axes=MESH),
        check=check_on_ranks,
        count=lambda memory, run: memory["counts"],
        timed=False,
    ),
    Case(name="pipelines.auc", make=make_metrics, run=run_metrics, check=check_metrics, count=count_python),
    Case(
        name="pipelines.checkpoint_snapshot",
        make=partial(make_step, shape="ragged"),
        run=run_snapshot,
        check=check_snapshot,
        count=count_tensors,
        repeat=40,
    ),
    Case(
        name="pipelines.checkpoint",
        make=make_checkpoint,
        run=run_checkpoint,
        check=check_checkpoint,
        count=count_all,
        formula=lambda inputs: {"file_bytes": inputs["bytes"]},
        repeat=40,
    ),
)
