"""What `gemline launch` need not try again: a mistake that is found before the first step is there at every start.

torchrun starts a failed job again without asking why. A process that is refused during its set-up (command, config,
mesh, data, checkpoint) notes its message and exit code in the file that launch named, and launch then ends the job.
What another start may not meet is not noted: a store or disk that does not answer, another job's lock, a rank that is
gone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from gem_pipelines.errors import MeetingError, RemoteError
from gem_pipelines.runlock import LockError

VARIABLE = "GEMLINE_REFUSAL"
"""Names the file, in the environment of the processes that launch starts."""

# What is wrong with a path stays wrong; other errors of the system (a network, a full disk) may pass.
_LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError, PermissionError)


@contextlib.contextmanager
def refusals_noted() -> Iterator[None]:
    """Note a user's mistake (a ValueError) that ends the block. Nothing is noted where launch did not start this."""
    try:
        yield
    except ValueError as error:
        path = os.environ.get(VARIABLE)
        if path and lasting(error):
            # Ranks write the same file, so each its own first: what is there is always whole.
            mine = Path(f"{path}.{os.getpid()}")
            mine.write_text(json.dumps({"message": str(error), "exit_code": getattr(error, "exit_code", 1)}))
            mine.replace(path)
        raise


def lasting(error: ValueError) -> bool:
    """Whether another start would meet it, too."""
    if isinstance(error, RemoteError | LockError | MeetingError):  # what a RemoteError repeats, another rank notes
        return False
    cause: BaseException | None = error
    while cause is not None:  # also what a message was made of with "from None"
        if isinstance(cause, OSError) and not isinstance(cause, _LASTING):
            return False
        cause = cause.__cause__ or cause.__context__
    return True


def refusal(path: Path) -> tuple[str, int] | None:
    """(message, exit code) of a process that was refused; None where none was."""
    if not path.is_file():
        return None
    noted = json.loads(path.read_text())
    return str(noted["message"]), int(noted["exit_code"])
