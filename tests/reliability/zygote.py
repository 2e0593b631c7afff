"""Starts training processes without the seconds that imports take: forks of one process that has imported everything.

A line of JSON in, one out:
    {"start": [arguments of gemline], "environment": {...}, "output": file, "fault": {...} | null}  -> {"pid": n}
    {"worker": file, ...}: the same, with main(*arguments) of that file in the place of gemline; it is found beside
    its modules, as a program is, and an exception is a traceback and code 1
    {"wait": pid, "seconds": s}  -> {"code": exit code, negative for a signal, or null while it runs}

Faults, in the process that is started: {"name": ..., "step": n, ...}, see `FAULTS`. They are of the test, not of the
program: the zygote patches the trainer of its child.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def hold_gil(step: int) -> None:
    """Compute in C without giving the interpreter free: 2 ** 60 ways to fail to match."""
    re.match("(a|a)*b", "a" * 60)


def sleep(step: int) -> None:
    """Stand still in Python."""
    while True:
        time.sleep(1)


def skip_collective(step: int) -> None:
    """Make a collective that no other rank makes."""
    import torch.distributed as dist

    dist.barrier()


def stop(step: int) -> None:
    """Stop this process, as SIGSTOP from outside does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def die(step: int) -> None:
    """Die without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave(step: int) -> None:
    """End as if all were well."""
    os._exit(0)


def fail(step: int) -> None:
    """What no code of ours raises."""
    raise RuntimeError("a fault of the program")


FAULTS = {f.__name__: f for f in (hold_gil, sleep, skip_collective, stop, die, leave, fail)}


def install(fault: dict[str, Any]) -> None:
    """Arrange for `fault` in this process."""
    from gem_pipelines import failpoints
    from gem_pipelines.trainer import Trainer

    if fault["name"] == "failpoint":
        left = [fault["hit"]]

        def hook(name: str) -> None:
            left[0] -= name == fault["place"]
            if name == fault["place"] and left[0] == 0:
                if fault.get("error"):
                    raise OSError(5, "Input/output error")
                os.kill(os.getpid(), signal.SIGKILL)

        failpoints.install(hook)
        return
    if fault["name"] == "recapture":
        recapture(Path(fault["into"]))
        return
    if fault["name"] in ("reader_is_gone", "read_forever"):
        break_reader(fault["step"], globals()[fault["name"]])
        return
    if fault["name"] == "finally":
        break_ending()
        return
    if fault["name"] == "timed":
        time_checks(Path(fault["into"]))
        return
    inner = Trainer.step

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.position.step + 1 == fault["step"]:
            FAULTS[fault["name"]](fault["step"])
        return inner(self, *arguments, **options)

    Trainer.step = step  # type: ignore[method-assign]


def recapture(into: Path) -> None:
    """Write what was just restored into a checkpoint of its own."""
    from gem_pipelines import checkpoint

    inner = checkpoint.restore

    def restore(directory: Path, trainer: Any, loader: Any) -> list[str]:
        differences = inner(directory, trainer, loader)
        checkpoint.save(into, trainer, loader, keep=99)
        return differences

    checkpoint.restore = restore


def break_reader(step: int, how: Callable[[], None]) -> None:
    """What the loader of training does instead of giving the batch of `step`, in the thread that reads ahead."""
    from gem_data import loader as module

    inner = module._read

    def read(loader: Any, cursor: Any) -> Any:
        for batch, after in inner(loader, cursor):
            if batch.step + 1 == step and loader.split == "train":
                how()
            yield batch, after

    module._read = read  # type: ignore[assignment]


def reader_is_gone() -> None:
    """Die of what no code of ours raises."""
    raise MemoryError("the reader is gone")


def read_forever() -> None:
    """Loop without an end."""
    while True:
        sum(range(1000))


def break_ending() -> None:
    """What is closed at the end of a run raises."""
    from gem_pipelines.checkpoint_saver import Saver

    def close(self: Any) -> None:
        raise RuntimeError("a fault while closing")

    Saver.close = close  # type: ignore[method-assign]


def time_checks(into: Path) -> None:
    """Write the seconds that the checks of every step took: one list a check, of steps in their order."""
    from gem_pipelines import agreement, trainer

    spent: dict[str, list[float]] = {"check_batch": [], "largest_magnitude": []}

    def timed(module: Any, name: str) -> None:
        inner = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*arguments, **options)
            spent[name].append(time.perf_counter() - begin)
            if len(spent[name]) % 50 == 0:
                into.write_text(json.dumps(spent))
            return result

        setattr(module, name, call)

    timed(agreement, "check_batch")
    timed(trainer, "largest_magnitude")


def run(command: dict[str, Any]) -> int:
    """In the fork: become a training process."""
    descriptor = os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(command["environment"])
    if command.get("fault"):
        install(command["fault"])
    if command.get("worker"):
        return work(Path(command["worker"]), command["start"])
    from gem_pipelines.cli import main

    return main(command["start"])


def work(worker: Path, arguments: list[str]) -> int:
    """Run a test's own program for one rank."""
    sys.path.insert(0, str(worker.parent))
    try:
        importlib.import_module(worker.stem).main(*arguments)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def wait(pid: int, seconds: float) -> int | None:
    """Exit code of a child, or None where it still runs after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)


def main() -> None:
    """Import, say so, and obey until the input ends."""
    import gem_attention.eager
    import gem_embeddings.torchrec_tables
    import gem_pipelines.cli.outcome_table
    import gem_pipelines.cli.train
    import gem_pipelines.job
    import torchrec.distributed.model_parallel
    import torchrec.distributed.planner
    from gem_pipelines.config_overrides import apply_overrides
    from gem_pipelines.recipes import find_recipe

    assert None not in (gem_pipelines, gem_embeddings, gem_attention, torchrec)  # for the forks, not used here
    # What reading a command line learns of the config is kept, and half of what a start costs.
    apply_overrides(find_recipe("debug"), ["--train.steps", "1"])
    gc.collect()
    gc.freeze()
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    answer.write(json.dumps({"threads": threads}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            answer.write(json.dumps({"code": wait(command["wait"], command["seconds"])}) + "\n")
            continue
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = run(command)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        answer.write(json.dumps({"pid": pid}) + "\n")


if __name__ == "__main__":
    main()
