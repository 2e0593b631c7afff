"""Ranks forked from a process that has imported everything: half of what torchrun's start costs, less for many ranks.

test_training.py starts jobs by torchrun itself, as users do.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from super_jobs import Zygote

ZYGOTES: dict[int, Zygote] = {}  # for all tests of this folder; the session ends them (conftest.py)


def zygote(number: int = 0) -> Zygote:
    """What ranks are forked from, started with its first."""
    if number not in ZYGOTES:
        ZYGOTES[number] = Zygote()
    return ZYGOTES[number]


def gemline(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `gemline ARGUMENTS` on two ranks to its end; stdout and stderr are one text. Code 0: both ended with 0."""
    codes, said = _run(arguments, world=2, seconds=180)
    if None in codes:
        pytest.fail(f"gemline {' '.join(arguments)}: codes {codes} after 180 s\n{said[-3000:]}")
    return subprocess.CompletedProcess(arguments, next((code for code in codes if code), 0), said, said)


def run_worker(worker: Path, arguments: list[str], *, world: int, seconds: float = 180) -> str:
    """main(*arguments) of the file `worker` on all ranks of a world, as torchrun starts them. Returns what they said.

    A rank that does not end with 0 fails the test, with all that was said.
    """
    codes, said = _run(arguments, world=world, seconds=seconds, worker=worker)
    if None in codes:
        pytest.fail(f"{worker.name} {' '.join(arguments)}: codes {codes} after {seconds} s\n{said[-3000:]}")
    assert codes == [0] * world, said
    return said


def _run(
    arguments: list[str], *, world: int, seconds: float, worker: Path | None = None
) -> tuple[list[int | None], str]:
    """Exit codes, None for a rank that was stopped after so many seconds; what all ranks said.

    Ranks of even and of odd numbers come from two processes, with two seeds of Python's hashes: sets of text have
    other orders, as in ranks started one by one.
    """
    with ThreadPoolExecutor(2) as both:
        made = list(both.map(zygote, range(min(world, 2))))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        output, ends = Path(folder) / "output", time.monotonic() + seconds
        parents = [made[rank % 2] for rank in range(world)]
        pids = [
            parent.fork(arguments, rank=rank, world=world, port=port, output=output, worker=worker)
            for rank, parent in enumerate(parents)
        ]
        codes = []
        for parent, pid in zip(parents, pids, strict=True):
            codes += parent.wait([pid], seconds=max(0.0, ends - time.monotonic()))
        for parent, pid in zip(parents, pids, strict=True):
            parent.kill([pid])
        return codes, output.read_text()
