"""Meshes and collectives over gloo, two and four processes (four as two hosts of two)."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("gloo_worker.py")


def run_world(world_size: int, *checks: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(world_size), str(port), *checks],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world_size, "\n".join(errors)


ALL = ("meshes", "conformance", "hosts", "expert_parallel", "observed", "fsdp", "coded_fsdp", "probe", "traces")


@pytest.mark.distributed
def test_two_ranks():
    run_world(2, *ALL, "wrong_world")


@pytest.mark.distributed
def test_four_ranks_on_two_hosts():
    run_world(4, *ALL)


@pytest.mark.distributed
def test_a_limit_of_an_axis_ends_what_waits():
    run_world(4, "limits")
