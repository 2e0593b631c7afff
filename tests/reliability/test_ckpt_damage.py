"""C1: every flipped bit, cut, zeroed block, swapped, foreign, missing or extra file is found before use."""

from __future__ import annotations

import shutil

import pytest
import torch
from gem_pipelines import checkpoint, checkpoint_format
from gem_pipelines.checkpoint_format import Checkpoint, read_checkpoint, step_directory, write_checkpoint
from gem_pipelines.checkpoint_manifest import find_damage
from gem_pipelines.cli import main
from gem_pipelines.errors import CheckpointError


def flip(path, rng):
    data = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return bit // 8


def cut(path, rng):
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def zero(path, rng):
    data = bytearray(path.read_bytes())
    starts = [start for start in range(0, len(data), 4096) if any(data[start : start + 4096])]
    start = rng.choice(starts)
    stop = min(start + 4096, len(data))
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two checkpoints of several files each, of different values but equal shapes."""
    patch = pytest.MonkeyPatch()
    patch.setattr(checkpoint_format, "SHARD_BYTES", 12_000)
    parent = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        generator = torch.Generator().manual_seed(step)
        tensors = {
            "tables.item.weight": torch.randn(900, 8, generator=generator),
            "tables.item.momentum": torch.rand(900, generator=generator),
            "dense.layer.weight": torch.randn(64, 60, generator=generator),
        }
        write_checkpoint(step_directory(parent, step), Checkpoint(tensors=tensors, state={"step": step}, about={}))
    patch.undo()
    return parent


def test_c1_flips_cuts_and_zeroed_blocks(run, rng, count, counted):
    directory = step_directory(run, 2)
    paths = sorted(directory.iterdir())
    assert len(paths) >= 5
    tries = {flip: count(fast=200, full_count=10_000), cut: count(fast=40, full_count=2_000)}
    tries[zero] = count(fast=20, full_count=500)
    for damage, number in tries.items():
        for _ in range(number):
            path = rng.choice(paths)
            sound = path.read_bytes()
            where = damage(path, rng)
            found = find_damage(directory)
            assert path.name in {d.file for d in found}, (path.name, where)
            if where is not None and path.suffix != ".json":
                assert any(d.start is not None and d.start <= where < d.stop for d in found), where
            with pytest.raises(CheckpointError, match=path.name):
                read_checkpoint(directory)
            path.write_bytes(sound)
        counted(damage.__name__, f"{number} of {number}")
    assert find_damage(directory) == []


def swap(directory, name, partner, other):
    mine, theirs = (directory / name).read_bytes(), (directory / partner).read_bytes()
    (directory / name).write_bytes(theirs)
    (directory / partner).write_bytes(mine)


def replace_by_other_step(directory, name, partner, other):
    shutil.copy(other / name, directory / name)


def remove(directory, name, partner, other):
    (directory / name).unlink()


def add(directory, name, partner, other):
    shutil.copy(directory / name, directory / f"x-{name}")


def link(directory, name, partner, other):
    (directory / name).unlink()
    (directory / name).symlink_to(other / name)


@pytest.mark.parametrize("change", [swap, replace_by_other_step, remove, add, link])
def test_c1_files_in_the_wrong_place(run, tmp_path, change):
    shards = sorted(path.name for path in step_directory(run, 2).glob("tensors-*"))
    for number, name in enumerate(shards):
        checkpoints = tmp_path / str(number)
        shutil.copytree(run, checkpoints)
        directory = step_directory(checkpoints, 2)
        change(directory, name, shards[number - 1], step_directory(checkpoints, 1))
        assert any(name in damage.file for damage in find_damage(directory)), name
        with pytest.raises(CheckpointError, match=name):
            read_checkpoint(directory)
        assert checkpoint.find_latest(checkpoints, say=lambda line: None) == 1


def test_c1_verify_says_which_and_fails(run, tmp_path, rng, capsys):
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(run, checkpoints)
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    path = step_directory(checkpoints, 2) / "tensors-00001.safetensors"
    flip(path, rng)
    assert main(["ckpt", "verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "step-00000002: DAMAGED" in out
    assert "tensors-00001.safetensors bytes 0.." in out


def test_c1_no_tensor_reaches_the_model(make_job, take_steps, state_of, rng, count, counted):
    job = make_job()
    take_steps(job, 1)
    checkpoint.save(job.directory.checkpoints, job.trainer, job.loader, keep=3)
    directory = step_directory(job.directory.checkpoints, 1)
    take_steps(job, 1)
    before = state_of(job)
    number = count(fast=10, full_count=200)
    for _ in range(number):
        path = rng.choice(sorted(directory.iterdir()))
        sound = path.read_bytes()
        flip(path, rng)
        with pytest.raises(CheckpointError, match=path.name):
            checkpoint.restore(directory, job.trainer, job.loader)
        path.write_bytes(sound)
    assert state_of(job) == before
    counted("refused restores", number)
    checkpoint.restore(directory, job.trainer, job.loader)
    assert state_of(job) != before
