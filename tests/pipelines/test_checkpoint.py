"""Training state: captured, put back bit for bit, refused whole where it does not fit."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
import torch
from gem_pipelines import checkpoint
from gem_pipelines.checkpoint_format import Checkpoint, list_steps, read_checkpoint, step_directory, write_checkpoint
from gem_pipelines.checkpoint_manifest import find_damage
from gem_pipelines.checkpoint_start import start_from
from gem_pipelines.contract import installed_versions
from gem_pipelines.errors import CheckpointError


def save(job) -> None:
    checkpoint.save(job.directory.checkpoints, job.trainer, job.loader, keep=3)


def test_goes_on_bit_for_bit_in_the_middle_of_an_epoch(make_job, take_steps, state_of):
    straight = make_job("straight", data={"global_batch_size": 24})
    take_steps(straight, 5)
    torch.rand(3), np.random.random(3), random.random()  # building a job seeds the generators: move on from there
    save(straight)
    draws = [torch.rand(2).tolist(), np.random.random(2).tolist(), [random.random()]]
    expected = take_steps(straight, 12)  # into the next epoch

    resumed = make_job("resumed", data={"global_batch_size": 24, "prefetch": 2})
    take_steps(resumed, 1)  # restoring must not depend on a fresh state
    checkpoint.restore(step_directory(straight.directory.checkpoints, 5), resumed.trainer, resumed.loader)
    assert [torch.rand(2).tolist(), np.random.random(2).tolist(), [random.random()]] == draws
    assert take_steps(resumed, 12) == expected
    assert state_of(resumed) == state_of(straight)
    resumed.loader.close()


def test_load_then_save_is_the_identity(make_job, take_steps):
    job = make_job()
    take_steps(job, 3)
    save(job)
    stored = read_checkpoint(step_directory(job.directory.checkpoints, 3))
    other = make_job("other")
    checkpoint.restore(step_directory(job.directory.checkpoints, 3), other.trainer, other.loader)
    again = checkpoint.capture(other.trainer, other.loader)
    assert again.state == stored.state
    assert {k: v.cpu().numpy().tobytes() for k, v in again.tensors.items()} == {
        k: v.numpy().tobytes() for k, v in stored.tensors.items()
    }
    assert {key.split(".")[0] for key in stored.tensors} == {"dense", "optimizer", "tables"}
    assert stored.state["optimizer"]["lr"] == 3e-3
    assert stored.state["tables_optimizer"]["kind"] == "row-wise AdaGrad"


def spoil(stored: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Many things wrong at once, and what the message must name."""
    tensors = dict(stored.tensors)
    dense = sorted(key for key in tensors if key.startswith("dense."))
    del tensors[dense[0]]
    tensors["dense.unknown"] = torch.zeros(2)
    tensors[dense[1]] = tensors[dense[1]].double()
    tensors["tables.item.weight"] = torch.zeros(3, 8)
    moment = next(key for key in tensors if key.endswith(".exp_avg_sq"))
    del tensors[moment]
    config = {**stored.about["config"], "optimizer": {**stored.about["config"]["optimizer"], "lr": 0.5}}
    state = {**stored.state, "metrics": {**stored.state["metrics"], "lifetime": {"buy": [0.0] * 5}}}
    names = [dense[0], "dense.unknown", dense[1], "tables.item.weight", moment, "optimizer.lr", "buy"]
    return Checkpoint(tensors=tensors, state=state, about={**stored.about, "config": config}), names


def test_every_mismatch_is_listed_and_nothing_is_applied(make_job, take_steps, state_of, tmp_path):
    job = make_job()
    take_steps(job, 2)
    save(job)
    spoilt, names = spoil(read_checkpoint(step_directory(job.directory.checkpoints, 2)))
    write_checkpoint(tmp_path / "step-00000009", spoilt)
    take_steps(job, 1)
    before = state_of(job)
    with pytest.raises(CheckpointError, match="nothing was loaded") as caught:
        checkpoint.restore(tmp_path / "step-00000009", job.trainer, job.loader)
    assert [name for name in names if name not in str(caught.value)] == []
    assert state_of(job) == before


