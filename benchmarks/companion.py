"""The base commit's version of a case, in a forked process, one call at a time: the yardstick of the gate's times.

CPU time on a shared machine depends on the neighbours: with five times as much work as two cores can do, the median of
one unchanged call moved by a factor of 2 between processes a minute apart, and asv's interleaved rounds are that far
apart. Corrected by a fixed piece of other work (timing.YardstickClock) it still moved by 20 %, since neighbours slow
different work differently. Nothing is slowed like the same call: so while asv measures a commit, base or head, every
call stands between two calls of the base's version, milliseconds away on the same core, and counts as a multiple of
their mean. How far comparisons of equal code then still departed from 1 stands beside each limit in ci/limits.toml.

The process is forked before any package of the project is imported (torch is loaded already, so it starts at once) and
reads the packages from a folder with the base's files; so does every interpreter that it starts, by PYTHONPATH.

Its answers are a status byte and a time, or a status byte and a traceback: a base that fails in its hundredth call is
an error with its own message, never a number.
"""

from __future__ import annotations

import os
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timing import cpu_clock

ROUNDS = 4
"""Processes that the gate takes of each side; each makes `Case.repeat` calls."""
READY, FAILED = b"+", b"-"
TIME = struct.Struct("d")


class CannotPrepareError(RuntimeError):
    """The base cannot run the case, or gets it wrong; the message is its own."""


def package_folders(root: Path) -> list[str]:
    """What PYTHONPATH must hold for the packages of a checkout."""
    return [str(folder) for folder in (*sorted(root.glob("packages/*")), root / "pipelines", root / "datasets")]


class Companion:
    """`companion()` lets the other process make one call and returns its CPU seconds.

    prepare  what the process does first, returning the call; it runs with `folders` ahead on sys.path
    Raises CannotPrepareError when `prepare` raises; a call raises RuntimeError, with its traceback, when it failed.
    """

    def __init__(self, prepare: Callable[[], Callable[[], object]], folders: list[str]) -> None:
        loaded = [name for name in sys.modules if name.partition(".")[0].startswith("gem_")]
        if loaded:
            raise RuntimeError(f"too late for a companion: {loaded[0]} is imported already")
        asks, self._ask = os.pipe()
        self._answer, answers = os.pipe()
        if os.fork() == 0:
            os.close(self._ask)
            os.close(self._answer)
            serve(prepare, folders, asks, answers)
        os.close(asks)
        os.close(answers)
        if os.read(self._answer, 1) != READY:
            raise CannotPrepareError(self._rest() or "the base's process died")

    def __call__(self) -> float:
        try:
            os.write(self._ask, b"r")
        except BrokenPipeError:
            raise RuntimeError("the base's process died") from None
        status = os.read(self._answer, 1)
        if status == FAILED:
            raise RuntimeError(f"the base failed in a call:\n{self._rest().strip()}")
        answer = os.read(self._answer, TIME.size)  # written with its status at once, so it is here
        if status != READY or len(answer) != TIME.size:
            raise RuntimeError("the base's process died")
        return float(TIME.unpack(answer)[0])

    def _rest(self) -> str:
        """All that the other process still says before it ends."""
        return b"".join(iter(lambda: os.read(self._answer, 65536), b"")).decode(errors="replace")

    def close(self) -> None:
        """Let the other process end."""
        os.close(self._ask)
        os.close(self._answer)


def serve(prepare: Callable[[], Callable[[], object]], folders: list[str], asks: int, answers: int) -> Any:
    """The other process: prepare, then a call for every byte read; never returns."""
    try:
        sys.path[:0] = folders
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([inherited] if inherited else [])])
        call = prepare()
        os.write(answers, READY)
        while os.read(asks, 1):
            start = cpu_clock()
            call()
            os.write(answers, READY + TIME.pack(cpu_clock() - start))
    except BaseException:
        os.write(answers, FAILED + traceback.format_exc()[-3000:].encode())
    finally:
        os._exit(0)


class PairedClock:
    """A timer in multiples of the base's call: what passed between two readings, over the mean of the calls at both."""

    def __init__(self, companion: Callable[[], float]) -> None:
        self._companion = companion
        self._total = 0.0
        self._since: float | None = None
        self._yardstick = companion()

    def __call__(self) -> float:
        """Multiples since the first reading."""
        now = cpu_clock()
        yardstick = self._companion()
        if self._since is not None:
            self._total += (now - self._since) / ((self._yardstick + yardstick) / 2)
        self._yardstick = yardstick
        self._since = cpu_clock()
        return self._total
