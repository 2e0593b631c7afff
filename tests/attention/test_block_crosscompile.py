"""What the compiler makes of the block's kernels, for GPUs that are not here: no spills, matrix instructions, TMA.

The same with the Triton of GPU hosts (torch 2.11 comes with 3.6.0):

    pip install --no-deps --target /tmp/triton36 triton==3.6.0
    PYTHONPATH=/tmp/triton36 python -m pytest -m "slow or not slow" tests/attention/test_block_crosscompile.py
"""

import ast
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from gem_attention import block_launch
from gem_attention.interface import GateSpec, ProjectionSpec, RotarySpec
from gem_attention.triton_crosscompile import CrossCompiler

TOKENS, DIM = 512, 1024
FOUR = (DIM,) * 4
TURNED = {"turned": (2, 3), "head_dim": 128}
SPECS = {
    "plain": ProjectionSpec(widths=FOUR),
    "silu": ProjectionSpec(widths=FOUR, silu=(0, 1, 2, 3)),
    "silu-rms": ProjectionSpec(widths=FOUR, silu=(0, 1, 2, 3), norm="rms"),
    "halves": ProjectionSpec(widths=FOUR, rotary=RotarySpec(pairing="halves"), **TURNED),
    "interleaved": ProjectionSpec(widths=FOUR, rotary=RotarySpec(pairing="interleaved"), **TURNED),
    "all": ProjectionSpec(widths=FOUR, silu=(0, 1, 2, 3), rotary=RotarySpec(pairing="halves"), **TURNED),
}
PRODUCTS = {"project_kernel", "input_gradient_kernel"}


def compile_projection(spec, capability):
    """Every kernel of the projection's forward and backward."""
    x, weight = (torch.zeros(n, DIM, dtype=torch.bfloat16) for n in (TOKENS, sum(spec.widths)))
    table = torch.zeros(TOKENS, 128) if spec.turned else None
    with CrossCompiler(capability) as compiler:
        outs, preacts, stats = block_launch.project(x, weight, table, spec=spec, keep=True)
        dots = len(preacts) == len(outs)
        g, scalars, _ = block_launch.gradient(outs, preacts, weight, table, stats, spec=spec, dots=dots)
        if dots:
            block_launch.input_gradient(g, weight, x, stats, scalars, spec=spec)
        else:
            block_launch.norm_gradient(x, x, stats, spec=spec)
    return compiler.reports


def compile_gate(spec, capability):
    a, u = torch.zeros(TOKENS, 8, 128, dtype=torch.bfloat16), torch.zeros(TOKENS, DIM, dtype=torch.bfloat16)
    with CrossCompiler(capability) as compiler:
        _, stats = block_launch.gate(a, u, spec=spec)
        block_launch.gate_gradient(u, a, u, stats, spec=spec, rebuild=True)
    return compiler.reports


def assert_good(reports):
    for report in reports:
        assert report.spill_instructions == 0, report
        if report.name in PRODUCTS:
            assert report.wgmma > 0, report
            assert report.mma == 0, report
            assert report.tma > 0, report


def test_a_projection_with_silu_and_rotary():
    reports = compile_projection(SPECS["all"], 90)
    assert [report.name for report in reports] == [
        "stats_kernel", "project_kernel", "gradient_kernel", "input_gradient_kernel",
    ]  # fmt: skip
    assert_good(reports)


def test_a_gate():
    assert_good(compile_gate(GateSpec(activation="silu"), 90))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", SPECS)
def test_every_projection(name, capability):
    assert_good(compile_projection(SPECS[name], capability))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("activation", ["none", "silu", "sigmoid"])
@pytest.mark.parametrize("per_head", [False, True])
def test_every_gate(activation, per_head, capability):
    for norm in ("layer", "rms"):
        assert_good(compile_gate(GateSpec(activation=activation, per_head=per_head, norm=norm), capability))


def text_arguments(source, fields):
    """Calls of one @triton.jit function by another, that hand on a text field of the config."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    calls = [call for call in calls if call.func.id != "float"]
    handed = [(call, arg) for call in calls for arg in (*call.args, *(k.value for k in call.keywords))]
    return [
        ast.unparse(call)
        for call, arg in handed
        if (isinstance(arg, ast.Attribute) and ast.unparse(arg.value) == "C" and arg.attr in fields)
        or (isinstance(arg, ast.Constant) and isinstance(arg.value, str))
    ]


def test_no_kernel_hands_text_to_another():
    """Triton 3.6 compiles no such call (it makes constants of numbers and types only); 3.7, which runs here, does."""
    folder = Path(block_launch.__file__).parent
    files = [path for path in folder.glob("*.py") if "@triton.jit" in path.read_text()]
    classes = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
               if isinstance(node, ast.ClassDef)]  # fmt: skip
    items = [item for node in classes for item in node.body if isinstance(item, ast.AnnAssign)]
    fields = {ast.unparse(item.target) for item in items if "str" in ast.unparse(item.annotation)}
    assert {"precision", "activation"} <= fields
    assert {"block_kernels.py", "block_gate.py"} <= {path.name for path in files}
    assert text_arguments("dot(a, b, acc, C.precision)", fields) == ["dot(a, b, acc, C.precision)"]
    found = {path.name: text_arguments(path.read_text(), fields) for path in files}
    assert not any(found.values()), found


def test_one_compilation_serves_all_lengths():
    """The number of tokens is no compile-time constant: lengths of the same divisibility share a kernel."""
    kernel = block_launch.block_kernels.norm_gradient_kernel
    spec, sizes = ProjectionSpec(widths=(64,)), (48, 96, 1600, 33, 77, 501)
    variants = set()
    for tokens in sizes:
        x = torch.zeros(tokens, 64, dtype=torch.bfloat16)
        with CrossCompiler(90) as compiler:
            block_launch.norm_gradient(x, x, block_launch.Stats(x.float()[:, 0], x.float()[:, 0]), spec=spec)
        variants.add(compiler.kernels[-1].hash)
    assert kernel is block_launch.block_kernels.norm_gradient_kernel
    assert len(variants) == 2  # multiples of 16, and the others
