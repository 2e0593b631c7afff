"""The counters give the numbers that paper and pencil give, and the same ones twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases.counting import TensorCounter, count_tensors, python_calls


def test_operators_bytes_and_flops():
    x, w = torch.ones(10, 4), torch.ones(4, 3)
    counts = count_tensors(None, lambda _: (x @ w).t() + 1)
    # x @ w reads 40 + 12 and writes 30 floats, 10 * 4 * 3 multiply-adds; .t() is a view; + 1 reads 30 and writes 30
    assert counts["ops"] == 2
    assert counts["bytes_moved"] == 4 * (40 + 12 + 30 + 30 + 30)
    assert counts["matmul_flops"] == 2 * 10 * 4 * 3
    assert counts["peak_bytes"] == 4 * (30 + 30)


def test_peak_follows_the_death_of_tensors():
    def run(_):
        a = torch.zeros(1000)
        b = a + 1  # 8000 bytes alive
        del a
        c = b.view(10, 100) + 1  # 8000 again, not 12000
        del b
        return c

    assert count_tensors(None, run)["peak_bytes"] == 8000


def test_peak_does_not_count_what_was_given_nor_work_in_place():
    given = torch.zeros(1000)
    assert count_tensors(None, lambda _: given.add_(1).mul_(2))["peak_bytes"] == 0


def test_backward_is_counted():
    x = torch.ones(5, 4, requires_grad=True)
    w = torch.ones(4, 3, requires_grad=True)

    def run(_):
        return torch.autograd.grad((x @ w).sum(), (x, w))

    assert count_tensors(None, run)["matmul_flops"] == 3 * 2 * 5 * 4 * 3


def test_one_more_operation_is_seen():
    x = torch.ones(100)
    before, after = (count_tensors(None, run) for run in (lambda _: x * 2, lambda _: (x * 2).clone()))
    assert after["ops"] == before["ops"] + 1
    assert after["bytes_moved"] == before["bytes_moved"] + 800


def test_resized_storages_are_followed():
    def run(_):
        a = torch.zeros(10)
        a.resize_(1000)
        return a

    assert count_tensors(None, run)["peak_bytes"] == 4000


@pytest.mark.parametrize("calls", [0, 1, 7])
def test_python_calls(calls):
    def inner():
        pass

    def run():
        for _ in range(calls):
            inner()

    assert python_calls(run) == calls + 1


def test_nested_counters_are_independent():
    with TensorCounter() as outer, TensorCounter() as inner:
        torch.ones(3) + 1
    assert inner.totals()["ops"] == outer.totals()["ops"] == 2


COLLECTIVES = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from cases.counting import TensorCounter
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
x = torch.ones(16)
with TensorCounter() as counter:
    dist.all_reduce(x)
    dist.all_reduce(x, group=mesh["shard"].get_group())
    dist.all_gather([torch.empty(16) for _ in range(4)], x, group=mesh["shard"].get_group())
    dist.reduce_scatter_tensor(torch.empty(8), x, group=mesh["replicate"].get_group())
    if "functional" in sys.argv:
        import torch.distributed._functional_collectives as functional
        functional.wait_tensor(functional.all_reduce(x, "sum", (mesh, 0)))
    dist.barrier()
print(json.dumps(counter.totals()))
"""


@pytest.mark.parametrize("form", ["plain", pytest.param("functional", marks=pytest.mark.slow)])  # 10 s of imports
def test_collectives_by_mesh_axis(form):
    """Two mesh axes and the default group, in a process of its own: a default group cannot be shared with tests."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COLLECTIVES, form],
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "benchmarks")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {name: count for name, count in json.loads(done.stdout).items() if name.startswith("collective")}
    functional = form == "functional"
    assert found == {
        "collectives.world": 1,
        "collective_bytes.world": 64,
        "collectives.shard": 2,
        "collective_bytes.shard": 64 + (4 + 1) * 64,
        "collectives.replicate": 1 + functional,
        "collective_bytes.replicate": 32 + 64 + functional * (64 + 64),
    }
