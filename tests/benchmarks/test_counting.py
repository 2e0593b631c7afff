"""The counters give the numbers that paper and pencil give, and the same ones twice."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
from pathlib import Path

import exact
import pytest
import torch
from cases.counting import TensorCounter, count_tensors, python_calls
from cases.ranks import LEAVE, run_ranks
from exact import varying


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


class Finalized:
    """Garbage that only the collector finds, with a finalizer in Python."""

    def __init__(self):
        self.own = self

    def __del__(self):
        str(0).strip().strip().strip()


def test_when_the_collector_would_run_does_not_matter():
    """Never, or every ten objects: neither the call's garbage nor older counts."""

    def run():
        for _ in range(100):
            Finalized()

    threshold, found = gc.get_threshold(), []
    try:
        for first in (0, 10):
            gc.set_threshold(first)
            older = [Finalized() for _ in range(50)]
            del older
            found.append(python_calls(run))
            assert gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
        gc.collect()
    assert found[0] == found[1], found


def test_the_collector_stays_off_where_it_was():
    gc.disable()
    try:
        python_calls(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_versions_cost_the_same_wherever_packages_lie(monkeypatch, tmp_path):
    """Every checkpoint asks for them: the folders of sys.path are looked through once a process."""
    from gem_pipelines.contract import REQUIRED
    from gem_pipelines.rundir import collect_versions

    for package in REQUIRED:  # as a job has them
        importlib.import_module(f"{package}.interface")
    collect_versions()
    before = python_calls(collect_versions)
    for number in range(3):
        monkeypatch.syspath_prepend(tmp_path / str(number))
    assert python_calls(collect_versions) == before


def test_what_varies_is_listed():
    same, other = {"a.b": {"ops": 1, "bytes_moved": 2}}, {"a.b": {"ops": 1, "bytes_moved": 3}, "a.c": {"ops": 1}}
    assert varying([same, same]) == {}
    assert varying([same, other]) == {"a.b/bytes_moved": [2, 3], "a.c/ops": [None, 1]}


@pytest.mark.slow
def test_paths_and_hashes_do_not_matter(capfd):
    """The cases that read most files: other folders, another sys.path, and strings that hash otherwise."""
    names = "^(data.epoch_shuffled_uniform|pipelines.(checkpoint_snapshot|checkpoint|ledger))$"
    assert exact.main(["--cases", names, "--runs", "3"]) == 0, capfd.readouterr().out


def test_nested_counters_are_independent():
    with TensorCounter() as outer, TensorCounter() as inner:
        torch.ones(3) + 1
    assert inner.totals()["ops"] == outer.totals()["ops"] == 2


def test_a_rank_leaves_before_the_interpreter_goes_down():
    """What aborts at the end (here on purpose) neither fails a rank nor takes what it printed; an error before does."""
    aborting = "import atexit, os\natexit.register(os.abort)\nprint('7')"
    assert run_ranks(aborting, 2) == [7, 7]
    with pytest.raises(AssertionError, match=r"rank 0: (.|\n)*ZeroDivisionError"):
        run_ranks("1 / 0", 1)


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
        [sys.executable, "-W", "ignore", "-c", COLLECTIVES + LEAVE, form],
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
