"""gemline launch: torchrun on this host, with its own restarts, and an exit code that says what happened.

torchrun always exits with 1 when a process failed. This calls the same program as a library and returns the code of the
process that failed first: 4 where restarts got nowhere, 5 where a process stood still, 1 and 3 as in `gemline train`,
128 plus the number of the signal that killed it. After code 4 torchrun's remaining restarts end by themselves, each
within the time that Python takes to start.
"""

from __future__ import annotations

from collections.abc import Sequence

from gem_pipelines.cli.parser import Parser
from gem_pipelines.errors import ConfigError
from gem_pipelines.restarts import EXIT_LOOP


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
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    line = ["--standalone", "--nnodes", "1", "--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    try:
        run(parse_args([*line, "-m", "gem_pipelines", "train", "--auto-resume", *arguments]))
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        first = error.get_first_failure()[1].exitcode
        return exit_code(first, codes)
    return 0


def exit_code(first: int, codes: Sequence[int]) -> int:
    """A negative code is a signal. What any process says of the whole job, a restart loop or a hang, comes first."""
    for known in (EXIT_LOOP, 5):
        if known in codes:
            return known
    return 128 - first if first < 0 else first
