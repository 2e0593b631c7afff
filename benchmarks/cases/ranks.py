"""Several gloo processes on this machine, each running a piece of code that prints one line of JSON at its end."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

# What a rank's code ends with. A thread of gloo may still let go of a tensor when the interpreter goes down, which ends
# the process with SIGABRT after all that was to be done was (pytorch issue 190489): so it does not go down, it leaves.
LEAVE = """
import os, sys
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


def run_ranks(code: str, world_size: int, *, timeout_s: float = 240) -> list[dict[str, Any]]:
    """Run `code`, and LEAVE, as every rank, with the environment of torchrun; what each printed last, in rank order.

    AssertionError with the end of the messages of a rank that failed; the others are stopped then.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start(code + LEAVE, rank, world_size, port) for rank in range(world_size)]
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, f"rank {rank}: {errors[-3000:]}"
    return [json.loads(printed.splitlines()[-1]) for printed, _ in outputs]


def start(code: str, rank: int, world_size: int, port: int) -> subprocess.Popen[str]:
    """One rank."""
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
