"""`gemline` on two ranks, forked from a process that has imported everything: half of what torchrun's start costs.

test_training.py starts its jobs by torchrun itself, as users do.
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
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        pids = zygote().start(arguments, world=2, output=output)
        codes = zygote().wait(pids, seconds=180)
        zygote().kill(pids)
        said = output.read_text()
    if None in codes:
        pytest.fail(f"gemline {' '.join(arguments)}: codes {codes} after 180 s\n{said[-3000:]}")
    return subprocess.CompletedProcess(arguments, next((code for code in codes if code), 0), said, said)
