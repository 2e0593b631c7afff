"""What the ranks of tests of several processes are forked from: it imports what they need once. See `run_ranks`.

A line of JSON in, one out:
    {"load": worker}                                                     -> {"threads": names of threads but the first}
    {"start": worker, "arguments": [...], "said": file}                  -> {"pid": n}
    {"ended": [pid, ...]}                                                -> {"codes": exit codes, null while it runs}

A rank calls main(*arguments) of the file `worker`; an exception is a traceback and exit code 1. It ends without taking
the interpreter down: a thread of gloo that lets go of its last tensors then would end it with SIGABRT
(gem_pipelines.leaving says more; not used here, where the packages' tests run without the pipeline).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn


def load(worker: str) -> list[str]:
    """Import what the worker imports; an error in it is its ranks'. Returns the threads that forks would be without."""
    sys.path[0] = str(Path(worker).parent)  # as if WORKER had been started itself
    with contextlib.suppress(Exception):
        runpy.run_path(worker)
    gc.collect()
    gc.freeze()
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    return [name for name in names if name != "jemalloc_bg_thd"][1:]  # pyarrow's allocator is made for forks


def become_rank(worker: str, arguments: list[Any], said: str) -> NoReturn:
    """In the fork: the worker's own program, to its end."""
    code = 1
    try:
        written = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(written, 1)
        os.dup2(written, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        runpy.run_path(worker)["main"](*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Obey until the input ends; what still runs is killed then."""
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    codes: dict[int, int | None] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if "load" in command:
            told: dict[str, Any] = {"threads": load(command["load"])}
        elif "start" in command:
            pid = os.fork()
            if pid == 0:
                become_rank(command["start"], command["arguments"], command["said"])
            codes[pid] = None
            told = {"pid": pid}
        else:
            for pid in command["ended"]:
                done, status = os.waitpid(pid, os.WNOHANG) if codes[pid] is None else (0, 0)
                codes[pid] = os.waitstatus_to_exitcode(status) if done else codes[pid]
            told = {"codes": [codes[pid] for pid in command["ended"]]}
        answer.write(json.dumps(told) + "\n")
    for pid, code in codes.items():
        if code is None:
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