def test_other_interface_versions_are_refused_or_said(make_job, take_steps, state_of, capsys):
    """Another major number forbids; another minor one, and one that is not stored, are said when the run goes on."""
    job = make_job()
    take_steps(job, 2)
    save(job)
    directory = step_directory(job.directory.checkpoints, 2)
    now = installed_versions()

    def rewrite(change) -> None:
        stored = read_checkpoint(directory)
        versions = {**stored.about["versions"], "interfaces": {name: list(v) for name, v in now.items()}}
        change(versions["interfaces"])
        shutil.rmtree(directory)
        about = {**stored.about, "versions": versions}
        write_checkpoint(directory, Checkpoint(tensors=stored.tensors, state=stored.state, about=about))

    assert checkpoint.restore(directory, job.trainer, job.loader) == []
    rewrite(lambda stored: stored.update(gem_embeddings=[1, 0]) or stored.pop("gem_comm"))
    assert job.restore_latest() == 2
    told = capsys.readouterr().out
    dotted = {name: ".".join(map(str, version)) for name, version in now.items()}
    assert f"step-00000002: interface gem_embeddings: stored 1.0, installed {dotted['gem_embeddings']}" in told
    assert f"step-00000002: interface gem_comm: no version is stored, installed {dotted['gem_comm']}" in told
    assert "gem_data" not in told
    said: list[str] = []
    start_from(directory, job.trainer, partial=False, say=said.append)
    assert [line for line in said if "gem_comm: no version" in line]
    rewrite(lambda stored: stored.update(gem_embeddings=[2, 0]))
    before = state_of(job)
    with pytest.raises(CheckpointError, match=r"interface gem_embeddings: stored 2\.0, installed 1\..*needed 1\."):
        job.restore_latest()
    assert state_of(job) == before


def test_other_data_is_refused_and_nothing_is_applied(make_job, take_steps, state_of):
    job = make_job()
    take_steps(job, 2)
    save(job)
    directory = step_directory(job.directory.checkpoints, 2)
    stored = read_checkpoint(directory)
    stored.state["loader"]["seed" if "seed" in stored.state["loader"] else "config"] = {"seed": 99}
    write_checkpoint(step_directory(job.directory.checkpoints, 3), stored)
    before = state_of(job)
    with pytest.raises(ValueError):
        checkpoint.restore(step_directory(job.directory.checkpoints, 3), job.trainer, job.loader)
    assert state_of(job) == before


def test_a_damaged_checkpoint_is_passed_over_aloud(make_job, take_steps):
    job = make_job()
    for _ in range(2):
        take_steps(job, 1)
        save(job)
    path = step_directory(job.directory.checkpoints, 2) / "tensors-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said = []
    assert checkpoint.find_latest(job.directory.checkpoints, say=said.append) == 1
    assert len(said) == 1
    assert "step-00000002: tensors-00000.safetensors bytes 0.." in said[0]


def test_reaching_a_damaged_step_again_keeps_both(make_job, take_steps):
    job = make_job()
    take_steps(job, 1)
    save(job)
    directory = step_directory(job.directory.checkpoints, 1)
    (directory / "state.json").write_text("{}")
    save(job)
    assert find_damage(directory) == []
    assert (directory.parent / "damaged-step-00000001-0" / "state.json").read_text() == "{}"
    with pytest.raises(CheckpointError, match="never overwritten"):
        save(job)


def test_only_the_newest_are_kept_and_drafts_are_swept(make_job, take_steps):
    job = make_job()
    (job.directory.checkpoints / ".tmp-step-00000001-77").mkdir()
    for _ in range(5):
        take_steps(job, 1)
        save(job)
    assert list_steps(job.directory.checkpoints) == [3, 4, 5]
    assert sorted(path.name for path in job.directory.checkpoints.iterdir()) == [f"step-0000000{n}" for n in (3, 4, 5)]


def test_a_failed_write_is_an_error_and_keeps_the_last(make_job, take_steps, monkeypatch):
    job = make_job()
    take_steps(job, 1)
    save(job)
    take_steps(job, 1)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match=r"step-00000002 was not written: .*No space left"):
        save(job)
    monkeypatch.undo()
    assert checkpoint.find_latest(job.directory.checkpoints, say=print) == 1
    assert [path.name for path in job.directory.checkpoints.iterdir()] == ["step-00000001"]
