"""Ranks forked from a process that has imported everything: half of what torchrun's start costs, less for many ranks.

test_training.py starts jobs by torchrun itself, as users do.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

import pytest
from super_jobs import Zygote


@functools.cache
def zygote() -> Zygote:
    """One for all tests of this folder; the session ends it (conftest.py)."""
    return Zygote()


def gemline(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `gemline ARGUMENTS` on two ranks to its end; stdout and stderr are one text. Code 0: both ended with 0."""
    codes, said = _run(arguments, world=2, seconds=180, worker=None)
    return subprocess.CompletedProcess(arguments, next((code for code in codes if code), 0), said, said)


def run_worker(worker: Path, arguments: list[str], *, world: int, seconds: float = 180) -> str:
    """main(*arguments) of the file `worker` on all ranks of a world, as torchrun starts them. Returns what they said.

    A rank that does not end with 0 fails the test, with all that was said.
    """
    codes, said = _run(arguments, world=world, seconds=seconds, worker=worker)
    assert codes == [0] * world, said
    return said


def _run(arguments: list[str], *, world: int, seconds: float, worker: Path | None) -> tuple[list[int], str]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        pids = zygote().start(arguments, world=world, output=output, worker=worker)
        codes = zygote().wait(pids, seconds=seconds)
        zygote().kill(pids)
        said = output.read_text()
    if None in codes:
        pytest.fail(f"{worker or 'gemline'} {' '.join(arguments)}: codes {codes} after {seconds} s\n{said[-3000:]}")
    return codes, said
