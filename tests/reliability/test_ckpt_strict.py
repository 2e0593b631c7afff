"""C5: what does not fit is listed whole, nothing is applied; a partial load only on request, and it names the rest."""

from __future__ import annotations

import copy

import pytest
import torch
from gem_pipelines import checkpoint
from gem_pipelines.checkpoint_format import read_checkpoint, step_directory, write_checkpoint
from gem_pipelines.checkpoint_start import start_from
from gem_pipelines.errors import CheckpointError


def missing_key(stored):
    key = sorted(k for k in stored.tensors if k.startswith("dense."))[0]
    del stored.tensors[key]
    return [key]


def extra_key(stored):
    stored.tensors["dense.another"] = torch.zeros(2)
    return ["dense.another"]


def wrong_dtype(stored):
    key = sorted(k for k in stored.tensors if k.startswith("dense."))[0]
    stored.tensors[key] = stored.tensors[key].double()
    return [key, "torch.float64"]


def grown_table(stored):
    weight = stored.tensors["tables.item.weight"]
    stored.tensors["tables.item.weight"] = torch.cat([weight, weight[:5]])
    return ["tables.item.weight", str(tuple(weight.shape)), str((weight.shape[0] + 5, weight.shape[1]))]


def keys_of_another_sharding(stored):
    """As TorchRec names the same moments under another kind of sharding."""
    old = [key for key in stored.tensors if key.startswith("tables.") and key.endswith(".momentum")]
    for key in old:
        stored.tensors[key.replace(".momentum", ".momentum1")] = stored.tensors.pop(key)
    return [*old, f"{old[0]}1"]


def no_schedule(stored):
    del stored.state["optimizer"]["schedule"]
    return ["optimizer schedule"]


def no_hyperparameters(stored):
    del stored.state["optimizer"]["betas"], stored.state["optimizer"]["lr"]
    return ["optimizer lr", "optimizer betas"]


def no_positions(stored):
    del stored.state["loader"], stored.state["position"], stored.state["random"]
    return ["state loader", "state position", "state random"]


def other_tasks(stored):
    stored.state["metrics"]["lifetime"] = {"buy": [0.0] * 5}
    return ["buy"]


CHANGES = [
    missing_key,
    extra_key,
    wrong_dtype,
    grown_table,
    keys_of_another_sharding,
    no_schedule,
    no_hyperparameters,
    no_positions,
    other_tasks,
]


def test_c5_every_mismatch_is_named_and_nothing_is_applied(make_job, take_steps, state_of, tmp_path, counted):
    job = make_job()
    take_steps(job, 2)
    checkpoint.save(job.directory.checkpoints, job.trainer, job.loader, keep=3)
    stored = read_checkpoint(step_directory(job.directory.checkpoints, 2))
    take_steps(job, 1)
    before = state_of(job)
    for number, change in enumerate(CHANGES):
        spoilt = copy.deepcopy(stored)
        names = change(spoilt)
        directory = tmp_path / f"step-{number:08d}"
        write_checkpoint(directory, spoilt)
        with pytest.raises(CheckpointError, match="does not fit this run; nothing was loaded") as caught:
            checkpoint.restore(directory, job.trainer, job.loader)
        assert [name for name in names if name not in str(caught.value)] == [], change.__name__
        assert state_of(job) == before, change.__name__
    counted("kinds of mismatch", f"{len(CHANGES)} of {len(CHANGES)}")


def test_c5_a_partial_load_takes_what_fits_and_names_the_rest(make_job, take_steps, state_of, tmp_path):
    source = make_job("source")
    take_steps(source, 3)
    checkpoint.save(source.directory.checkpoints, source.trainer, source.loader, keep=3)
    directory = step_directory(source.directory.checkpoints, 3)
    stored = read_checkpoint(directory)
    missing = sorted(k for k in stored.tensors if k.startswith("dense."))[0]
    spoilt = copy.deepcopy(stored)
    del spoilt.tensors[missing]
    grown_table(spoilt)
    extra_key(spoilt)
    partial = tmp_path / "step-00000004"
    write_checkpoint(partial, spoilt)

    job = make_job("target")
    before, said = state_of(job), []
    with pytest.raises(CheckpointError, match="nothing was loaded") as caught:
        start_from(partial, job.trainer, partial=False, say=said.append)
    left = [missing, "tables.item.weight", "tables.item.momentum"]
    assert [name for name in [*left, "dense.another"] if f"tensor {name}: " not in str(caught.value)] == []
    assert state_of(job) == before
    assert said == []

    start_from(partial, job.trainer, partial=True, say=said.append)
    after = state_of(job)
    for key, value in stored.tensors.items():
        if key.startswith(("dense.", "tables.")):
            assert after[key] == (before[key] if key in left else value.numpy().tobytes()), key
    assert after["state"] == before["state"]
    for name in left:
        assert any(f"tensor {name}: keeps its start value" in line for line in said), name
    assert any("tensor dense.another: stored, but not used" in line for line in said)
    take_steps(job, 1)


def test_c5_a_new_run_starts_from_the_weights_of_another(make_job, take_steps, state_of):
    source = make_job("source")
    take_steps(source, 3)
    checkpoint.save(source.directory.checkpoints, source.trainer, source.loader, keep=3)
    job = make_job("target")
    start_from(step_directory(source.directory.checkpoints, 3), job.trainer, partial=False, say=lambda line: None)
    weights = {k: v for k, v in state_of(source).items() if k.startswith(("dense.", "tables."))}
    assert {k: v for k, v in state_of(job).items() if k.startswith(("dense.", "tables."))} == weights
    assert job.trainer.position.step == 0
