"""Parity, scaling and traffic of the parallel axes on the GPUs of one host: one command, no network.

    OUT=results python benchmarks/gpu/parallel.py                    worlds 1, 2 and, with four GPUs, 4
    OUT=results python benchmarks/gpu/parallel.py --worlds 1 2
    python benchmarks/gpu/parallel.py --device cpu --worlds 1 2      the same over gloo, small sizes: a dry run

Needs torch, TorchRec and FBGEMM (a CUDA build; a folder on PYTHONPATH will do) and numpy, but no pyarrow. It starts the
processes of each world size by itself, one world after the other; each may take TIME_LIMIT_S.

1. Parity: 20 steps of the debug model, row-wise AdaGrad and AdamW in float32, under every factorization of the world
   size, against one GPU: parameters, moments and tables within 1e-5, losses within 1e-5 (relative). Learning rates are
   those of recipe ml100k_cpu: at three times as much, rounding grows past 1e-5 within 20 steps of this model.
2. Speed of a mid-size recipe, the same batch a rank at every world size, in variants: "plain"; "overlap" (the next
   step's ids sent beside this one; the default of a job); with it "fused" (model.hstu of the attention's
   implementation), "graphs32" (model.graphs), "bf16" (model.compute, and parallel.reshard off), "graphs" (both of the
   last two), "compiled" ("bf16" and model.compile). The same four batches in turn: their shapes are known to cuBLAS.
   Step time (median, slowest rank, and the
   mean), in ms like all times; scaling (step of one GPU over step of n in the same variant: 1 is ideal); of rank 0: GPU
   busy, exposed communication (NCCL kernels beside which no other kernel runs), host (a step less its wait for the
   outcome), launches and waits a step, MB sent.
3. Prediction: the planner's step for the measured network and device; the share of the peak and the host's time are
   those of one GPU in the same variant.

Products of the speed part run in TF32 (--matmul highest: float32). Writes $OUT/parallel.json and prints a table.
Ends with 1 when a process failed or a factorization is not within 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WORKER = Path(__file__).with_name("parallel_worker.py")
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (*ROOT.glob("packages/*/"), ROOT / "pipelines", ROOT / "benchmarks")
TIME_LIMIT_S = 280
VARIANTS = ("plain", "overlap", "fused", "graphs32", "bf16", "graphs", "compiled")


def launch(world: int, work: Path, arguments: list[str], *, limit_s: float, worker: Path = WORKER) -> None:
    """Run all ranks of one world; RuntimeError with what they said when one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([*map(str, PACKAGES), os.environ.get("PYTHONPATH", "")])
    logs = [work / f"world-{world}-rank-{rank}.log" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        settings = os.environ | {
            "PYTHONPATH": paths,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
        }
        command = [sys.executable, str(worker), str(work), *arguments]
        with log.open("w") as out:
            ranks.append(subprocess.Popen(command, env=settings, stdout=out, stderr=subprocess.STDOUT))
    codes: list[int | None] = []
    try:
        codes += [process.wait(timeout=limit_s) for process in ranks]
    except subprocess.TimeoutExpired:
        codes.append(None)
    finally:
        for process in ranks:
            process.kill()
    if codes != [0] * world:
        said = "\n".join(f"---- rank {rank}\n{log.read_text()[-4000:]}" for rank, log in enumerate(logs))
        raise RuntimeError(f"world {world}: the ranks ended with {codes} (None: not within {limit_s} s)\n{said}")


def rows_of(found: dict[int, dict[str, Any]]) -> list[list[str]]:
    """The tables: parity, a line a factorization; then speed, a line a factorization and variant."""
    lines = [["world", "factorization", "largest difference"]]
    for world, record in found.items():
        lines += [[str(world), row["name"], f"{max(row['worst'], row['loss']):.1e}"] for row in record["parity"]]
    return lines if len(lines) > 1 else []


def speed_rows(found: dict[int, dict[str, Any]]) -> list[list[str]]:
    head = ["world", "factorization", "variant", "step", "mean", "scaling", "busy", "exposed"]
    head += ["host", "wait", "launches", "waits", "predicted", "MB"]
    lines = [head]
    alone = {row["variant"]: row["step_s"] for row in found[1]["speed"]["rows"] if "step_s" in row}
    for world, record in found.items():
        for row in record["speed"]["rows"]:
            if "reason" in row:
                lines.append([str(world), row["name"], row["variant"], row["reason"], *[""] * (len(head) - 4)])
                continue

            def ms(seconds: float | None) -> str:
                return "" if seconds is None else f"{seconds * 1e3:.1f}"

            scaling = alone[row["variant"]] / row["step_s"] if row["variant"] in alone else None
            lines.append(
                [
                    str(world),
                    row["name"],
                    row["variant"],
                    ms(row["step_s"]),
                    ms(row["mean_step_s"]),
                    "" if scaling is None else f"{scaling:.3f}",
                    ms(row.get("busy_s")),
                    ms(row.get("exposed_communication_s")),
                    ms(row["host_s"]),
                    ms(row["host_phases_s"].get("wait")),
                    f"{row['launches']:.0f}" if "launches" in row else "",
                    f"{row['waits']:.1f}" if "waits" in row else "",
                    ms(row.get("predicted_s")),
                    f"{sum(row['bytes_by_group'].values()) / 1e6:.0f}",
                ]
            )
    return lines


def markdown(found: dict[int, dict[str, Any]]) -> list[str]:
    """The speed table as docs/results.md has it."""
    lines = [
        "| GPUs | factorization | variant | step, ms | one GPU's step / this | GPU busy, ms | exposed communication, "
        "ms | launches | predicted step, ms | MB that rank 0 sends |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    head, *rows = speed_rows(found)
    for row in rows:
        cell = dict(zip(head, row, strict=True))
        if cell["mean"]:
            names = ("world", "factorization", "variant", "step", "scaling", "busy", "exposed", "launches", "predicted")
            lines.append("| " + " | ".join([*(cell[name] for name in names), cell["MB"]]) + " |")
    return lines


def print_host(found: dict[int, dict[str, Any]]) -> None:
    """Where the host's time goes, and what the GPU waits for, of the first row of each world."""
    for world, record in found.items():
        row = next((row for row in record["speed"]["rows"] if "host_phases_s" in row), None)
        if row is None:
            continue
        phases = ", ".join(f"{phase} {seconds * 1e3:.1f}" for phase, seconds in row["host_phases_s"].items())
        print(f"world {world}, {row['name']}, {row['variant']}: host ms a step: {phases}")
        for line, count in list(row.get("waits_by_line", {}).items())[:16]:
            print(f"  waits {count} times in two steps at {line}")
        for gap, before, after in row.get("gaps", [])[:6]:
            print(f"  idle {gap:.2f} ms after {before[:44]} before {after[:44]}")
        for took, count, name in row.get("kernels_ms", [])[:8]:
            print(f"  {took:.2f} ms in {count:.0f} of {name}")


def print_table(lines: list[list[str]]) -> None:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def default_worlds(device: str) -> list[int]:
    if device == "cpu":
        return [1, 2]
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        sys.exit(f"parallel.py compares GPUs with each other: torch sees {count}; --device cpu is a dry run")
    return [world for world in (1, 2, 4) if world <= count]


def write(path: Path, record: dict[str, Any]) -> None:
    """The record with rank 0's device of the last world, and what a GPU reached before one process was measured."""
    from device import DeviceRecord
    from record import write_record

    worlds = record["worlds"]
    last = worlds[max(worlds)] if worlds else {}
    none = {"name": "none", "unavailable": {"name": "no world ended"}}
    before, after = (DeviceRecord(**last.get(key, none)) for key in ("device_before", "device"))
    topology = worlds[1]["speed"].get("topology") if worlds else None
    ceilings, without = {}, {}
    if topology and before.name == "none":
        without = {"ceilings": "a dry run on the CPU"}
    elif topology:
        ceilings = {
            "bf16_matmul_flop_per_s": topology["flops_per_s"],
            "copy_bytes_per_s": topology["memory_bytes_per_s"],
        }
    else:
        without = dict.fromkeys(("energy", "ceilings"), "results are compared, nothing is timed")
    write_record(path, record, ceilings=ceilings, before=before, after=after, without=without)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--worlds", type=int, nargs="+", choices=(1, 2, 4))
    parser.add_argument("--size", choices=("mid", "small"), help="default: mid on CUDA, small on the CPU")
    parser.add_argument("--attention", choices=("eager", "triton"), help="default: triton on CUDA, eager on the CPU")
    parser.add_argument("--matmul", choices=("high", "highest"), default="high")
    parser.add_argument("--only", choices=("all", "parity", "speed"), default="all")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="in the order in which they are run")
    parser.add_argument("--seconds", type=float, default=215.0, help="of a world, after which no more runs are begun")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print the speed of that parallel.json, and end")
    given = parser.parse_args()
    if given.markdown:
        worlds = json.loads(given.markdown.read_text())["worlds"]
        print("\n".join(markdown({int(world): record for world, record in worlds.items()})))
        return 0
    worlds = given.worlds or default_worlds(given.device)
    size = given.size or ("mid" if given.device == "cuda" else "small")
    if worlds[0] != 1:
        parser.error("--worlds must begin with 1: it is what the others are compared with")
    found: dict[int, dict[str, Any]] = {}
    failures = []
    attention = given.attention or ("triton" if given.device == "cuda" else "eager")
    variants = given.variants or ["overlap", "bf16", *(["graphs", "graphs32"] if given.device == "cuda" else [])]
    settings = {key: value for key, value in vars(given).items() if key != "markdown"} | {
        "size": size,
        "attention": attention,
        "variants": variants,
    }
    arguments = [json.dumps(settings)]
    with tempfile.TemporaryDirectory() as work:
        for world in worlds:
            try:
                launch(world, Path(work), arguments, limit_s=TIME_LIMIT_S)
                found[world] = json.loads((Path(work) / f"world-{world}.json").read_text())
            except RuntimeError as problem:
                print(problem, file=sys.stderr, flush=True)
                failures.append(str(problem)[-2000:])
                if world == 1:
                    break
    record = {"arguments": settings, "size": size, "attention": attention, "worlds": found, "failures": failures}
    write(Path(os.environ.get("OUT", ".")) / "parallel.json", record)
    for lines in (rows_of(found), speed_rows(found) if found else []):
        if lines:
            print_table(lines)
    print_host(found)
    apart = [row["name"] for record in found.values() for row in record["parity"] if not row["within_1e-5"]]
    if apart:
        print(f"not within 1e-5 of one process: {', '.join(apart)}", file=sys.stderr)
    failed = [row for record in found.values() for row in record["speed"]["rows"] if row.get("failed")]
    return 1 if failures or apart or failed else 0


if __name__ == "__main__":
    sys.exit(main())
