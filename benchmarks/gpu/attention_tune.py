"""Try tile sizes of the Triton kernels on this GPU: `python attention_tune.py [--shapes B1 B2jag] [--kernels dq] --out
F`.

Each candidate is compiled in worker processes first (all cores), then timed alone, the device spinning before every
run; a candidate that spills or fails is listed with its reason. Correctness is attention_check.py's business: run it
too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention_shapes import Shape, shapes
from attention_timing import copy_tb_s, matmul_tflops, median_ms
from device import describe_working_device
from gem_attention import triton_launch
from gem_attention.triton_config import Tiles
from record import write_record


def _tiles(*choices: tuple[int, ...]) -> list[Tiles]:
    """(block_m, block_n, warps, stages, tma, registers) each."""
    names = ("block_m", "block_n", "warps", "stages", "tma", "registers")
    return [Tiles(**{n: bool(v) if n == "tma" else v for n, v in zip(names, c, strict=True)}) for c in choices]


FORWARD = _tiles(
    (64, 64, 4, 3, 1, 0),
    (64, 64, 4, 2, 1, 0),
    (64, 64, 4, 2, 1, 168),
    (64, 64, 4, 3, 0, 0),
    (64, 128, 4, 3, 1, 0),
    (128, 64, 4, 3, 1, 0),
    (128, 128, 8, 3, 1, 0),
)
DQ = _tiles(
    (64, 64, 4, 3, 1, 0), (64, 64, 4, 2, 1, 0), (64, 64, 4, 3, 0, 0), (64, 32, 4, 3, 1, 0), (64, 32, 4, 4, 1, 0)
)
DKV = _tiles(
    (64, 64, 4, 2, 0, 0),
    (64, 64, 4, 2, 1, 0),
    (64, 64, 4, 3, 1, 0),
    (32, 64, 4, 2, 0, 0),
    (32, 64, 4, 3, 1, 0),
    (32, 64, 4, 4, 1, 0),
    (64, 64, 8, 3, 1, 0),
)
SHORT = _tiles(
    (32, 64, 4, 3, 1, 0), (64, 64, 4, 3, 1, 0), (32, 64, 4, 4, 1, 0), (32, 128, 8, 3, 1, 0), (32, 32, 4, 3, 1, 0)
)
CANDIDATES = {"forward": FORWARD, "dq": DQ, "dkv": DKV, "short": SHORT}
# heads of 64: twice the work per score for the activation, half the registers and shared memory
CANDIDATES_64 = {
    "forward": _tiles(
        (64, 64, 4, 3, 1, 0),
        (64, 128, 4, 3, 1, 0),
        (128, 64, 4, 3, 1, 0),
        (128, 64, 8, 3, 1, 0),
        (128, 128, 8, 3, 1, 0),
        (64, 64, 4, 3, 1, 128),
        (64, 64, 4, 3, 0, 0),
    ),
    "dq": _tiles((64, 64, 4, 3, 1, 0), (64, 128, 4, 3, 1, 0), (128, 64, 8, 3, 1, 0), (64, 64, 4, 3, 1, 168)),
    "dkv": _tiles(
        (64, 64, 4, 3, 1, 0), (64, 64, 4, 2, 0, 0), (64, 128, 8, 3, 1, 0), (64, 128, 4, 3, 1, 0), (64, 64, 4, 3, 1, 168)
    ),
}


def problem(shape: Shape, device: str, *, small: bool = False) -> triton_launch.Problem:
    """The shape's problem with random data; small: a 16-sample stand-in that compiles the same kernels."""
    q_lengths = (64,) * 16 if small else shape.q_lengths
    k_lengths = (64,) * 16 if small else shape.k_lengths

    def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(device)

    def rows(count: int) -> torch.Tensor:
        return torch.randn(count, shape.heads, shape.dim, device=device, dtype=torch.bfloat16) * 0.5

    q_offsets = offsets(q_lengths)
    targets = torch.tensor(([1] * 16) if small else shape.num_targets(), device=device)
    return triton_launch.Problem(
        q=rows(sum(q_lengths)),
        k=rows(sum(k_lengths)),
        v=rows(sum(k_lengths)),
        spec=shape.spec(),
        batch_size=len(q_lengths),
        k_offsets=q_offsets if shape.is_self else offsets(k_lengths),
        q_offsets=q_offsets,
        num_targets=targets if shape.targets else None,
    )


