"""A process whose launcher is gone ends: nobody would see how it ends, and the next start needs its lock.

From before the processes meet until the job's end, on a thread of its own: a peer that does not come is waited for
inside torch, for up to train.timeout_s. train.hang_limit_s 0, which turns the watchdog off, leaves this on.
"""

from __future__ import annotations

import os
import sys
import threading
from types import TracebackType

_EVERY_S = 0.25


def launcher_process() -> int | None:
    """Process number of the torchrun that started this process; None where nothing watches over it.

    To be asked when a process begins: the imports before a job take seconds, in which the launcher may die.
    """
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


class LauncherWatch:
    """launcher: what launcher_process() said when the process began."""

    def __init__(self, launcher: int | None) -> None:
        self._launcher = launcher
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="launcher-watch", daemon=True)

    def __enter__(self) -> LauncherWatch:
        if self._launcher is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._launcher is not None:
            self._thread.join()

    def check(self) -> None:
        """End the process now where the launcher is gone."""
        if self._launcher is not None and os.getppid() != self._launcher:
            rank = os.environ.get("RANK", "0")
            sys.stderr.write(f"rank {rank}: the launcher, process {self._launcher}, is gone; this process ends\n")
            sys.stderr.flush()
            os._exit(1)

    def _watch(self) -> None:
        self.check()
        while not self._stop.wait(_EVERY_S):
            self.check()
