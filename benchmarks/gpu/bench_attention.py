"""Our attention kernels on the benchmark shapes, checked, with the device's state: for the history of one GPU.

    python benchmarks/gpu/bench_attention.py --out attention.json [--shapes B1 B2] [--impls triton]

Times, shapes and inputs are those of attention_compare.py, which also runs the public peers; here only ours are kept,
as costs in ms with their FLOPs and their share of the ceiling of the same process. First every implementation is held
against the reference in float64 on a small ragged batch, by the rule of gem_attention.testing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention_compare import compare
from attention_shapes import shapes
from bench_ceilings import measure_ceilings
from device import describe_working_device
from gem_attention.api import attention, make_layout
from gem_attention.interface import AttentionSpec, MaskSpec
from record import Measurement, write_measurements

LENGTHS = (0, 1, 17, 128, 300)
HEADS, DIM = 4, 128


def outcome(impl: str, dtype: torch.dtype, activation: str) -> list[torch.Tensor]:
    """Output and gradients of a small causal batch."""
    generator = torch.Generator(device="cuda").manual_seed(4)
    offsets = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)
    qkv = torch.randn(3, sum(LENGTHS), HEADS, DIM, generator=generator, device="cuda").to(torch.bfloat16).to(dtype)
    given = [x.requires_grad_() for x in qkv]
    spec = AttentionSpec(
        activation=activation,
        scale=DIM**-0.5,
        divisor=1.0 if activation == "softmax" else 256.0,
        mask=MaskSpec(causal=True),
    )
    out = attention(*given, spec=spec, layout=make_layout(q_offsets=offsets), impl=impl)
    weights = torch.cos(torch.arange(out.numel(), device="cuda", dtype=torch.float64)).view_as(out).to(out.dtype)
    return [out, *torch.autograd.grad(out, given, weights)]


def check(impl: str) -> None:
    """At most 2 (output) or 3 (gradients) times as far from float64 as eager bfloat16, or as rounding alone."""
    for activation in ("silu", "softmax"):
        exact = outcome("reference", torch.float64, activation)
        plain = outcome("eager", torch.bfloat16, activation)
        ours = outcome(impl, torch.bfloat16, activation)
        for name, factor, truth, theirs, mine in zip(
            ("out", "dq", "dk", "dv"), (2, 3, 3, 3), exact, plain, ours, strict=True
        ):
            rounding = (truth.to(torch.bfloat16).double() - truth).abs().max()
            allowed = factor * torch.maximum((theirs.double() - truth).abs().max(), rounding)
            off = (mine.double() - truth).abs().max()
            if off > allowed:
                raise ValueError(f"{impl}, {activation}, {name}: off by {off:.3e}, allowed {allowed:.3e}")


def measure(shape: str, impls: list[str], rounds: int) -> list[Measurement]:
    """Forward and backward of each implementation on one shape; an implementation that cannot run it is left out."""
    found = []
    for row in compare(shapes()[shape], None, impls, rounds, energy_s=1.0):
        if "fwd_ms" not in row:
            print(f"{shape}: {row['name']}: {row['error']}")
            continue
        impl = row["name"].removeprefix("ours, ")
        for what, key in (("forward", "fwd"), ("backward", "bwd")):
            facts = {
                "tflop_per_s": row[f"{key}_tflops"],
                "tb_per_s": row[f"{key}_tb_s"],
                "share_of_matmul": row[f"{key}_tflops"] / row["matmul_now_tflops"],
            }
            case = f"attention_gpu.{impl}_{shape.lower()}_{what}"
            found.append(Measurement(case=case, unit="ms", samples=(row[f"{key}_ms"],), facts=facts))
            print(f"{case}: {row[f'{key}_ms']:.3f} ms, {facts['share_of_matmul']:.2f} of the matrix product")
            joules = row[f"{key}_joules_per_sequence"]
            if joules is None:
                facts["energy_unavailable"] = row["energy_unavailable"]
            else:
                found.append(Measurement(case=case, unit="J", samples=(joules,)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="*", default=["B1", "B1f", "B1w", "B3a"])
    parser.add_argument("--impls", nargs="*", default=["triton"])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for impl in arguments.impls:
        check(impl)
    before = describe_working_device(0)
    ceilings, _ = measure_ceilings()
    found = [m for shape in arguments.shapes for m in measure(shape, arguments.impls, arguments.rounds)]
    write_measurements(arguments.out, found, ceilings=ceilings, before=before)


if __name__ == "__main__":
    main()
