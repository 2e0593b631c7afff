"""Meshes and collectives over gloo, two and four processes (four as two hosts of two)."""

from __future__ import annotations

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("gloo_worker.py")


ALL = ("meshes", "conformance", "hosts", "expert_parallel", "observed", "fsdp", "coded_fsdp", "probe", "traces")


@pytest.mark.distributed
def test_two_ranks(run_ranks):
    run_ranks(WORKER, 2, *ALL, "wrong_world")


@pytest.mark.distributed
def test_four_ranks_on_two_hosts(run_ranks):
    run_ranks(WORKER, 4, *ALL)


@pytest.mark.distributed
def test_a_limit_of_an_axis_ends_what_waits(run_ranks):
    run_ranks(WORKER, 4, "limits")
