"""Jobs of several ranks for the procedures: started by the zygote, killed, waited for, compared."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gem_pipelines.checkpoint_format import list_steps, step_directory
from gem_pipelines.checkpoint_manifest import read_manifest, state_digest
from gem_pipelines.rundir import read_records

FIGURES = ("step", "epoch", "samples", "tokens", "loss", "loss_by_task", "window_ne", "lifetime_ne", "grad_norm")


class Zygote:
    """Forks training processes; `close` ends it and whatever it started."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self.running: set[int] = set()
        self.port = 0
        self._codes: dict[int, int] = {}
        # A fork of several threads would be a fork of half a program; pyarrow's allocator is made for it.
        threads = [name for name in self._answer()["threads"] if name != "jemalloc_bg_thd"]
        assert len(threads) == 1, threads

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the zygote ended"
        return dict(json.loads(line))

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def start(
        self,
        arguments: list[str],
        *,
        world: int,
        output: Path,
        faults: dict[int, dict[str, Any]] | None = None,
        environment: dict[str, str] | None = None,
    ) -> list[int]:
        """Processes of all ranks of one job, with more in their environment; they meet at `port`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        return [
            self.fork(
                arguments,
                rank=rank,
                world=world,
                port=self.port,
                output=output,
                fault=(faults or {}).get(rank),
                environment=environment,
            )
            for rank in range(world)
        ]

    def fork(
        self,
        arguments: list[str],
        *,
        rank: int,
        world: int,
        port: int,
        output: Path,
        fault: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        worker: Path | None = None,
    ) -> int:
        """One rank. worker: the file whose main(*arguments) it runs, in the place of gemline; gemline alone in its
        world is started without a rank, as a user starts it.
        """
        ranked = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        ranked |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = {"start": arguments, "environment": (ranked if world > 1 or worker else {}) | (environment or {})}
        command |= {"fault": fault, "output": str(output), "worker": str(worker) if worker else None}
        pid = int(self.ask(command)["pid"])
        self.running.add(pid)
        self._codes.pop(pid, None)  # the number may have been another process's
        return pid

    def wait(self, pids: list[int], *, seconds: float) -> list[int | None]:
        """Exit codes; None for a process that still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        codes = []
        for pid in pids:
            if pid not in self._codes:
                code = self.ask({"wait": pid, "seconds": max(0.0, deadline - time.monotonic())})["code"]
                if code is not None:
                    self._codes[pid] = code
                    self.running.discard(pid)
            codes.append(self._codes.get(pid))
        return codes

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            if pid in self.running:
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill(list(self.running))
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()


def losses(run: Path) -> dict[int, tuple[Any, ...]]:
    """Step -> what it computed, floats to the last bit; as far as the run has recorded."""
    path = run / "metrics.jsonl"
    records = read_records(path) if path.exists() else []
    return {r["step"]: tuple(str(r[name]) for name in FIGURES) for r in records if r["kind"] == "train"}


def digests(run: Path) -> dict[int, str]:
    """Step -> digest of the training state, of every published checkpoint."""
    parent = run / "checkpoints"
    return {step: state_digest(read_manifest(step_directory(parent, step))) for step in list_steps(parent)}
