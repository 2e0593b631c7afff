"""The block around attention on a GPU: ours against torch eager and torch.compile, with both ceilings.

    bash benchmarks/gpu/blocks_first.sh OUT                              checks and compiles in parallel, then all of it
    python benchmarks/gpu/bench_blocks.py --out blocks.json [--tune] [--tokens 131072]

Cases (bfloat16, 1024 wide, 8 heads of 128): the UVQK projection 1024 -> 4096 with SiLU on all outputs (layer and RMS
norm), the same without SiLU but with rotary on q and k, and the gate forward and backward. "product" is the matrix
product alone, by the vendor's library: what is left is what norm, activation and rotary cost. Everyone runs in turn in
the same rounds, the device spinning before each; medians count. First the suite of gem_attention.block_testing runs on
the GPU, so a wrong kernel is not timed. --tune also prints the products' times for other tiles. --part I N only runs
every N-th check from the I-th and compiles that share of the tiles: N processes at once fill the kernel cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention_timing import one_ms
from bench_ceilings import measure_ceilings
from device import describe_device
from gem_attention import block_launch
from gem_attention.block_api import gated, norm_linear, rotary_table
from gem_attention.block_counting import gate_bytes, projection_cost
from gem_attention.block_launch import BlockTiles
from gem_attention.block_reference import finish, library_norm, products
from gem_attention.block_reference import gated as reference_gated
from gem_attention.block_testing import checks
from gem_attention.interface import GateSpec, ProjectionSpec, RecomputeSpec, RotarySpec
from record import Measurement, write_measurements

DIM, HEADS = 1024, 8
WIDTHS = (DIM,) * 4
HALVES = RotarySpec(pairing="halves")
PROJECTIONS = {
    "layer_silu": ProjectionSpec(widths=WIDTHS, silu=(0, 1, 2, 3)),
    "rms_silu": ProjectionSpec(widths=WIDTHS, silu=(0, 1, 2, 3), norm="rms"),
    "layer_rotary": ProjectionSpec(widths=WIDTHS, turned=(2, 3), rotary=HALVES, head_dim=DIM // HEADS),
}
GATES = {
    "layer_silu": GateSpec(activation="silu"),
    "rms_silu_heads": GateSpec(activation="silu", norm="rms", per_head=True),
}
Contender = tuple[Callable[[], Any], Callable[[], Any]]  # forward, backward


def check_all(part: int = 0, parts: int = 1) -> bool:
    """Whether the shipped suite passes on this GPU, every case in bfloat16 and float32."""
    bad = []
    suite = checks(impl="triton", dtypes=(torch.bfloat16, torch.float32), device="cuda")[part::parts]
    for check in suite:
        try:
            check()
        except Exception as error:  # wrong, or not compiled: all of them are to be seen at once
            bad.append(f"{check}: {type(error).__name__}: {error}")
    print(f"suite: {len(suite) - len(bad)} of {len(suite)} checks passed", flush=True)
    for text in bad:
        print("BAD", text[:300], flush=True)
    return not bad


def contender(call: Callable[..., Any], leaves: list[torch.Tensor], above: list[torch.Tensor]) -> Contender:
    """Forward without a graph, and backward through one graph that is kept."""
    outs = call(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)

    def forward() -> None:
        with torch.no_grad():
            call(*leaves)

    def backward() -> None:
        torch.autograd.grad(outs, leaves, above, retain_graph=True)

    return forward, backward


def alternate(contenders: dict[str, Contender], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """By name: milliseconds of each round, forward and backward."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in contenders}
    for turn in range(rounds + 3):
        for name, pair in contenders.items():
            for place, fn in enumerate(pair):
                ms = one_ms(fn)
                if turn >= 3:
                    times[name][place].append(ms)
    return times


