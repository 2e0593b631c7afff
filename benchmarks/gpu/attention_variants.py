"""Kernels beside their alternatives, one kernel at a time: `python attention_variants.py [--shapes B1w] --out FILE`.

What is listed was thought of in NOTES-attention.md and could not be judged without a run. Each alternative runs in turn
with the default (first of its list); its result is compared with the default's, and --own of attention_check.py holds
the Gluon ones against float64. Median of the rounds, in ms of the kernel with the listing of its tiles.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention_shapes import Shape, shapes
from attention_timing import copy_tb_s, matmul_tflops, one_ms
from device import describe_working_device
from gem_attention import gluon_launch, triton_launch
from gem_attention.gluon_launch import Choice
from gem_attention.triton_config import Tiles
from gem_attention.triton_launch import Gradients, Problem
from record import write_record
from torch import Tensor

Make = Callable[[], list[Tensor]]

_NARROW = {"block": 64, "stages": 4}
_WIDE = {"block": 128, "stages": 2}
# (shape, kernel) -> alternatives to the default, Gluon
GLUON: dict[tuple[str, str], list[Choice]] = {
    ("B1", "forward"): [Choice(own=True, **_WIDE), Choice(own=True, **_NARROW)],
    ("B1w", "forward"): [Choice(own=True, **_NARROW)],
    ("B2jag", "forward"): [Choice(own=True, **_NARROW)],
    **{(name, kernel): [Choice(stages=3, own=True)] for name in ("B1", "B1w", "B2jag") for kernel in ("dq", "dkv")},
}
# the same, Triton
TRITON: dict[tuple[str, str], list[Tiles]] = {
    ("B1r", "forward"): [
        Tiles(block_m=64, block_n=64, stages=2, tma=True),
        Tiles(block_m=64, block_n=64, stages=1),
        Tiles(block_m=64, block_n=64, stages=1, tma=True, registers=168),
        Tiles(block_m=128, block_n=64, warps=8, stages=1, tma=True),
    ],
    ("B1r", "dq"): [
        Tiles(block_m=64, block_n=32, stages=1, tma=True),
        Tiles(block_m=64, block_n=64, warps=8, stages=1),
        Tiles(block_m=64, block_n=64, stages=1),
    ],
    ("B1r", "dkv"): [
        Tiles(block_m=32, block_n=64, stages=2),
        Tiles(block_m=32, block_n=64, stages=1, tma=True),
        Tiles(block_m=64, block_n=64, warps=8, stages=1),
        Tiles(block_m=64, block_n=64, stages=1),
    ],
    ("B1r", "tables"): [
        Tiles(block_m=32, block_n=32, warps=2, stages=2, programs=4),
        Tiles(block_m=32, block_n=32, warps=2, stages=2, programs=5),
        Tiles(block_m=32, block_n=32, warps=2, stages=2, registers=160, programs=6),
        Tiles(block_m=32, block_n=32, warps=2, stages=1, programs=5),
        Tiles(block_m=32, block_n=32, warps=2, stages=2, tma=True, programs=4),
        Tiles(block_m=32, block_n=32, warps=1, stages=2, programs=6),
        Tiles(block_m=32, block_n=32, warps=1, stages=1, programs=7),
        Tiles(block_m=64, block_n=64, warps=4, stages=1, tma=True, registers=168, programs=3),
    ],
    ("B1", "dkv"): [
        Tiles(block_m=32, block_n=64, stages=2),
        Tiles(block_m=64, block_n=64, warps=8, stages=2),
    ],
    ("B1w", "forward"): [Tiles(block_m=64, block_n=64, stages=2, tma=True)],
}


def problem(shape: Shape) -> tuple[Problem, Tensor]:
    """The shape's problem and the gradient of its output, random."""
    torch.manual_seed(0)

    def offsets(lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).cuda()

    def rows(count: int) -> Tensor:
        return torch.randn(count, shape.heads, shape.dim, device="cuda", dtype=torch.bfloat16) * 0.5

    q_offsets = offsets(shape.q_lengths)
    tables = {}
    if shape.bias is not None and shape.bias.time is not None:
        columns = {"position_table": 2 * shape.bias.max_positions - 1, "time_table": shape.bias.time.count}
        tables = {k: torch.randn(1, n, device="cuda", dtype=torch.bfloat16) * 0.5 for k, n in columns.items()}
        tables["timestamps"] = torch.tensor(shape.timestamps(), device="cuda")
    p = Problem(
        q=rows(sum(shape.q_lengths)),
        k=rows(sum(shape.k_lengths)),
        v=rows(sum(shape.k_lengths)),
        spec=shape.spec(),
        batch_size=len(shape.q_lengths),
        k_offsets=q_offsets if shape.is_self else offsets(shape.k_lengths),
        q_offsets=q_offsets,
        num_targets=torch.tensor(shape.num_targets(), device="cuda") if shape.targets else None,
        **tables,
    )
    return p, torch.randn_like(p.q)


