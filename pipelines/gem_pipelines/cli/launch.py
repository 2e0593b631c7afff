"""gemline launch: torchrun on this host, with its own restarts, and an exit code that says what happened.

torchrun always exits with 1 when a process failed. This calls the same program as a library and returns the code of the
process that failed first: 4 where restarts got nowhere, 5 where a process stood still, 1 and 3 as in `gemline train`,
128 plus the number of the signal that killed it, or that ended launch itself. A mistake that is found before the first
step ends the job without another start (see refusals.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from gem_pipelines.cli.parser import Parser
from gem_pipelines.errors import ConfigError
from gem_pipelines.refusals import VARIABLE, refusal
from gem_pipelines.restarts import EXIT_LOOP

_GRACE_S = 3.0  # for what the refused processes say


def main(arguments: Sequence[str]) -> int:
    """Train under torchrun; returns 0 only where every process did."""
    parser = Parser(
        prog="gemline launch",
        description="Train with several processes of this host, restarted when one dies. All other arguments are those "
        "of 'gemline train', with --run-dir.",
    )
    parser.add_argument("--processes", type=int, default=1, help="how many (default 1)")
    parser.add_argument("--restarts", type=int, default=100, help="how often torchrun starts again (default 100)")
    known, rest = parser.parse_known_args(arguments)
    if known.processes < 1 or known.restarts < 0:
        raise ConfigError(
            f"--processes is {known.processes} and --restarts {known.restarts}; expected at least 1 and 0"
        )
    if not any(argument == "--run-dir" or argument.startswith("--run-dir=") for argument in rest):
        raise ConfigError("gemline launch needs --run-dir: a run that is restarted by itself must know where it is")
    if "--resume" in rest:
        raise ConfigError("gemline launch resumes by itself where --run-dir holds a run; leave out --resume")
    return launch(rest, processes=known.processes, restarts=known.restarts)


def launch(arguments: Sequence[str], *, processes: int, restarts: int) -> int:
    """torchrun of `gemline train --auto-resume`; the exit code of what failed first."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    line = ["--standalone", "--nnodes", "1", "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    with tempfile.TemporaryDirectory(prefix="gemline-launch-") as folder:
        note = Path(folder) / "refusal.json"
        try:
            with _ended_by(note):
                run(parse_args([*line, "-m", "gem_pipelines", "train", "--auto-resume", *arguments]))
        except ChildFailedError as error:
            codes = [failure.exitcode for failure in error.failures.values()]
            first = error.get_first_failure()[1].exitcode
            return exit_code(first, codes)
        except SignalException as error:
            refused = refusal(note)
            return 128 + int(error.sigval) if refused is None else refused[1]
    return 0


@contextlib.contextmanager
def _ended_by(note: Path) -> Iterator[None]:
    """Name `note` to the processes started meanwhile; once it is there, torchrun is ended as by SIGTERM."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            if note.is_file():
                if not done.wait(_GRACE_S):
                    os.kill(os.getpid(), signal.SIGTERM)
                return

    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(note)
    watcher = threading.Thread(target=watch, name="refusals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def exit_code(first: int, codes: Sequence[int]) -> int:
    """A negative code is a signal. What any process says of the whole job, a restart loop or a hang, comes first."""
    for known in (EXIT_LOOP, 5):
        if known in codes:
            return known
    return 128 - first if first < 0 else first