def projection(name: str, tokens: int, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    spec = PROJECTIONS[name]
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    x, weight = normal(tokens, DIM).requires_grad_(), (normal(4 * DIM, DIM) / 32).requires_grad_()
    above = [normal(tokens, DIM) for _ in WIDTHS]
    table = None
    if spec.turned:
        table = rotary_table(torch.rand(tokens, spec.head_dim // 2, device="cuda", generator=generator) * 100)

    def plain(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = products(library_norm(x, norm=spec.norm, eps=spec.eps), w, spec)
        return tuple(finish(part, i, table, spec) for i, part in enumerate(parts))

    def ours(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return norm_linear(x, w, spec=spec, table=table, impl="triton")

    contenders = {
        "product": contender(lambda x, w: x @ w.T, [x, weight], [torch.cat(above, 1)]),
        "eager": contender(plain, [x, weight], above),
        "compiled": contender(torch.compile(plain, fullgraph=True), [x, weight], above),
        "ours": contender(ours, [x, weight], above),
    }
    if spec.silu:
        again = RecomputeSpec(preactivations=True)
        contenders["ours_again"] = contender(
            lambda x, w: norm_linear(x, w, spec=spec, table=table, recompute=again, impl="triton"), [x, weight], above
        )
    return alternate(contenders, rounds)


def gate(name: str, tokens: int, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    spec = GATES[name]
    a = torch.randn(tokens, HEADS, DIM // HEADS, device="cuda").bfloat16().requires_grad_()
    u, above = (torch.randn(tokens, DIM, device="cuda").bfloat16() for _ in range(2))
    leaves = [a, u.requires_grad_()]

    def plain(a: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return reference_gated(a, u, spec=spec, dtype=u.dtype, normalize=library_norm)

    contenders = {
        "eager": contender(plain, leaves, [above]),
        "compiled": contender(torch.compile(plain, fullgraph=True), leaves, [above]),
        "ours": contender(lambda a, u: gated(a, u, spec=spec, impl="triton"), leaves, [above]),
    }
    return alternate(contenders, rounds)


def report(
    group: str,
    name: str,
    times: dict[str, Any],
    *,
    facts: dict[str, tuple[int, int]],
    ceilings: dict[str, float],
) -> list[Measurement]:
    """Print a line each, return the measurements. facts: "flops" and "bytes", forward and backward."""
    found = []
    for who, pair in times.items():
        line = [f"{group}.{name:15s} {who:9s}"]
        for place, what in enumerate(("forward", "backward")):
            ms = statistics.median(pair[place])
            flops, moved = facts["flops"][place], facts["bytes"][place]
            floor_ms = max(flops / ceilings["bf16_matmul_flop_per_s"], moved / ceilings["copy_bytes_per_s"]) * 1e3
            line.append(f"{what} {ms:7.3f} ms, {floor_ms / ms:4.2f} of the ceiling")
            if who != "product":
                entry = {"flops": flops, "min_bytes": moved, "share_of_ceiling": floor_ms / ms}
                best = min(statistics.median(times[peer][place]) for peer in ("eager", "compiled"))
                entry["times_faster_than_best_torch"] = best / ms
                case = f"blocks_gpu.{group}_{name}_{who}_{what}"
                found.append(Measurement(case=case, unit="ms", samples=tuple(pair[place]), facts=entry))
        print("  ".join(line), flush=True)
    return found


def candidates() -> list[BlockTiles]:
    base = BlockTiles(block_m=128, block_n=256, block_k=64)
    small = replace(base, block_n=128)
    return [
        base,
        replace(base, beside=True),
        replace(base, halved=False),
        replace(base, flatten=False),
        replace(base, flatten=False, programs=0),
        replace(base, stages=4),
        replace(small, programs=2),
        replace(small, programs=0, flatten=False),
        replace(small, warps=4, programs=2),
        replace(small, warps=4, programs=0, flatten=False, halved=False),
    ]


def tune(tokens: int, rounds: int, tiles: list[BlockTiles]) -> None:
    """The two products with these tiles, and the other kernels of the backward; prints medians."""
    spec = PROJECTIONS["layer_silu"]
    x, weight = torch.randn(tokens, DIM, device="cuda").bfloat16(), torch.randn(4 * DIM, DIM, device="cuda").bfloat16()
    g = torch.randn(tokens, 4 * DIM, device="cuda").bfloat16()
    grads = [part.contiguous() for part in g.split(DIM, 1)]
    stats, dots = block_launch.Stats(*torch.rand(2, tokens, device="cuda")), torch.rand(2, tokens, device="cuda")
    steps: dict[str, Callable[[], Any]] = {
        "g @ W": lambda: g @ weight,
        "g^T @ x, float32": lambda: torch.mm(g.t(), x, out_dtype=torch.float32),
        "g^T @ x": lambda: g.t() @ x,
        "norm_gradient": lambda: block_launch.norm_gradient(x, x, stats, spec=spec),
        "gradient": lambda: block_launch.gradient(grads, grads, weight, None, stats, spec=spec, dots=True),
    }
    for t in tiles:
        steps |= {
            f"forward {t}": lambda t=t: block_launch.project(x, weight, None, spec=spec, keep=True, tiles=t),
            f"no keep {t}": lambda t=t: block_launch.project(x, weight, None, spec=spec, keep=False, tiles=t),
            f"dx {t}": lambda t=t: block_launch.input_gradient(g, weight, x, stats, dots, spec=spec, tiles=t),
        }
    for name, fn in steps.items():
        try:
            ms = statistics.median([one_ms(fn) for _ in range(rounds + 3)][3:])
            print(f"tune {ms:7.3f} ms  {name}", flush=True)
        except Exception as error:  # too much shared memory, say
            print(f"tune {type(error).__name__}: {str(error)[:80]}  {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", type=int, nargs=2, metavar=("I", "N"))
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    if arguments.part:
        part, parts = arguments.part
        check_all(part, parts)
        return tune(4096, 1, candidates()[part::parts])
    if arguments.out is None:
        parser.error("--out says where the measurements go")
    before = describe_device(0)
    right = check_all()
    ceilings, _ = measure_ceilings()
    print({name: f"{value:.4g}" for name, value in ceilings.items()}, flush=True)
    if arguments.tune:
        tune(arguments.tokens, 7, candidates())
    if not right:
        raise SystemExit("kernels are wrong: nothing is measured")
    found = []
    for name, spec in PROJECTIONS.items():
        cost = projection_cost(arguments.tokens, DIM, spec)
        facts = {
            "flops": (cost.forward_flops, cost.backward_flops),
            "bytes": (cost.forward_min_bytes, cost.backward_min_bytes),
        }
        found += report(
            "projection", name, projection(name, arguments.tokens, arguments.rounds), facts=facts, ceilings=ceilings
        )
    for name in GATES:
        facts = {"flops": (0, 0), "bytes": gate_bytes(arguments.tokens, DIM)}
        found += report("gate", name, gate(name, arguments.tokens, arguments.rounds), facts=facts, ceilings=ceilings)
    write_measurements(arguments.out, found, ceilings=ceilings, before=before)


if __name__ == "__main__":
    main()