def gluon_kernel(p: Problem, do: Tensor, kernel: str, choice: Choice | None) -> Make:
    def make() -> list[Tensor]:
        if kernel == "forward":
            return [gluon_launch.forward(p, choice)[0]]
        grads = triton_launch.empty_gradients(p)
        (gluon_launch.run_dq if kernel == "dq" else gluon_launch.run_dkv)(p, do, grads, choice)
        return [grads.dq] if kernel == "dq" else [grads.dk, grads.dv]

    return make


def triton_kernel(p: Problem, do: Tensor, kernel: str, tiles: Tiles | None) -> Make:
    lse = torch.empty(0, dtype=torch.float32, device="cuda")
    chosen = tiles or triton_launch.default_tiles(p, "dkv" if kernel == "forward" else kernel)

    def made(grads: Gradients) -> list[Tensor]:
        return [g for g in (grads.dq, grads.position, grads.time) if g is not None]

    def make() -> list[Tensor]:
        if kernel == "forward":
            return [triton_launch.forward(p, tiles)[0]]
        grads = triton_launch.empty_gradients(p)
        if kernel == "dq":
            return made(triton_launch.run_dq(p, do, None, lse, lse, grads=grads, tiles=chosen))
        if kernel == "tables":
            return made(triton_launch.run_tables(p, do, lse, lse, grads=grads, tiles=chosen))[1:]
        triton_launch.run_dkv(p, do, lse, lse, grads, chosen)
        return [grads.dk, grads.dv]

    return make


def compare(makers: dict[str, Make], rounds: int) -> list[dict]:
    """One row for each maker; difference: the greatest relative one of its results from those of the first."""
    rows, timed, first = [], {}, None
    for name, make in makers.items():
        try:
            got = make()
        except Exception as error:
            traceback.print_exc(limit=-2)
            rows.append({"variant": name, "error": f"{type(error).__name__}: {str(error)[:200]}"})
            continue
        if rounds == 0:
            continue
        first = first or got
        gaps = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, first, strict=True)]
        rows.append({"variant": name, "difference": max(gaps)})
        timed[name] = []
    for _ in range(rounds):
        for name, times in timed.items():
            times.append(one_ms(makers[name]))
    for row in rows:
        if row["variant"] in timed:
            times = sorted(timed[row["variant"]])
            row["ms"] = times[len(times) // 2]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["B1", "B1w", "B1r", "B2jag"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warm", help="fill the kernel caches for this shape and end")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows, ceilings = [], {}
    if args.out:
        before = describe_working_device(0)
        ceilings = {"bf16_matmul_flop_per_s": matmul_tflops() * 1e12, "copy_bytes_per_s": copy_tb_s() * 1e12}
    without = {"energy": "alternatives are compared by time alone"}
    for name in [args.warm] if args.warm else args.shapes:
        p, do = problem(shapes()[name])
        for family, table, kernel_of in (("gluon", GLUON, gluon_kernel), ("triton", TRITON, triton_kernel)):
            for kernel in ("forward", "dq", "dkv", "tables"):
                others = table.get((name, kernel))
                if not others:
                    continue
                makers = {"default": kernel_of(p, do, kernel, None)}
                makers |= {repr(choice): kernel_of(p, do, kernel, choice) for choice in others}
                for row in compare(makers, 0 if args.warm else args.rounds):
                    rows.append({"shape": name, "impl": family, "kernel": kernel, **row})
                    short = row["variant"].replace("block_", "").replace("registers", "regs")
                    shown = f"{row['ms']:.3f} ms" if "ms" in row else ""
                    said = row.get("error") or f"difference {row['difference']:.5f}"
                    print(f"{name:6s} {family:6s} {kernel:8s} {short:66s} {shown}  {said}", flush=True)
        del p, do
        torch.cuda.empty_cache()
        if args.out:
            found = {"matmul_tflops": matmul_tflops(), "rows": rows}
            write_record(Path(args.out), found, ceilings=ceilings, before=before, without=without)


if __name__ == "__main__":
    main()
