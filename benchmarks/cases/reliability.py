"""What it costs that nothing is lost: checks of every step, hashes, incremental checkpoints, the ledger.

Part of the training job, so the cases are named "pipelines.*"; how long training stands still for a checkpoint is
pipelines.checkpoint_snapshot.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cases.case import Case, scratch
from cases.counting import count_tensors
from cases.memory import count_all
from cases.pipelines import batch_of, count_python, make_step


def make_validation(*, shape: str) -> dict[str, Any]:
    """A trainer and a batch of which one id lies outside its table, beside the sound one."""
    other = make_step(shape=shape)  # what is remembered by schema was made with another one, as in a longer process
    other.trainer._agreement.totals([other.batch], step=1)
    inputs = make_step(shape=shape)
    sound = inputs.batch
    ids = sound.ids
    values = ids.values().clone()
    values[0] = -1
    kjt = type(ids)(keys=ids.keys(), values=values, lengths=ids.lengths())
    return {"inputs": inputs, "sound": sound, "bad": replace(sound, ids=kjt)}


def run_validation(made: dict[str, Any]) -> Any:
    """What happens before a step: the batch is checked, and all ranks agree on sums."""
    return made["inputs"].trainer._agreement.totals([made["sound"]], step=1)


def check_validation(made: dict[str, Any], totals: Any) -> None:
    """Sums are those of the batch; a bad id is refused by name."""
    import torch
    from gem_pipelines.batches import BatchError

    batch = made["sound"]
    assert totals.rows == batch.sample_ids.shape[0]
    assert torch.equal(totals.weight, batch.weights.double().sum(0))
    refused = ""
    try:
        made["inputs"].trainer._agreement.totals([made["bad"]], step=1)
    except BatchError as error:
        refused = str(error)
    assert "-1" in refused, refused


def make_gradients() -> dict[str, Any]:
    """Gradients of the looked-up vectors of a mid-size step: six features of 20,000 ids, 32 wide."""
    import torch

    generator = torch.Generator().manual_seed(4)
    return {f"f{number}": torch.randn(20_000, 32, generator=generator) for number in range(6)}


def run_gradients(gradients: dict[str, Any]) -> Any:
    """The look at gradients before tables change."""
    from gem_pipelines.lookup import largest_magnitude

    return largest_magnitude(gradients)


def check_gradients(gradients: dict[str, Any], largest: Any) -> None:
    """The largest magnitude; not a number where one is not."""
    import torch

    assert float(largest) == max(float(grad.abs().max()) for grad in gradients.values())
    spoilt = {**gradients, "f3": gradients["f3"].clone()}
    spoilt["f3"][7, 5] = float("nan")
    assert torch.isnan(run_gradients(spoilt))


def make_bytes() -> dict[str, Any]:
    """8 MiB and a piece, as a shard has them."""
    import numpy as np

    return {"data": np.random.default_rng(5).bytes((8 << 20) + 1000)}


def run_hash(inputs: dict[str, Any]) -> Any:
    from gem_pipelines.checkpoint_manifest import block_hashes

    return block_hashes(inputs["data"])


def check_hash(inputs: dict[str, Any], hashes: Any) -> None:
    """One xxh3 for each MiB; one flipped bit changes that of its block alone."""
    import xxhash

    data, block = inputs["data"], 1 << 20
    assert list(hashes) == [xxhash.xxh3_64(data[i : i + block]).hexdigest() for i in range(0, len(data), block)]
    spoilt = bytearray(data)
    spoilt[3 * block + 17] ^= 4
    other = run_hash({"data": bytes(spoilt)})
    assert [number for number, (a, b) in enumerate(zip(hashes, other, strict=True)) if a != b] == [3]


ROWS, DIM, TOUCHED = 20_000, 32, 200


def make_incremental() -> dict[str, Any]:
    """A full checkpoint of a table, and the table after 1 % of its rows were touched."""
    import torch
    from gem_pipelines.checkpoint_format import Checkpoint, step_directory
    from gem_pipelines.checkpoint_incremental import Chain

    generator = torch.Generator().manual_seed(7)
    weight, momentum = torch.randn(ROWS, DIM, generator=generator), torch.rand(ROWS, generator=generator)
    rows = torch.randperm(ROWS, generator=generator)[:TOUCHED]
    directory = scratch()

    def checkpoint(step: int) -> Checkpoint:
        tensors = {"tables.t.weight": weight.clone(), "tables.t.momentum": momentum.clone()}
        return Checkpoint(tensors=tensors, state={"step": step}, about={})

    chain = Chain(full_every=1_000_000)
    chain.write(step_directory(Path(directory.name), 0), checkpoint(0))
    weight[rows] += 1.0
    momentum[rows] += 1.0
    return {"chain": chain, "directory": directory, "checkpoint": checkpoint(1), "number": iter(range(1, 1_000_000))}


def run_incremental(inputs: dict[str, Any]) -> Any:
    """Compare with the base and write what changed; read back and remove it, so that every call does the same."""
    from gem_pipelines.checkpoint_format import step_directory
    from gem_pipelines.checkpoint_incremental import read_whole

    path = step_directory(Path(inputs["directory"].name), next(inputs["number"]))
    _, incremental = inputs["chain"].write(path, inputs["checkpoint"])
    read = read_whole(path)
    inputs["bytes"] = sum(file.stat().st_size for file in path.iterdir())
    shutil.rmtree(path)
    return incremental, read


def check_incremental(inputs: dict[str, Any], result: Any) -> None:
    """The same bits, and at most a tenth of the bytes."""
    import torch

    incremental, read = result
    written = inputs["checkpoint"]
    assert incremental
    assert all(torch.equal(read.tensors[key], value) for key, value in written.tensors.items())
    assert inputs["bytes"] * 10 <= sum(value.nbytes for value in written.tensors.values())


def make_ledger() -> dict[str, Any]:
    """Batches of ten steps."""
    return {"batch": batch_of("ragged"), "directory": scratch(), "number": iter(range(1_000_000))}


def run_ledger(inputs: dict[str, Any]) -> Any:
    """Note ten steps and write their segment."""
    import torch
    from gem_pipelines.ledger import Ledger
    from gem_pipelines.runtime import Runtime

    runtime = Runtime(rank=0, world_size=1, device=torch.device("cpu"))
    directory = Path(inputs["directory"].name) / f"{next(inputs['number']):06d}"
    ledger = Ledger(directory, runtime=runtime, enabled=True)
    for step in range(1, 11):
        ledger.note([inputs["batch"]], step=step, epoch=0, trained=True)
    ledger.commit(10)
    inputs["bytes"] = sum(file.stat().st_size for file in directory.iterdir())
    return directory


def check_ledger(inputs: dict[str, Any], directory: Any) -> None:
    """Each step has the batch's sample ids, in their order."""
    from gem_pipelines.ledger import read_ledger

    found, expected = read_ledger(directory), inputs["batch"].sample_ids.tolist()
    assert found["sample_id"].tolist() == expected * 10
    assert found["step"].tolist() == [step for step in range(1, 11) for _ in expected]
    assert found["trained"].all()


def count_ledger(inputs: dict[str, Any], run: Any) -> dict[str, int]:
    return {**count_python(inputs, run), "file_bytes": inputs["bytes"]}


VALIDATION = tuple(
    Case(
        name=f"pipelines.validation_{shape}",
        make=partial(make_validation, shape=shape),
        run=run_validation,
        check=check_validation,
        count=count_tensors,
        repeat=100,
    )
    for shape in ("ragged", "uniform")
)
CASES = (
    *VALIDATION,
    Case(
        name="pipelines.gradient_check",
        make=make_gradients,
        run=run_gradients,
        check=check_gradients,
        count=count_tensors,
        repeat=40,
    ),
    Case(name="pipelines.checkpoint_hash", make=make_bytes, run=run_hash, check=check_hash, count=count_python),
    Case(
        name="pipelines.checkpoint_incremental",
        make=make_incremental,
        run=run_incremental,
        check=check_incremental,
        count=count_all,
        formula=lambda inputs: {"file_bytes": inputs["bytes"]},
        repeat=40,
    ),
    Case(name="pipelines.ledger", make=make_ledger, run=run_ledger, check=check_ledger, count=count_ledger, repeat=40),
)
