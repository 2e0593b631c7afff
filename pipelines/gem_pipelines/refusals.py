"""What `gemline launch` need not try again: a mistake that is found before the first step is there at every start.

torchrun starts a failed job again without asking why. A process that is refused during its set-up (config, mesh, data,
checkpoint) notes its message and exit code in the file that launch named, and launch then ends the job. What another
start may not meet (a store that does not answer, another job's lock, a rank that is gone) is not noted.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from gem_pipelines.errors import RemoteError

VARIABLE = "GEMLINE_REFUSAL"
"""Names the file, in the environment of the processes that launch starts."""


@contextlib.contextmanager
def refusals_noted() -> Iterator[None]:
    """Note a user's mistake (a ValueError) that ends the block. Nothing is noted where launch did not start this."""
    try:
        yield
    except ValueError as error:
        path = os.environ.get(VARIABLE)
        if path and not isinstance(error, RemoteError):  # the rank that it repeats notes its own
            # Ranks write the same file, so each its own first: what is there is always whole.
            mine = Path(f"{path}.{os.getpid()}")
            mine.write_text(json.dumps({"message": str(error), "exit_code": getattr(error, "exit_code", 1)}))
            mine.replace(path)
        raise


def refusal(path: Path) -> tuple[str, int] | None:
    """(message, exit code) of a process that was refused; None where none was."""
    if not path.is_file():
        return None
    noted = json.loads(path.read_text())
    return str(noted["message"]), int(noted["exit_code"])
