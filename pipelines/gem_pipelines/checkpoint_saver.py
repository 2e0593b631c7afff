"""Saving while training goes on: a snapshot first, then a thread writes it; one write at a time.

    step k ends -> snapshot (collective; rank 0 copies to host memory) -> step k+1 ...
                             \\-> thread on rank 0: write, fsync, publish, read back, remove old ones

The snapshot is complete before `save` returns, so the file holds step k whatever step k+1 does. A save that comes
before the last one is written waits for it (back-pressure): memory holds one snapshot at most, and the wait is in the
record as waited_seconds. A write that fails is known at the next step, where all ranks stop together, or is counted and
told (`on_error="continue"`). `finish` ends a run: it raises on every rank unless the checkpoint of the last step is
durable, so that exit code 0 means so.

The run lock is checked before a write begins and before it is published.

Cost: one more copy of the training state in rank 0's host memory while a write runs. stall_seconds of a record is how
long training stood still, waiting included.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from gem_data.interface import Loader

from gem_pipelines import checkpoint_incremental, failpoints
from gem_pipelines.checkpoint import capture, expected_tensors
from gem_pipelines.checkpoint_format import Checkpoint, WriteStats, check_space, step_directory
from gem_pipelines.checkpoint_keep import Keeper, set_aside_damaged
from gem_pipelines.errors import CheckpointError, RunError
from gem_pipelines.runlock import RunLock
from gem_pipelines.runtime import Runtime
from gem_pipelines.trainer import Trainer

OnError = Literal["stop", "continue"]


@dataclass(kw_only=True)
class _Write:
    """One write, running or done. stats is filled by the thread."""

    step: int
    stall_seconds: float = 0.0
    waited_seconds: float = 0.0
    stats: WriteStats | None = None
    incremental: bool = False
    error: Exception | None = None
    thread: threading.Thread | None = None


@dataclass(kw_only=True)
class _Told:
    """What the main thread has yet to hear, and has heard."""

    done: list[_Write] = field(default_factory=list)
    failed: int = 0
    last: _Write | None = None


class Saver:
    """Saves the checkpoints of one run. Every rank has one and calls it at the same steps.

    keep            sound checkpoints that are kept
    asynchronous    write beside training; False: no rank goes on before it is durable
    full_every      every so many checkpoints a full one, incremental ones between (1: all full)
    on_error        what a failed write does before the last step; the last one must succeed in any case
    lock            the run's lock; None where nothing else can write (tests)
    """

    def __init__(
        self,
        checkpoints: Path,
        *,
        runtime: Runtime,
        keep: int,
        asynchronous: bool = False,
        full_every: int = 1,
        on_error: OnError = "stop",
        lock: RunLock | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.checkpoints, self.runtime = checkpoints, runtime
        self.asynchronous, self.on_error = asynchronous, on_error
        self._lock, self._say = lock, say
        self._keeper = Keeper(checkpoints, keep=keep)
        self._chain = checkpoint_incremental.Chain(full_every=full_every)
        self._running: _Write | None = None
        self._told = _Told()
        self._durable = -1

    def check_room(self, trainer: Trainer) -> None:
        """Raise CheckpointError on every rank where not even one checkpoint fits. A collective, before step 1."""
        needed = expected_bytes(trainer)
        self.runtime.on_main(lambda: check_space(self.checkpoints, needed))

    def resumed_from(self, step: int) -> None:
        """The run goes on from the sound checkpoint of `step`."""
        self._durable = step

    def save(self, trainer: Trainer, loader: Loader) -> None:
        """Save the state of now. A collective. With asynchronous writing it returns when the snapshot is taken."""
        begin = time.perf_counter()
        self._join()
        waited = time.perf_counter() - begin
        failpoints.reach("before_snapshot")
        checkpoint = snapshot(capture(trainer, loader), keep=self.runtime.is_main)
        failpoints.reach("after_snapshot")
        write = _Write(step=trainer.position.step, waited_seconds=waited)
        if self.asynchronous:
            if self.runtime.is_main:
                self._running = write
                write.thread = threading.Thread(target=self._write, args=(write, checkpoint), name="checkpoint-writer")
                write.thread.start()
        else:
            self._write_together(write, checkpoint)
        write.stall_seconds = time.perf_counter() - begin
        failpoints.reach("after_save")

    def failure(self) -> CheckpointError | None:
        """On rank 0, between steps: the error of a write that failed, where that must stop the run."""
        if self._running is not None and self._running.thread is not None and not self._running.thread.is_alive():
            self._join()
        last = self._told.last
        return CheckpointError(str(last.error)) if last is not None and last.error and self.on_error == "stop" else None

    def records(self) -> list[dict[str, Any]]:
        """The "checkpoint" records of writes that ended since this was last asked; tells of failures."""
        done, self._told.done = self._told.done, []
        for write in done:
            if write.error is not None:
                self._say(f"CHECKPOINT NOT WRITTEN ({self._told.failed} so far): {write.error}")
        return [_record(write, asynchronous=self.asynchronous) for write in done]

    def finish(self, step: int) -> None:
        """Wait for the last write; raise on every rank unless the checkpoint of `step` is durable. A collective."""
        self._join()

        def check() -> None:
            last = self._told.last
            if last is not None and last.error is not None and last.step == step:
                raise CheckpointError(str(last.error))
            if self._durable != step:
                raise CheckpointError(
                    f"the checkpoint of step {step} is not durable: the newest that this job has written is of step "
                    f"{self._durable}"
                )

        self.runtime.on_main(check)

    def close(self) -> None:
        """Let a running write end; its outcome no longer stops anything."""
        self._join()

    def _join(self) -> None:
        """Wait for the running write, and take note of how it ended."""
        if self._running is None:
            return
        assert self._running.thread is not None
        self._running.thread.join()
        write, self._running = self._running, None
        self._note(write)

    def _note(self, write: _Write) -> None:
        self._told.done.append(write)
        self._told.last = write
        if write.error is None:
            self._durable = write.step
        else:
            self._told.failed += 1

    def _write_together(self, write: _Write, checkpoint: Checkpoint) -> None:
        def action() -> None:
            self._write(write, checkpoint)
            self._note(write)
            if write.error is not None:
                raise CheckpointError(str(write.error))

        try:
            self.runtime.on_main(action)
        except (CheckpointError, RunError):
            if self.on_error == "stop":
                raise

    def _write(self, write: _Write, checkpoint: Checkpoint) -> None:
        """Write, publish, read back, remove old ones; never raises."""
        directory = step_directory(self.checkpoints, write.step)
        try:
            if self._lock is not None:
                self._lock.check_held()
            set_aside_damaged(directory)
            write.stats, write.incremental = self._chain.write(directory, checkpoint)
        except Exception as error:
            write.error = CheckpointError(f"the checkpoint {directory} was not written: {error}")
            return
        try:
            self._keeper.sweep()
        except Exception as error:
            write.error = CheckpointError(f"after the checkpoint {directory} was written: {error}")


def snapshot(checkpoint: Checkpoint, *, keep: bool) -> Checkpoint:
    """A copy in host memory that later steps do not touch; without tensors where this rank does not write.

    Tables come as copies already (`Tables.table_state`).
    """
    if not keep:
        return replace(checkpoint, tensors={})
    tensors = {
        key: tensor if key.startswith("tables.") else tensor.detach().to("cpu", copy=True)
        for key, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors, state=copy.deepcopy(checkpoint.state))


def expected_bytes(trainer: Trainer) -> int:
    """Bytes of a full checkpoint of this run: parameters, two moments each, tables and their moments, maps of managed
    ids (without those that a round has seen so far, of any number).
    """
    expected = expected_tensors(trainer).values()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in expected if -1 not in shape)


def _record(write: _Write, *, asynchronous: bool) -> dict[str, Any]:
    stats = write.stats or WriteStats()
    return {
        "kind": "checkpoint",
        "step": write.step,
        "bytes": stats.bytes,
        "seconds": stats.seconds,
        "hash_seconds": stats.hash_seconds,
        "sync_seconds": stats.sync_seconds,
        "stall_seconds": write.stall_seconds,
        "waited_seconds": write.waited_seconds,
        "asynchronous": asynchronous,
        "incremental": write.incremental,
        "error": None if write.error is None else str(write.error),
    }
