"""Every kernel of the packages is compiled by a case, or named here with a reason; and the kernels' checks bite."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest
from cases import find, kernels

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks" / "results" / "counters.json").read_text())["cases"]
NOT_GATED: dict[str, str] = {}  # kernel -> why it cannot be compiled on a host without a GPU
JIT = ("triton.jit", "gluon.jit")


def kernels_of(source: str) -> set[str]:
    """Functions *_kernel under a jit decorator, with or without arguments."""
    found: set[str] = set()
    if "_kernel(" not in source:
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
            names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
            found |= {node.name} if any(name in JIT for name in names) else set()
    return found


def test_every_kernel_is_gated():
    sources = [path.read_text() for path in (*ROOT.glob("packages/*/gem_*/*.py"), *ROOT.glob("pipelines/*/*.py"))]
    exist = set().union(*map(kernels_of, sources))
    assert len(exist) >= 17
    gated = {f"{name}_kernel" for names in kernels.EXPECTED.values() for name in names}
    assert exist - gated == NOT_GATED.keys(), "name a member in cases/kernels.py that launches it"
    assert gated <= exist


@pytest.mark.parametrize("case", kernels.CASES, ids=lambda case: case.name)
def test_the_record_has_figures_of_every_kernel(case):
    names = kernels.EXPECTED[case.make().kind]
    for name in names:
        assert RECORD[case.name][f"{name}.registers"] > 0


def test_every_head_dim_that_has_tiles_of_its_own_is_gated():
    """Forward and both halves of backward, at each padded head dim."""
    from gem_attention.triton_config import _TILES

    gated = {case.make().dim for case in kernels.CASES if case.make().kind == "hstu"}
    assert gated == {dim for kernel, dim in _TILES if kernel == "forward"}
    assert gated == {case.make().dim for case in kernels.CASES if case.make().kind == "softmax"}


def test_a_kernel_is_found_under_either_decorator():
    source = "@triton.jit\ndef a_kernel(): ...\n@gluon.jit(x=[1])\ndef b_kernel(): ...\ndef set_kernel(): ...\n"
    assert kernels_of(source) == {"a_kernel", "b_kernel"}


def report(name, capability, **facts):
    from gem_attention.triton_crosscompile import Report

    zeros = dict.fromkeys(("warps", "shared_bytes", "registers", "spill_instructions", "hot_spills", "instructions"), 0)
    return Report(name=name, capability=capability, **{**zeros, "wgmma": 1, "mma": 0, "tma": 0, **facts})


@pytest.mark.parametrize("name", [case.name for case in kernels.CASES])
def test_checks_of_what_was_compiled_bite(name, monkeypatch):
    """A kernel missing, one of another target, and for Gluon one on older matrix instructions."""
    monkeypatch.setattr(kernels, "check_in_interpreter", lambda: None)
    case = find(name)
    inputs = case.make()
    good = [report(f"{kernel}_kernel", inputs.capability) for kernel in kernels.EXPECTED[inputs.kind]]
    case.check(inputs, good)
    with pytest.raises(AssertionError):
        case.check(inputs, good[:-1])
    with pytest.raises(AssertionError):
        case.check(inputs, [*good, report(good[0].name, 80)])
    if inputs.kind == "gluon":
        with pytest.raises(AssertionError):
            case.check(inputs, [*good, report(good[0].name, 90, wgmma=0, mma=4)])


@pytest.mark.parametrize("place", [0, 1, 3])
def test_the_comparison_with_the_reference_bites(place, monkeypatch):
    """Where "triton" gives plain PyTorch's results all is well; off by a hundredth in one tensor it is not."""
    original, off = kernels.run_member, [0.0]

    def run_member(kind, impl, dtype, dim):
        found = [x.detach().clone() for x in original(kind, impl if impl == "reference" else "eager", dtype, dim)]
        if impl == "triton":
            found[place].view(-1)[7] += off[0] * found[place].abs().max()
        return found

    monkeypatch.setattr(kernels, "run_member", run_member)
    monkeypatch.setattr(kernels, "ATTENTION", ("gdpa",))
    kernels.compare_with_reference()
    off[0] = 0.05
    with pytest.raises(AssertionError, match="gdpa, head dim 128: off by"):
        kernels.compare_with_reference()


def test_a_failure_in_the_interpreter_fails_the_check(monkeypatch):
    kernels.check_in_interpreter.cache_clear()
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="AssertionError: hstu: off by 1")
    monkeypatch.setattr(kernels.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(AssertionError, match="hstu: off by 1"):
        kernels.check_in_interpreter()
