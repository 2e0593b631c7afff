"""What the ranks of tests of several processes are forked from: it imports what they need once. See `run_ranks`.

A line of JSON in, one out:
    {"load": worker}                                  -> {"threads": names of threads but the first}
    {"start": worker, "arguments": [...], "said": file, "environment": {...}, "folder": directory}  -> {"pid": n}
    {"ended": [pid, ...]}                             -> {"codes": exit codes, null while it runs}
    {"stop": [pid, ...]}                              -> {"codes": the same, after those that run were killed}

A rank calls main(*arguments) of the file `worker`; an exception is a traceback and exit code 1. It ends without taking
the interpreter down: a thread of gloo that lets go of its last tensors then would end it with SIGABRT
(gem_pipelines.leaving says more; not used here, where the packages' tests run without the pipeline). A rank is the
first of a process group, and what it started ends with it.

Nothing of a worker is executed here, only what it imports from elsewhere, and only down to its first statement that is
no import: what it patches, sets or adds to sys.path would be in the ranks of the next worker, too.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

OF_THE_SESSION = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # of linux/prctl.h: the signal that a process gets when what it was forked from ends


def load(worker: str) -> list[str]:
    """Import what the worker imports; an error in it is its ranks'. Returns the threads that forks would be without."""
    with contextlib.suppress(BaseException):
        for name, names in imports_of(Path(worker), {Path(worker)}):
            with contextlib.suppress(BaseException):
                module = importlib.import_module(name)
                for submodule in names:
                    if not hasattr(module, submodule):
                        importlib.import_module(f"{name}.{submodule}")
    gc.collect()
    gc.freeze()
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    return [name for name in names if name != "jemalloc_bg_thd"][1:]  # pyarrow's allocator is made for forks


def imports_of(file: Path, seen: set[Path]) -> list[tuple[str, list[str]]]:
    """(module, names from it) that a file imports before all else; for modules beside it, what those import."""
    found = []
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.module, [alias.name for alias in node.names if alias.name != "*"]))
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):  # no docstring, either
            break
    deep: list[tuple[str, list[str]]] = []
    for name, names in found:
        first = name.partition(".")[0]
        beside = file.with_name(f"{first}.py")
        if beside.exists() and beside not in seen:
            seen.add(beside)
            deep += imports_of(beside, seen)
        elif not beside.exists() and not file.with_name(first).is_dir():
            deep.append((name, names))
    return deep


def become_rank(command: dict[str, Any]) -> NoReturn:
    """In the fork: the worker's own program, to its end."""
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        written = os.open(command["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(written, 1)
        os.dup2(written, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(command["environment"])
        os.chdir(command["folder"])
        sys.path.insert(0, str(Path(command["start"]).parent))  # as if the worker had been started itself
        runpy.run_path(command["start"])["main"](*command["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(command: dict[str, Any]) -> int:
    """Fork a rank."""
    pid = os.fork()
    if pid == 0:
        become_rank(command)
    os.setpgid(pid, pid)  # here and there: whichever comes first, it is so before the rank starts or is stopped
    return pid


def end_of(pid: int, *, stop: bool) -> int | None:
    """Exit code of a rank, None where it runs and may; what it started and left is killed before its number is free."""
    if not stop and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return None
    os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """Obey until the input ends; what still runs is killed then."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    for number in OF_THE_SESSION:  # whoever sends one to the whole session ends the tests, and so this input
        signal.signal(number, signal.SIG_IGN)
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    codes: dict[int, int | None] = {}
    for line in sys.stdin:
        command = json.loads(line)
        if "load" in command:
            told: dict[str, Any] = {"threads": load(command["load"])}
        elif "start" in command:
            pid = start(command)
            codes[pid] = None
            told = {"pid": pid}
        else:
            pids = command.get("stop") or command["ended"]
            for pid in pids:
                if codes[pid] is None:
                    codes[pid] = end_of(pid, stop="stop" in command)
            told = {"codes": [codes[pid] for pid in pids]}
        answer.write(json.dumps(told) + "\n")
    for pid, code in codes.items():
        if code is None:
            end_of(pid, stop=True)
    os._exit(0)


if __name__ == "__main__":
    main()
