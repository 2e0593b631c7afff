"""The kernels as a GPU would get them, compiled for a GPU that is not here: what the compiler says of them.

Registers, spilled loads and stores, shared memory and instructions, bf16, for sm_90 (Hopper) and sm_100 (Blackwell; the
Gluon kernels are Hopper's). Head dim 128, and for HSTU and softmax also 64 and 256 (cases *_d64_*, *_d256_*), the other
sizes that tiles are chosen for. Free of noise, and the first to move when a change spills.
`missed_matrix_instructions`, of kernels with products, is 1 where one fell back to the older matrix instructions.
Members of the family are chosen so that every kernel of the packages is compiled (tests/benchmarks/test_kernels.py
lists them). Where several variants of one kernel are launched, each figure is the largest.

The check runs the same kernels, the same sources, in Triton's interpreter against the reference; it needs a process of
its own, since Triton decides at import. Gluon has no interpreter: of its kernels the check sees that they were compiled
for the target and to its matrix instructions; that they are right, benchmarks/gpu/attention_check.py tells on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from cases.case import Case

HEADS, DIM = 4, 128
OTHER_DIMS = {"hstu": (64, 256), "softmax": (64, 256)}  # the Gluon kernels take 128 alone
LENGTHS = (0, 3, 17, 64, 130)
ROWS = 16  # of q a sample, where q is not the sequence itself
CAPABILITIES = (90, 100)
ATTENTION = ("hstu", "softmax", "bias", "gdpa")
# Kernels that each member is there for; the same ones compile for several members.
EXPECTED = {
    "hstu": ("tile_list", "forward", "dq", "dkv"),
    "softmax": ("forward", "dq", "dkv"),
    "bias": ("time_sides", "forward", "dq", "dkv", "table"),
    "gdpa": ("forward", "short_query"),
    "block": ("stats", "project", "gradient", "input_gradient", "norm_gradient", "gate", "gate_gradient"),
    "gluon": ("gluon_forward", "gluon_dq", "gluon_dkv"),
}
WITHOUT_PRODUCTS = {"tile_list", "time_sides", "stats", "gradient", "norm_gradient", "gate", "gate_gradient"}
MEMBERS = (
    *((kind, DIM) for kind in EXPECTED),
    *((kind, dim) for kind, dims in OTHER_DIMS.items() for dim in dims),
)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Which member, for which compute capability and head dim."""

    kind: str
    capability: int
    dim: int = DIM


def spec_of(kind: str, dim: int) -> Any:
    from gem_attention.interface import AttentionSpec, BiasSpec, MaskSpec, TimeBuckets

    mask = MaskSpec(causal=True)
    if kind == "softmax":
        return AttentionSpec(activation="softmax", scale=dim**-0.5, mask=mask)
    if kind == "gdpa":
        return AttentionSpec(activation="gelu", scale=1 / 256, query="cross")
    bias = BiasSpec(where="inside_scale", max_positions=256, time=TimeBuckets(count=32)) if kind == "bias" else None
    return AttentionSpec(activation="silu", scale=dim**-0.5, divisor=256.0, mask=mask, bias=bias)


def problem_of(kind: str, dim: int = DIM) -> Any:
    import torch
    from gem_attention.triton_launch import Problem

    generator = torch.Generator().manual_seed(4)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    q, k, v = torch.randn(3, int(offsets[-1]), HEADS, dim, generator=generator).to(torch.bfloat16)
    given: dict[str, Any] = {}
    q_offsets = offsets
    if kind == "gdpa":
        q, q_offsets = q[: ROWS * len(LENGTHS)], torch.arange(len(LENGTHS) + 1) * ROWS
    if kind == "bias":
        given = {
            "position_table": torch.randn(1, 511, generator=generator).to(torch.bfloat16),
            "time_table": torch.randn(1, 32, generator=generator).to(torch.bfloat16),
            "timestamps": torch.arange(int(offsets[-1])) * 50,
        }
    return Problem(
        q=q, k=k, v=v, spec=spec_of(kind, dim), batch_size=len(LENGTHS), k_offsets=offsets, q_offsets=q_offsets, **given
    )


def launch_attention(kind: str, dim: int) -> None:
    import torch
    from gem_attention import triton_launch

    problem = problem_of(kind, dim)
    out, lse = triton_launch.forward(problem)
    triton_launch.backward(problem, torch.zeros_like(out), out, lse, short_queries=32 if kind == "gdpa" else 0)


def launch_gluon() -> None:
    import torch
    from gem_attention import gluon_launch

    problem = problem_of("hstu")
    out, lse = gluon_launch.forward(problem)
    gluon_launch.backward(problem, torch.zeros_like(out), out, lse)


def launch_block() -> None:
    """A layer's projection with SiLU and rotary, forward and both ways back, and its gate."""
    import torch
    from gem_attention import block_launch
    from gem_attention.interface import GateSpec, ProjectionSpec, RotarySpec

    tokens, width = sum(LENGTHS), HEADS * DIM
    spec = ProjectionSpec(
        widths=(width,) * 4, silu=(0, 1, 2, 3), turned=(2, 3), head_dim=DIM, rotary=RotarySpec(pairing="halves")
    )
    x, weight = (torch.zeros(rows, width, dtype=torch.bfloat16) for rows in (tokens, 4 * width))
    table = torch.zeros(tokens, DIM)
    outs, preacts, stats = block_launch.project(x, weight, table, spec=spec, keep=True)
    g, scalars, _ = block_launch.gradient(outs, preacts, weight, table, stats, spec=spec, dots=True)
    block_launch.input_gradient(g, weight, x, stats, scalars, spec=spec)
    block_launch.norm_gradient(x, x, stats, spec=spec)
    attention, gate = torch.zeros(tokens, HEADS, DIM, dtype=torch.bfloat16), GateSpec(activation="silu")
    _, stats = block_launch.gate(attention, x, spec=gate)
    block_launch.gate_gradient(x, attention, x, stats, spec=gate, rebuild=True)


