"""C6: incremental checkpoints: the same bits, ten times fewer bytes at 1 % touched, a missing base is found."""

from __future__ import annotations

import shutil

import pytest
import torch
from gem_pipelines.checkpoint_format import Checkpoint, step_directory
from gem_pipelines.checkpoint_incremental import Chain, read_whole
from gem_pipelines.checkpoint_keep import find_all_damage, find_latest
from gem_pipelines.checkpoint_manifest import read_manifest
from gem_pipelines.errors import CheckpointError

ROWS, DIM = 20_000, 16


def touched(tables, rows, generator):
    """The tables after an update of `rows`: other weights and momenta there, the same bits elsewhere."""
    weight, momentum = (part.clone() for part in tables)
    weight[rows] += torch.randn(len(rows), DIM, generator=generator)
    momentum[rows] += torch.rand(len(rows), generator=generator)
    return weight, momentum


def checkpoint(tables, step):
    tensors = {"tables.t.weight": tables[0], "tables.t.momentum": tables[1], "dense.w": torch.full((64,), float(step))}
    return Checkpoint(tensors=tensors, state={"step": step}, about={})


def bits(read):
    return {key: (str(value.dtype), tuple(value.shape), value.numpy().tobytes()) for key, value in read.tensors.items()}


@pytest.fixture
def chain(tmp_path, rng):
    """A full checkpoint and four incremental ones, 1 % of the rows touched before each: directory, states, sizes."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    tables = (torch.randn(ROWS, DIM, generator=generator), torch.rand(ROWS, generator=generator))
    writer, written, stats = Chain(full_every=9), [], []
    hot = torch.randperm(ROWS, generator=generator)[: ROWS // 100]
    for step in range(5):
        written.append(checkpoint(tables, step))
        stats.append(writer.write(step_directory(tmp_path, step), written[-1]))
        tables = touched(tables, hot, generator)
    return tmp_path, written, stats


def test_c6_lossless_and_ten_times_smaller(chain, counted):
    parent, written, stats = chain
    assert [incremental for _, incremental in stats] == [False, True, True, True, True]
    for step, expected in enumerate(written):
        read = read_whole(step_directory(parent, step))
        assert bits(read) == bits(expected)
        assert read.state == expected.state
    ratios = [stats[0][0].bytes / s.bytes for s, _ in stats[1:]]
    assert min(ratios) >= 10
    counted("times fewer bytes", f"{min(ratios):.0f}")


def test_c6_bits_that_compare_equal_are_kept_apart(tmp_path):
    """0.0 and -0.0, and two NaNs, are equal or unequal to floats; the bits count."""
    weight = torch.zeros(50, 2)
    weight[3] = float("nan")
    writer = Chain(full_every=9)
    writer.write(step_directory(tmp_path, 1), checkpoint((weight, torch.zeros(50)), 1))
    after = weight.clone()
    after[7, 1] = -0.0
    _, incremental = writer.write(step_directory(tmp_path, 2), checkpoint((after, torch.zeros(50)), 2))
    assert incremental
    assert bits(read_whole(step_directory(tmp_path, 2))) == bits(checkpoint((after, torch.zeros(50)), 2))


def test_c6_only_the_base_is_needed_and_its_loss_is_found(chain):
    parent, written, _ = chain
    for middle in (1, 2):
        shutil.rmtree(step_directory(parent, middle))
    assert bits(read_whole(step_directory(parent, 4))) == bits(written[4])
    base = step_directory(parent, 0)
    base.rename(parent / "elsewhere")
    with pytest.raises(CheckpointError, match="step-00000000 is missing"):
        read_whole(step_directory(parent, 4))
    assert any("step-00000000" in damage.file for damage in find_all_damage(step_directory(parent, 4)))
    assert find_latest(parent, say=lambda line: None) is None
    # Another full checkpoint in its place is not the base.
    Chain().write(base, checkpoint((torch.zeros(ROWS, DIM), torch.zeros(ROWS)), 0))
    with pytest.raises(CheckpointError, match="other manifest"):
        read_whole(step_directory(parent, 4))
    assert find_latest(parent, say=lambda line: None) == 0
    shutil.rmtree(base)
    (parent / "elsewhere").rename(base)
    path = base / "state.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CheckpointError, match="damaged"):
        read_whole(step_directory(parent, 4))


def test_c6_much_changed_or_a_damaged_base_means_full(tmp_path):
    generator = torch.Generator().manual_seed(1)
    tables = (torch.randn(200, DIM, generator=generator), torch.rand(200, generator=generator))
    writer = Chain(full_every=9)
    writer.write(step_directory(tmp_path, 1), checkpoint(tables, 1))
    tables = touched(tables, torch.arange(150), generator)
    assert not writer.write(step_directory(tmp_path, 2), checkpoint(tables, 2))[1]
    tables = touched(tables, torch.arange(2), generator)
    assert writer.write(step_directory(tmp_path, 3), checkpoint(tables, 3))[1]
    base = read_manifest(step_directory(tmp_path, 3)).base
    assert base is not None
    assert base.step == 2
    (step_directory(tmp_path, 2) / "state.json").write_text("{}")
    assert not writer.write(step_directory(tmp_path, 4), checkpoint(tables, 4))[1]
    assert find_latest(tmp_path, say=lambda line: None) == 4


def test_c6_a_run_resumes_from_an_incremental_one(make_job, take_steps, state_of):
    train = {"checkpoint_full_every": 4, "checkpoint_async": False, "keep_checkpoints": 9}
    data = {"global_batch_size": 2}  # so that a step touches few rows
    job = make_job("run", train=train, data=data)
    for _ in range(3):
        take_steps(job, 1)
        job.saver.save(job.trainer, job.loader)
    job.saver.finish(3)
    kinds = [record["incremental"] for record in job.saver.records()]
    assert kinds == [False, True, True]
    other = make_job("other", train=train, data=data)
    from gem_pipelines import checkpoint as module

    module.restore(step_directory(job.directory.checkpoints, 3), other.trainer, other.loader)
    assert state_of(other) == state_of(job)
    assert take_steps(other, 2) == take_steps(job, 2)
