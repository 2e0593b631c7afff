"""The errors a user can cause. All are ValueErrors, so that one `except ValueError` at the top of the command line
turns them into one clear message and exit code 1; anything else is a fault of ours, or of the machines
(`ExchangeError`), and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_NAME = 200
"""Longer names are not compared with the valid ones, which takes time in proportion to both."""


class ConfigError(ValueError):
    """A wrong configuration: names the key, what was expected, what came and what to do."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: names the directory, the file and byte range or every mismatch."""


class RunError(ValueError):
    """A run directory or a launch that cannot be used."""


class RemoteError(RunError):
    """This rank stopped because another one reported an error; the message repeats it."""


class MeetingError(RunError):
    """A process of the job did not come; another start may find it there."""


class ExchangeError(RuntimeError):
    """A collective of the balancer failed: another rank is gone or too late. It cannot be told to the others, who may
    be gone, so nobody may enter another collective because of it.
    """


def told(error: BaseException) -> str:
    """What other ranks are told of an error; never empty."""
    return str(error) or type(error).__name__


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A sentence that proposes the nearest valid names, or lists them where none is near.

    >>> did_you_mean("optimizer.lrr", ["optimizer.lr", "train.steps"])
    "did you mean 'optimizer.lr'?"
    """
    names = sorted(valid)
    if len(name) > LONGEST_NAME:
        return f"it is longer than any name ({len(name)} characters)"
    last = name.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(name, names, n=2, cutoff=0.85)
    if not near:  # a key whose last part is right, given under the wrong section
        near = [candidate for candidate in names if candidate.lstrip("-").rsplit(".", 1)[-1] == last.lstrip("-")][:3]
    near = near or difflib.get_close_matches(name, names, n=2, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(repr(candidate) for candidate in near) + "?"
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"valid: {shown}"