def compile_for(inputs: Inputs) -> list[Any]:
    """Reports of the member's kernels in the order of launches, nothing launched."""
    from gem_attention.triton_crosscompile import CrossCompiler

    attention = partial(launch_attention, inputs.kind, inputs.dim)
    launch = {"block": launch_block, "gluon": launch_gluon}.get(inputs.kind, attention)
    with CrossCompiler(inputs.capability) as compiler:
        launch()
    wanted = {f"{name}_kernel" for name in EXPECTED[inputs.kind]}
    return [report for report in compiler.reports if report.name in wanted]


def check(inputs: Inputs, reports: list[Any]) -> None:
    """All kernels compiled for the target asked for, and right in the interpreter (Gluon: see the top of the file)."""
    assert {report.name for report in reports} == {f"{name}_kernel" for name in EXPECTED[inputs.kind]}
    assert {report.capability for report in reports} == {inputs.capability}
    if inputs.kind == "gluon":
        assert all(report.wgmma > 0 and report.mma == 0 for report in reports), reports
    else:
        check_in_interpreter()


@cache
def check_in_interpreter() -> None:
    """Run this file's comparisons once, in a process where Triton interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from cases import kernels; kernels.compare_with_reference(); kernels.compare_block()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def compare_with_reference() -> None:
    """Output and gradients of the interpreted kernels, by the rule of gem_attention.testing.

    Against the reference in float64 at most 2 (output) or 3 (gradients) times as far off as plain PyTorch in float16,
    whose error counts as at least that of rounding the true result. Not in bfloat16: where a GPU rounds to it, the
    interpreter cuts bits off.
    """
    import torch

    for kind, dim in [member for member in MEMBERS if member[0] in ATTENTION]:
        exact, plain, ours = (
            run_member(kind, impl, dtype, dim)
            for impl, dtype in (("reference", torch.float64), ("eager", torch.float16), ("triton", torch.float16))
        )
        for place, (truth, theirs, mine) in enumerate(zip(exact, plain, ours, strict=True)):
            rounding = (truth.to(torch.float16).double() - truth).abs().max()
            allowed = (3 if place else 2) * torch.maximum((theirs.double() - truth).abs().max(), rounding)
            off = (mine.double() - truth).abs().max()
            assert off <= allowed, f"{kind}, head dim {dim}: off by {off:.3e}, allowed {allowed:.3e}"


def run_member(kind: str, impl: str, dtype: Any, dim: int) -> list[Any]:
    """Output and the gradients of q, k, v and the tables of one member of the family."""
    import torch
    from gem_attention.api import attention, make_layout

    problem = problem_of(kind, dim)
    given = [x.to(dtype).requires_grad_() for x in (problem.q, problem.k, problem.v)]
    tables = {}
    if kind == "bias":
        tables = {name: getattr(problem, name).to(dtype).requires_grad_() for name in ("position_table", "time_table")}
    more = {"k_offsets": problem.k_offsets, "max_q_len": ROWS} if kind == "gdpa" else {}
    layout = make_layout(q_offsets=problem.q_offsets, timestamps=problem.timestamps, **more)
    out = attention(*given, spec=problem.spec, layout=layout, **tables, impl=impl)
    return [out, *torch.autograd.grad(out.sum(), [*given, *tables.values()])]


def compare_block() -> None:
    """The shipped conformance cases of the block that hold the epilogues compiled here, and one without them."""
    import torch
    from gem_attention.block_testing import check, gate_cases, named, projection_cases

    names = ("layer-all", "rms-halves-24", "gate-layer-silu")
    cases = [case for case in (*projection_cases(), *gate_cases()) if case.name in names]
    assert len(cases) == len(names)
    for case in cases:
        check(named("triton"), case, torch.bfloat16)


def count(inputs: Inputs, run: Any) -> dict[str, int]:
    """Figures of each kernel, from a compilation that Triton has cached since the check."""
    figures: dict[str, int] = {}
    for report in run(inputs):
        kernel = report.name.removesuffix("_kernel")
        found = {
            f"{kernel}.registers": report.registers,
            f"{kernel}.spill_instructions": report.spill_instructions,
            f"{kernel}.shared_bytes": report.shared_bytes,
            f"{kernel}.instructions": report.instructions,
        }
        if kernel not in WITHOUT_PRODUCTS:
            found[f"{kernel}.missed_matrix_instructions"] = int(report.wgmma == 0)
        figures |= {name: max(value, figures.get(name, 0)) for name, value in found.items()}
    return figures


CASES = tuple(
    Case(
        name=f"kernels.{kind}{'' if dim == DIM else f'_d{dim}'}_sm{capability}",
        make=partial(Inputs, kind=kind, capability=capability, dim=dim),
        run=compile_for,
        check=check,
        count=count,
        timed=False,
    )
    for kind, dim in MEMBERS
    for capability in CAPABILITIES
    if kind != "gluon" or capability == 90
)
