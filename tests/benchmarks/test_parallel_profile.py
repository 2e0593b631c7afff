"""What benchmarks/gpu/parallel_profile.py reads out of a trace, by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "gpu" / "parallel_profile.py"
SPEC = importlib.util.spec_from_file_location("parallel_profile", FILE)
assert SPEC is not None
assert SPEC.loader is not None
module = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(module)


def kernel(name: str, start: float, stop: float) -> dict[str, object]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": stop - start}


def test_figures_of_a_trace_of_one_step():
    """Work 0-10, 30-40 and 35-50, a collective 8-20 and 45-60; microseconds."""
    events = [
        kernel("mm", 0, 10),
        kernel("ncclDevKernel_AllReduce", 8, 20),
        kernel("mm", 30, 40),
        kernel("norm", 35, 50),
        kernel("ncclDevKernel_AllReduce", 45, 60),
        *({"cat": "cuda_runtime", "name": name, "ts": 0, "dur": 1} for name in ("cudaLaunchKernel", "cudaMemcpyAsync")),
        *({"cat": "cuda_driver", "name": name, "ts": 0, "dur": 1} for name in ("cuLaunchKernelEx",)),
        *({"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 0, "dur": 1} for _ in range(3)),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5},
    ]
    found = module.figures(events, steps=1)
    assert found["communication_s"] == pytest.approx(27e-6)
    assert found["exposed_communication_s"] == pytest.approx(20e-6)
    assert found["computing_s"] == pytest.approx(30e-6)
    assert found["busy_s"] == pytest.approx(50e-6)
    assert (found["launches"], found["waits"], found["kernels"]) == (3, 2, 5)
    assert found["gaps"] == [(pytest.approx(0.01), "ncclDevKernel_AllReduce", "mm")]
    assert found["kernels_ms"][0] == (pytest.approx(0.027), pytest.approx(2), "ncclDevKernel_AllReduce")


def test_watching_a_step_leaves_the_trainer_as_it_was(make_job_like):
    trainer, calls = make_job_like
    before = trainer._forward
    with module.watched(trainer) as spent:
        trainer._forward()
        trainer._forward()
    assert calls == ["forward", "forward"]
    assert spent["forward"] > 0
    assert trainer._forward == before


@pytest.fixture
def make_job_like():
    calls: list[str] = []

    class Trainer:
        optimizer = type("Optimizer", (), {"clip": lambda self: None})()

        def _forward(self):
            calls.append("forward")

        _begin = _backward = _add_up = _update = _account = _forward

    return Trainer(), calls
