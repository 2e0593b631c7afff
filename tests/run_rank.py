"""One rank of a test of several processes: python run_rank.py WORKER RANK WORLD_SIZE STORE ARGUMENT...

Calls main(rank, world_size, init_method, *arguments) of the file WORKER; an exception is a traceback and exit code 1.
Started by the fixture `run_ranks` of conftest.py. It ends without taking the interpreter down: a thread of gloo that
lets go of its last tensors then would end it with SIGABRT (gem_pipelines.leaving says more; not used here, where the
packages' tests run without the pipeline).
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main(worker: str, rank: str, world_size: str, store: str, *arguments: str) -> None:
    sys.path[0] = str(Path(worker).parent)  # as if WORKER had been started itself
    runpy.run_path(worker)["main"](int(rank), int(world_size), f"file://{store}", *arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
