"""The block around attention on a GPU: ours against torch eager and torch.compile, with both ceilings.

    bash benchmarks/gpu/blocks_first.sh OUT                              checks and compiles in parallel, then all of it
    python benchmarks/gpu/bench_blocks.py --out blocks.json [--tune] [--tokens 131072]

Cases (bfloat16, 1024 wide, 8 heads of 128): the UVQK projection 1024 -> 4096 with SiLU on all outputs (layer and RMS
norm), the same without SiLU but with rotary on q and k, and the gate forward and backward. "product" is the matrix
product alone, by the vendor's library: what is left is what norm, activation and rotary cost. Everyone runs in turn in
the same rounds, the device spinning before each; medians count. Before a case is timed it is compared with float64 on
its own spec (1000 tokens): one that is wrong or does not compile is named and not timed, the others are. The suite of
gem_attention.block_testing runs too. --tune also prints the products' times for other tiles. --part I N only runs every
N-th check from the I-th and compiles that share of the tiles and cases: N processes at once fill the caches of Triton
and torch.compile. --budget-s: no case and no tuning step begins later than that; what was left out is named. The exit
code is 1 if anything was wrong or left out. Results are written after each case.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention_timing import one_ms
from bench_ceilings import measure_ceilings
from device import describe_working_device, joules_per_call
from gem_attention import block_launch
from gem_attention.block_api import gated, norm_linear, rotary_table
from gem_attention.block_counting import gate_bytes, projection_cost
from gem_attention.block_launch import BlockTiles
from gem_attention.block_reference import finish, library_norm, products
from gem_attention.block_reference import gated as reference_gated
from gem_attention.block_testing import BlockCase, BlockQuirks, check, conformance, named
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
Times = dict[str, tuple[list[float], list[float]]]  # by contender
Energy = dict[str, list[tuple[float | None, str | None]]]  # by contender of ours: joules of a call or why none


def check_all(part: int = 0, parts: int = 1) -> bool:
    """Whether the shipped suite passes on this GPU, every case in bfloat16 and float32."""
    bad = []
    suite = conformance(BlockQuirks(dtypes=(torch.bfloat16, torch.float32), device="cuda"))[part::parts]
    for one in suite:
        try:
            one(named("triton"))
        except Exception as error:  # wrong, or not compiled: all of them are to be seen at once
            bad.append(f"{one}: {brief(error)}")
    print(f"suite: {len(suite) - len(bad)} of {len(suite)} checks passed", flush=True)
    for text in bad:
        print("BAD", text, flush=True)
    return not bad


def brief(error: Exception) -> str:
    """The error in one line. The compiler's errors quote the source, end with the reason and may have a cause below."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = [line.strip() for line in str(root).splitlines() if line.strip(" ^")] or [""]
    ends = lines if len(lines) < 4 else [lines[0], *lines[-2:]]
    return f"{type(root).__name__}: {' | '.join(ends)}"[:400]


def case_is_right(group: str, name: str) -> bool:
    """Whether ours agrees with float64 on the case's own spec; says so if not."""
    if group == "projection":
        case = BlockCase(name=f"{group}.{name}", tokens=1000, dim=DIM, projection=PROJECTIONS[name])
    else:
        case = BlockCase(
            name=f"{group}.{name}", tokens=1000, dim=DIM, gate=GATES[name], heads=HEADS, head_dim=DIM // HEADS
        )
    try:
        check(named("triton"), case, torch.bfloat16, "cuda")
    except Exception as error:  # the other cases are still to be timed
        print(f"BAD {group}.{name} is not timed: {brief(error)}", flush=True)
        return False
    return True


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


def alternate(contenders: dict[str, Contender], rounds: int) -> tuple[Times, Energy]:
    """By name: milliseconds of each round, forward and backward; then the energy of a call of ours, a second each."""
    times: Times = {name: ([], []) for name in contenders}
    for turn in range(rounds + 3):
        for name, pair in contenders.items():
            for place, fn in enumerate(pair):
                ms = one_ms(fn)
                if turn >= 3:
                    times[name][place].append(ms)
    ours = {name: pair for name, pair in contenders.items() if name.startswith("ours")} if rounds > 1 else {}
    return times, {
        name: [joules_per_call(fn, wait=torch.cuda.synchronize) for fn in pair] for name, pair in ours.items()
    }


def projection(name: str, tokens: int, rounds: int) -> tuple[Times, Energy]:
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


