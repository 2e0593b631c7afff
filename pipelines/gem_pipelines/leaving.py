"""The end of a process that has trained.

A thread of gloo may still hold the last collective's tensors when the program is done, group destroyed or not. Where it
lets go of them while the interpreter is being taken down, it waits for a lock that is no longer given and ends the
process with SIGABRT: a job that is complete has failed, and its launcher starts it again. (Python before 3.14, torch up
to 2.13: github.com/pytorch/pytorch/issues/190489.) So a finished program leaves at once, with everything done that a
program does at its end but the taking down.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

EXIT_UNWRITTEN = 120  # Python's own, where what was printed cannot be written at the end


def leave(code: int) -> NoReturn:
    """End this process with `code`, after what atexit knows and with all output written.

    Threads are not waited for: the job ends its own before. Output that cannot be written is exit code 120.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # the reader is gone, the disk is full, the stream is closed
            code = EXIT_UNWRITTEN
    os._exit(code)
