"""The Triton kernels as a GPU would get them, compiled for a GPU that is not here: what the compiler says of them.

Registers, spilled loads and stores, shared memory and instructions of the forward, dq and dkv kernel of one member of
the family, bf16, head dim 128, for sm_90 (Hopper) and sm_100 (Blackwell). Free of noise, and the first to move when a
change spills. `missed_matrix_instructions` is 1 where a kernel fell back to the older matrix instructions.
The check runs the same kernels, the same sources, in Triton's interpreter against the reference; it needs a process of
its own, since Triton decides at import.
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
LENGTHS = (0, 3, 17, 64, 130)
CAPABILITIES = (90, 100)
KINDS = ("hstu", "softmax")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Which member, for which compute capability."""

    kind: str
    capability: int


def spec_of(kind: str) -> Any:
    from gem_attention.interface import AttentionSpec, MaskSpec

    if kind == "hstu":
        return AttentionSpec(activation="silu", scale=DIM**-0.5, divisor=256.0, mask=MaskSpec(causal=True))
    return AttentionSpec(activation="softmax", scale=DIM**-0.5, mask=MaskSpec(causal=True))


def problem_of(kind: str) -> Any:
    import torch
    from gem_attention.triton_launch import Problem

    generator = torch.Generator().manual_seed(4)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    q, k, v = torch.randn(3, int(offsets[-1]), HEADS, DIM, generator=generator).to(torch.bfloat16)
    return Problem(q=q, k=k, v=v, spec=spec_of(kind), batch_size=len(LENGTHS), k_offsets=offsets, q_offsets=offsets)


def compile_for(inputs: Inputs) -> list[Any]:
    """Reports of the forward, dq and dkv kernels, nothing launched."""
    import torch
    from gem_attention import triton_launch
    from gem_attention.triton_crosscompile import CrossCompiler

    problem = problem_of(inputs.kind)
    with CrossCompiler(inputs.capability) as compiler:
        out, lse = triton_launch.forward(problem)
        triton_launch.backward(problem, torch.zeros_like(out), out, lse)
    return [report for report in compiler.reports if report.name in ("forward_kernel", "dq_kernel", "dkv_kernel")]


def check(inputs: Inputs, reports: list[Any]) -> None:
    """All three kernels compiled for the target asked for, and right in the interpreter."""
    assert [report.name for report in reports] == ["forward_kernel", "dq_kernel", "dkv_kernel"]
    assert {report.capability for report in reports} == {inputs.capability}
    check_in_interpreter()


@cache
def check_in_interpreter() -> None:
    """Run this file's `main` once in a process where Triton interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from cases.kernels import compare_with_reference as c; c()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def compare_with_reference() -> None:
    """Output and gradients of the interpreted kernels, by the rule of gem_attention.testing.

    Against the reference in float64 at most 2 (output) or 3 (gradients) times as far off as plain PyTorch in bfloat16,
    whose error counts as at least that of rounding the true result.
    """
    import torch

    for kind in KINDS:
        exact, plain, ours = (
            run_member(kind, impl, dtype)
            for impl, dtype in (("reference", torch.float64), ("eager", torch.bfloat16), ("triton", torch.bfloat16))
        )
        for factor, truth, theirs, mine in zip((2, 3, 3, 3), exact, plain, ours, strict=True):
            rounding = (truth.to(torch.bfloat16).double() - truth).abs().max()
            allowed = factor * torch.maximum((theirs.double() - truth).abs().max(), rounding)
            off = (mine.double() - truth).abs().max()
            assert off <= allowed, f"{kind}: off by {off:.3e}, allowed {allowed:.3e}"


def run_member(kind: str, impl: str, dtype: Any) -> list[Any]:
    """Output and gradients of q, k, v of one member of the family."""
    import torch
    from gem_attention.api import attention, make_layout

    problem = problem_of(kind)
    given = [x.to(dtype).requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out = attention(*given, spec=problem.spec, layout=make_layout(q_offsets=problem.q_offsets), impl=impl)
    return [out, *torch.autograd.grad(out.sum(), given)]


def count(inputs: Inputs, run: Any) -> dict[str, int]:
    """Figures of each kernel, from a compilation that Triton has cached since the check."""
    figures = {}
    for report in run(inputs):
        kernel = report.name.removesuffix("_kernel")
        figures |= {
            f"{kernel}.registers": report.registers,
            f"{kernel}.spill_instructions": report.spill_instructions,
            f"{kernel}.shared_bytes": report.shared_bytes,
            f"{kernel}.instructions": report.instructions,
            f"{kernel}.missed_matrix_instructions": int(report.wgmma == 0),
        }
    return figures


CASES = tuple(
    Case(
        name=f"kernels.{kind}_sm{capability}",
        make=partial(Inputs, kind=kind, capability=capability),
        run=compile_for,
        check=check,
        count=count,
        timed=False,
    )
    for kind in KINDS
    for capability in CAPABILITIES
)
