"""What the compiler makes of the block's kernels, for GPUs that are not here: no spills, matrix instructions, TMA."""

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
