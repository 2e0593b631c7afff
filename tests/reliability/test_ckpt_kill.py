"""T2: killed at every named place of the writer, in the main thread and beside it: a sound checkpoint loads afterwards.

Each try forks this process; the child writes steps 2 to 5 over a sound step 1, keeping two, and kills itself with
SIGKILL at the n-th time it reaches the place. What a checkpoint holds is a function of its step: content is compared.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from gem_pipelines import checkpoint_format, checkpoint_keep, failpoints
from gem_pipelines.checkpoint_format import Checkpoint, list_steps, read_checkpoint, step_directory, write_checkpoint
from gem_pipelines.checkpoint_incremental import Chain, read_whole
from gem_pipelines.checkpoint_keep import Keeper, find_latest
from gem_pipelines.checkpoint_manifest import find_damage, read_manifest

KEEP = 2


def content(step):
    """All of it changes with every step, but of the table only some rows."""
    table = torch.zeros(600, 8)
    table[step::100] = float(step)
    tensors = {
        "tables.t.weight": table,
        "tables.t.momentum": table[:, 0].clone(),
        "dense.w": torch.full((500,), 0.5 * step),
    }
    return Checkpoint(tensors=tensors, state={"step": step}, about={})


def write_all(parent, steps, *, full_every):
    chain, keeper = Chain(full_every=full_every), Keeper(parent, keep=KEEP)
    for step in steps:
        chain.write(step_directory(parent, step), content(step))
        keeper.sweep()


def child(parent, place, hit, *, beside, full_every, how):
    left = [hit]

    def hook(name):
        left[0] -= name == place
        if name == place and left[0] == 0:
            if how == signal.SIGKILL:
                os.kill(os.getpid(), how)
            (parent.parent / "here").touch()
            time.sleep(60)

    failpoints.install(hook)
    if beside:
        thread = threading.Thread(target=write_all, args=(parent, range(2, 6)), kwargs={"full_every": full_every})
        thread.start()
        thread.join()
    else:
        write_all(parent, range(2, 6), full_every=full_every)


def fork(parent, place, hit, *, how=signal.SIGKILL, **options):
    """Run `child` in a fork of this process; returns the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            child(parent, place, hit, how=how, **options)
        finally:
            os._exit(0)
    if how != signal.SIGKILL:
        deadline = time.monotonic() + 20
        while not (parent.parent / "here").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(pid, how)
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def assert_recovers(parent):
    said = []
    latest = find_latest(parent, say=said.append)
    assert said == []  # what is published is sound
    for step in list_steps(parent):
        assert find_damage(step_directory(parent, step)) == []
        whole, expected = read_whole(step_directory(parent, step)), content(step)
        assert whole.state == expected.state
        assert whole.tensors.keys() == expected.tensors.keys()
        assert all(torch.equal(whole.tensors[key], value) for key, value in expected.tensors.items())
    assert latest == max(list_steps(parent)) >= 1
    # Going on from there works, and sweeps what the kill left.
    write_all(parent, range(latest + 1, latest + 3), full_every=1)
    assert find_latest(parent, say=said.append) == latest + 2
    assert [path.name for path in parent.iterdir() if path.name.startswith(".")] == []
    assert len(list_steps(parent)) == KEEP
    return latest


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_format, "SHARD_BYTES", 8_000)
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    write_checkpoint(step_directory(directory, 1), content(1))
    return directory


@pytest.mark.parametrize("place", failpoints.WRITER)
@pytest.mark.parametrize("beside", [False, True], ids=["in line", "beside"])
def test_t2_killed_at_a_named_place(parent, place, beside, rng, count, counted, tmp_path):
    tries = count(fast=2, full_count=40)
    reached = []
    for number in range(tries):
        here = tmp_path / f"try-{number}" / "checkpoints"
        here.mkdir(parents=True)
        write_checkpoint(step_directory(here, 1), content(1))
        few = place in ("before_manifest", "before_rename", "before_dir_fsync", "before_gc")
        hit = rng.randint(1, 3 if few else 2 if place == "during_gc" else 12)
        assert fork(here, place, hit, beside=beside, full_every=rng.choice([1, 3])) == signal.SIGKILL
        reached.append(assert_recovers(here))
    counted(place, f"{tries} of {tries}, latest {sorted(set(reached))}")


def test_t2_terminated_while_flushing(parent):
    """C4: SIGTERM in the middle of a write drops it cleanly, at once."""
    begin = time.monotonic()
    assert fork(parent, "half_shard", 1, how=signal.SIGTERM, beside=True, full_every=1) == signal.SIGTERM
    assert time.monotonic() - begin < 10
    assert assert_recovers(parent) == 1


def test_the_last_good_one_is_never_removed(parent):
    """Newer ones that rot on disk do not count among those that are kept; one that rots while written stops removal."""
    write_all(parent, [2, 3], full_every=1)
    assert list_steps(parent) == [2, 3]
    path = step_directory(parent, 3) / "tensors-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    write_all(parent, [4], full_every=1)
    assert list_steps(parent) == [2, 3, 4]  # 4 and 2 are good, 3 is not
    keeper = Keeper(parent, keep=1)
    write_checkpoint(step_directory(parent, 5), content(5))
    (step_directory(parent, 5) / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="does not read back as it was written, older ones are kept"):
        keeper.sweep()
    assert list_steps(parent) == [2, 3, 4, 5]
    assert find_latest(parent, say=lambda line: None) == 4


def test_a_sweep_reads_what_is_new_and_not_what_is_kept(parent, monkeypatch):
    checked, parsed, find = [], [], checkpoint_keep.find_all_damage
    monkeypatch.setattr(checkpoint_keep, "find_all_damage", lambda path: checked.append(path.name) or find(path))
    monkeypatch.setattr(checkpoint_keep, "read_manifest", lambda path: parsed.append(path.name) or read_manifest(path))
    keeper, chain = Keeper(parent, keep=9), Chain(full_every=1)
    for step in range(2, 9):
        chain.write(step_directory(parent, step), content(step))
        keeper.sweep()
    assert sorted(checked) == [f"step-0000000{step}" for step in range(1, 9)]
    assert len(parsed) <= 2 * 8


def test_a_base_is_kept_as_long_as_it_is_needed(parent):
    write_all(parent, range(2, 6), full_every=10)
    assert list_steps(parent) == [2, 4, 5]  # 2 is the base of 4 and 5
    assert len(read_checkpoint(step_directory(parent, 5)).tensors["changed.t.rows"]) == 12
    write_all(parent, [6, 7], full_every=1)
    assert list_steps(parent) == [6, 7]