def step(p: triton_launch.Problem, kernel: str, tiles: Tiles, do: torch.Tensor):
    """A function that runs one kernel (with the listing of its tiles)."""
    if kernel == "forward":
        return lambda: triton_launch.forward(p, tiles)
    grads = triton_launch.empty_gradients(p)
    lse = torch.empty(0, dtype=torch.float32, device=p.q.device)
    if kernel == "dq":
        return lambda: triton_launch.run_dq(p, do, None, lse, lse, grads=grads, tiles=tiles)
    if kernel == "dkv":
        return lambda: triton_launch.run_dkv(p, do, lse, lse, grads, tiles)
    return lambda: triton_launch.short_query_backward(p, do, grads, tiles.block_m, tiles)


def candidates(shape: Shape) -> dict[str, list[Tiles]]:
    return CANDIDATES_64 if shape.dim == 64 else CANDIDATES


def compile_one(job: tuple[str, str, Tiles, int]) -> str:
    """Fill the kernel cache for one job, without a GPU; returns a report or an error in a line."""
    name, kernel, tiles, capability = job
    torch.set_num_threads(1)
    from gem_attention.triton_crosscompile import CrossCompiler, report_of

    try:
        p = problem(shapes()[name], "cpu", small=True)
        with CrossCompiler(capability) as compiler:
            step(p, kernel, tiles, torch.randn_like(p.q))()
        try:
            r = report_of(compiler.kernels[-1], capability)
        except FileNotFoundError:
            return "compiled"
        return f"regs {r.registers} spills {r.spill_instructions} shared {r.shared_bytes}"
    except Exception as error:
        return f"FAILED {type(error).__name__}: {str(error)[:200]}"


def precompile(jobs: list[tuple[str, str, Tiles, int]]) -> list[str]:
    with multiprocessing.get_context("spawn").Pool(min(os.cpu_count() or 1, len(jobs))) as pool:
        return pool.map(compile_one, jobs, chunksize=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["B1", "B1s", "B1w", "B2jag", "B3a", "B3b"])
    parser.add_argument("--kernels", nargs="*", default=["forward", "dq", "dkv", "short"])
    parser.add_argument("--out")
    args = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    jobs = [
        (name, kernel, tiles, 10 * major + minor)
        for name in args.shapes
        for kernel in args.kernels
        if (kernel == "short") <= (max(shapes()[name].q_lengths) <= max(triton_launch.SHORT_QUERY_ROWS))
        for tiles in candidates(shapes()[name])[kernel]
    ]
    start = time.perf_counter()
    notes = precompile(jobs)
    print(f"compiled {len(jobs)} candidates in {time.perf_counter() - start:.0f} s", flush=True)
    before = describe_working_device(0)
    ceilings = {"bf16_matmul_flop_per_s": matmul_tflops() * 1e12, "copy_bytes_per_s": copy_tb_s() * 1e12}
    without = {"energy": "candidates are compared by time alone"}
    rows = []
    for name in args.shapes:
        p = problem(shapes()[name], "cuda")
        do = torch.randn_like(p.q)
        flops = dict(zip(("forward", "backward"), shapes()[name].flops(), strict=True))
        print(f"{name}: matmul {matmul_tflops():.0f} TFLOP/s", flush=True)
        for (job_name, kernel, tiles, _), note in zip(jobs, notes, strict=True):
            if job_name != name:
                continue
            row = {"shape": name, "kernel": kernel, "tiles": repr(tiles), "note": note}
            try:
                row["ms"] = median_ms(step(p, kernel, tiles, do), runs=20, warmup=3, flush=name == "B3b")
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                traceback.print_exc(limit=-2)
            rows.append(row)
            work = flops["forward"] if kernel == "forward" else flops["backward"]
            short = repr(tiles).replace("Tiles(", "").replace("block_", "").rstrip(")")
            ms = row.get("ms")
            print(
                f"  {kernel:8s} {short:70s} {f'{ms:.3f} ms {work / ms / 1e9:.0f} TFLOP/s' if ms else row.get('error')}"
                f"   {note}",
                flush=True,
            )
            if args.out:
                write_record(Path(args.out), {"rows": rows}, ceilings=ceilings, before=before, without=without)
        del p, do
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
