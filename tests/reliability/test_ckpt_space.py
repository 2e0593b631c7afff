"""C2: a full disk, a file limit, refused writes: named with path and bytes, nothing half written, the last one kept."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
from collections import namedtuple

import pytest
import torch
from gem_pipelines import checkpoint_format, failpoints
from gem_pipelines.checkpoint_format import Checkpoint, list_steps, step_directory, write_checkpoint
from gem_pipelines.checkpoint_keep import find_latest
from gem_pipelines.checkpoint_manifest import find_damage
from gem_pipelines.errors import CheckpointError
from gem_pipelines.rundir import read_records

BIG = Checkpoint(tensors={"dense.w": torch.randn(300_000)}, state={}, about={})
SMALL = Checkpoint(tensors={"dense.w": torch.randn(100)}, state={}, about={})


@pytest.fixture
def failing():
    """failing(place, error number, times): writing fails there; taken away after the test."""

    def install(place, number, times=10**9):
        left = [times]

        def hook(name):
            if name == place and left[0] > 0:
                left[0] -= 1
                raise OSError(number, os.strerror(number), f"/some/{name}")

        failpoints.install(hook)

    yield install
    failpoints.install(None)


def test_c2_a_limit_on_files_is_named_and_nothing_is_left(tmp_path):
    """RLIMIT_FSIZE: the write really fails in the kernel, in the middle of a shard."""
    write_checkpoint(step_directory(tmp_path, 1), SMALL)
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
            write_checkpoint(step_directory(tmp_path, 2), BIG)
        except CheckpointError as error:
            named = ("File too large", "needs 1200000 bytes", "are free")
            code = 0 if all(part in str(error) for part in named) else 4
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert find_latest(tmp_path, say=print) == 1


def test_c2_a_full_disk(tmp_path, monkeypatch):
    """A file system of 1 MiB, where one may be mounted. The check of free bytes is left out: the write itself fails."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {mounted.stderr.decode().strip()}")
    try:
        write_checkpoint(step_directory(disk, 1), SMALL)
        with pytest.raises(CheckpointError, match=r"needs 1200000 bytes and \d+ are free"):
            write_checkpoint(step_directory(disk, 2), BIG)
        monkeypatch.setattr(checkpoint_format, "check_space", lambda *args: None)
        with pytest.raises(CheckpointError, match=r"No space left on device; a checkpoint needs 1200000 bytes, \d+"):
            write_checkpoint(step_directory(disk, 2), BIG)
        assert [path.name for path in disk.iterdir()] == ["step-00000001"]
        assert find_damage(step_directory(disk, 1)) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("place", failpoints.WRITER[:5])
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOSPC], ids=["EIO", "EACCES", "ENOSPC"])
def test_c2_a_refused_write_leaves_nothing(tmp_path, failing, place, number):
    write_checkpoint(step_directory(tmp_path, 1), SMALL)
    failing(place, number)
    with pytest.raises(CheckpointError, match=f"/some/{place}: {os.strerror(number)}; a checkpoint needs 400 bytes"):
        write_checkpoint(step_directory(tmp_path, 2), SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert find_latest(tmp_path, say=print) == 1


def test_c2_too_little_room_stops_before_the_first_step(make_job, monkeypatch):
    job = make_job()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(CheckpointError, match=r"a checkpoint needs \d{5,} bytes and 1 are free: make room"):
        job.train(resumed_from=None, survey=None)
    assert job.trainer.position.step == 0


@pytest.mark.parametrize(
    "beside", [pytest.param(False, id="in line", marks=pytest.mark.slow), pytest.param(True, id="beside")]
)
def test_c2_stop_or_go_on_by_policy(make_job, failing, beside):
    train = {"steps": 4, "checkpoint_every": 1, "checkpoint_async": beside, "print_every": 100}
    job = make_job("stops", train=train)
    failing("before_fsync", errno.ENOSPC, times=1)
    with pytest.raises(CheckpointError, match=r"step-00000001 was not written: .*No space left"):
        job.train(resumed_from=None, survey=None)
    assert job.trainer.position.step <= 3
    assert find_latest(job.directory.checkpoints, say=print) in (None, 2, 3)

    job = make_job("goes on", train={**train, "on_save_error": "continue"})
    failing("before_fsync", errno.ENOSPC, times=1)
    assert job.train(resumed_from=None, survey=None).end["status"] == "completed"
    saves = {r["step"]: r["error"] for r in read_records(job.directory.metrics_file) if r["kind"] == "checkpoint"}
    assert saves.keys() == {1, 2, 3, 4}
    assert "No space left" in saves[1]
    assert [saves[step] for step in (2, 3, 4)] == [None] * 3
    assert list_steps(job.directory.checkpoints) == [2, 3, 4]

    job = make_job("no last one", train={**train, "on_save_error": "continue"})
    failing("before_fsync", errno.ENOSPC)
    with pytest.raises(CheckpointError, match=r"step-00000004 was not written: .*No space left"):
        job.train(resumed_from=None, survey=None)
    assert not [r for r in read_records(job.directory.metrics_file) if r["kind"] == "end"]