def gate(name: str, tokens: int, rounds: int) -> tuple[Times, Energy]:
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
    times: Times,
    energy: Energy,
    *,
    tokens: int,
    facts: dict[str, tuple[int, int]],
    ceilings: dict[str, float],
) -> list[Measurement]:
    """Print a line each, return the measurements, energy by token. facts: "flops" and "bytes", forward and backward."""
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
                joules, why_not = energy[who][place] if who in energy else (None, None)
                if why_not:
                    entry["energy_unavailable"] = why_not
                if joules is not None:
                    by = {"sample": "one token", "tokens": tokens}
                    found.append(Measurement(case=case, unit="J", samples=(joules / tokens,), facts=by))
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


def tune(tokens: int, rounds: int, tiles: list[BlockTiles], deadline: float = float("inf")) -> bool:
    """The two products with these tiles, and the other kernels of the backward; prints medians. False: out of time."""
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
        flags = [flag for flag in ("tma", "flatten", "beside", "halved") if getattr(t, flag)]
        label = f"{t.block_m}x{t.block_n}x{t.block_k} warps={t.warps} stages={t.stages} programs={t.programs} {flags}"
        steps |= {
            f"forward {label}": lambda t=t: block_launch.project(x, weight, None, spec=spec, keep=True, tiles=t),
            f"no keep {label}": lambda t=t: block_launch.project(x, weight, None, spec=spec, keep=False, tiles=t),
            f"dx {label}": lambda t=t: block_launch.input_gradient(g, weight, x, stats, dots, spec=spec, tiles=t),
        }
    for place, (name, fn) in enumerate(steps.items()):
        if time.monotonic() > deadline:
            print(f"LEFT OUT for lack of time: {len(steps) - place} of {len(steps)} tuning steps", flush=True)
            return False
        try:
            ms = statistics.median([one_ms(fn) for _ in range(rounds + 3)][3:])
            print(f"tune {ms:7.3f} ms  {name}", flush=True)
        except Exception as error:  # too much shared memory, say
            print(f"tune {brief(error)}  {name}", flush=True)
    return True


def cases() -> list[tuple[str, str]]:
    return [*(("projection", name) for name in PROJECTIONS), *(("gate", name) for name in GATES)]


def measure(group: str, name: str, tokens: int, rounds: int, ceilings: dict[str, float]) -> list[Measurement]:
    """Time a case; prints, and returns the measurements."""
    if group == "projection":
        cost = projection_cost(tokens, DIM, PROJECTIONS[name])
        facts = {
            "flops": (cost.forward_flops, cost.backward_flops),
            "bytes": (cost.forward_min_bytes, cost.backward_min_bytes),
        }
        times, energy = projection(name, tokens, rounds)
    else:
        facts = {"flops": (0, 0), "bytes": gate_bytes(tokens, DIM)}
        times, energy = gate(name, tokens, rounds)
    return report(group, name, times, energy, tokens=tokens, facts=facts, ceilings=ceilings)


def prepare(part: int, parts: int, tokens: int) -> None:
    """This part's checks, and its share of what main needs compiled."""
    check_all(part, parts)
    for group, name in cases()[part::parts]:
        try:
            (projection if group == "projection" else gate)(name, tokens, 1)
        except Exception as error:  # main says what it means
            print(f"BAD {group}.{name}: {brief(error)}", flush=True)
    tune(4096, 1, candidates()[(part - len(cases())) % parts :: parts])  # parts without a case first


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", type=int, nargs=2, metavar=("I", "N"))
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    if arguments.part:
        return prepare(*arguments.part, arguments.tokens)
    if arguments.out is None:
        parser.error("--out says where the measurements go")
    deadline = began + arguments.budget_s
    whole = check_all()
    before = describe_working_device(0)
    ceilings, _ = measure_ceilings()
    print({name: f"{value:.4g}" for name, value in ceilings.items()}, flush=True)
    right = [case for case in cases() if case_is_right(*case)]
    whole = whole and len(right) == len(cases())
    found: list[Measurement] = []
    for group, name in right:
        if time.monotonic() > deadline:
            print(f"LEFT OUT for lack of time: {group}.{name}", flush=True)
            whole = False
            continue
        try:
            found += measure(group, name, arguments.tokens, arguments.rounds, ceilings)
        except Exception as error:  # a peer's, or no memory: the other cases are still to be timed
            print(f"BAD {group}.{name}: {brief(error)}", flush=True)
            whole = False
            continue
        write_measurements(arguments.out, found, ceilings=ceilings, before=before)
    if arguments.tune:
        whole = tune(arguments.tokens, 7, candidates(), deadline) and whole
    print("everything right and timed" if whole else "NOT everything was right and timed: see BAD and LEFT OUT above")
    if not whole:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
