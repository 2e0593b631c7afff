"""The command line. Exit codes: 0 done; 1 a mistake in command, config, data or checkpoint (one message on standard
error, no traceback unless --traceback is given); 3 a fault of the program itself (with traceback); 4 automatic restarts
got nowhere; 5 a rank stood still; 130 interrupted.

Commands are imported when they are called, so that `gemline config show` does not wait for torch. Before, the packages'
interface versions are held against what this pipeline needs; `gemline doctor` says them where they do not fit.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from gem_pipelines.contract import check_versions, installed_versions
from gem_pipelines.errors import ConfigError, did_you_mean
from gem_pipelines.launcher_watch import launcher_process
from gem_pipelines.leaving import leave

COMMANDS = {
    "train": "train a model, or go on with a run (--resume)",
    "launch": "train with several processes of this host under torchrun, restarted when one dies",
    "data": "prepare, inspect or verify a data set; its requests, impressions and ledger",
    "config": "show the config of a recipe or of a run",
    "profile": "fit what a row costs to measured steps",
    "plan": "choose and explain a mesh for a cluster",
    "ckpt": "inspect, verify or export a checkpoint",
    "report": "write the report of a run",
    "doctor": "say what this machine can run, and why not the rest",
}

_HELP = """'gemline COMMAND --help' says more; --traceback shows where a mistake was found.
exit codes: 0 done, 1 a mistake in command, config, data or checkpoint, 3 a fault of the program,
  4 automatic restarts got nowhere, 5 a process stood still, 130 interrupted"""

EXIT_OK, EXIT_MISTAKE, EXIT_FAULT, EXIT_INTERRUPTED = 0, 1, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    launcher = launcher_process()
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        return _dispatch(arguments, launcher)
    except BrokenPipeError:  # the reader of our output (head, less) has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_MISTAKE
    except (ValueError, OSError) as error:
        if show_traceback:
            traceback.print_exc()
        # One write with its line end: the messages of several ranks do not run into each other.
        sys.stderr.write(f"gemline{_rank()}: error: {_message(error)}\n")
        return int(getattr(error, "exit_code", EXIT_MISTAKE))
    except KeyboardInterrupt:
        print("gemline: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception:
        traceback.print_exc()
        print("gemline: this is a fault of the program, please report it with the lines above", file=sys.stderr)
        return EXIT_FAULT


def program() -> NoReturn:
    """The command `gemline`: main(), and the end of the process."""
    leave(main())


def _dispatch(arguments: list[str], launcher: int | None) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return EXIT_OK if arguments else EXIT_MISTAKE
    command = arguments[0]
    if command not in COMMANDS:
        raise ConfigError(f"unknown command {command!r}; {did_you_mean(command, COMMANDS)}")
    if command != "doctor":  # which has to speak where the packages do not fit
        check_versions(installed_versions())
    module = importlib.import_module(f"gem_pipelines.cli.{command}")
    if command == "train":
        return int(module.main(arguments[1:], launcher=launcher))
    return int(module.main(arguments[1:]))


def _usage() -> str:
    lines = [f"  {name:8} {text}" for name, text in COMMANDS.items()]
    return "usage: gemline COMMAND ...\n\n" + "\n".join(lines) + "\n\n" + _HELP


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _rank() -> str:
    return f" rank {os.environ['RANK']}" if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ else ""
