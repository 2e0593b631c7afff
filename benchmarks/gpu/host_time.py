"""Host microseconds of one matrix product on a GPU, at the mid-size recipe's shapes, under settings that may matter.

    OUT=results python benchmarks/gpu/host_time.py          about half a minute on one GPU, no network

Every setting runs in a process of its own, since the libraries read some of them once. A shape is either the same at
every call ("same"), one of four in turn as batches of a job are ("four"), or never seen before ("new"): what differs
between these is a heuristic that the library runs for a shape that it does not remember. A call is timed on the host
with a nearly empty queue. Writes $OUT/host_time.json and prints a line a setting; nothing is judged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_ceilings import measure_ceilings
from device import describe_working_device
from record import write_record

# name -> (environment, what `worker` switches)
SETTINGS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "tf32": ({}, {}),
    "tf32, deterministic": ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, {"deterministic": True}),
    "tf32, workspace set": ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, {}),
    "tf32, heuristics kept": ({"CUBLASLT_HEURISTICS_CACHE_CAPACITY": "8192"}, {}),
    "tf32, heuristics not kept": ({"CUBLASLT_HEURISTICS_CACHE_CAPACITY": "0"}, {}),
    "tf32, cublasLt": ({}, {"library": "cublaslt"}),
    "float32": ({}, {"precision": "highest"}),
    "bfloat16": ({}, {"dtype": "bfloat16"}),
    "bfloat16, heuristics kept": ({"CUBLASLT_HEURISTICS_CACHE_CAPACITY": "8192"}, {"dtype": "bfloat16"}),
    "bfloat16, cublasLt": ({}, {"dtype": "bfloat16", "library": "cublaslt"}),
}
# (rows, in, out): projection of a stream, its output, event fields, the MLP of an interaction, a token map's like
SHAPES = ((133_000, 128, 512), (133_000, 128, 128), (131_000, 128, 128), (2048, 5888, 1024), (2048, 1024, 4096))
CALLS = 40


def worker(switches: dict[str, Any]) -> dict[str, Any]:
    """Microseconds a call: {shapes: {forward, backward}}, the best of three medians, and of a small addition."""
    torch.set_float32_matmul_precision(switches.get("precision", "high"))
    if switches.get("deterministic"):
        torch.use_deterministic_algorithms(True)
    if "library" in switches:
        torch.backends.cuda.preferred_blas_library(switches["library"])
    dtype = getattr(torch, switches.get("dtype", "float32"))
    found: dict[str, Any] = {}
    for rows, width, out in SHAPES:
        x = torch.randn(rows + 3 * CALLS, width, device="cuda", dtype=dtype)
        w = torch.randn(out, width, device="cuda", dtype=dtype)
        seen = 0
        for kind in ("same", "four", "new"):
            times = []
            for number in range(3 * CALLS):
                seen += kind == "new"
                count = rows + {"same": 0, "four": number % 4, "new": 4 + seen}[kind]
                part = x[:count]
                torch.cuda.synchronize()
                begin = time.perf_counter()
                F.linear(part, w)
                times.append(time.perf_counter() - begin)
            found[f"{rows} x {width} x {out}, {kind}"] = 1e6 * sorted(times[CALLS:])[CALLS]
    x = torch.randn(1000, device="cuda")
    times = []
    for _ in range(3 * CALLS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        x + 1
        times.append(time.perf_counter() - begin)
    found["an addition"] = 1e6 * sorted(times)[len(times) // 2]
    return {"us": found, "torch": torch.__version__}


def main() -> int:
    if len(sys.argv) > 1:
        print(json.dumps(worker(json.loads(sys.argv[1]))), flush=True)
        return 0
    before = describe_working_device(0)
    ceilings, _ = measure_ceilings()
    torch.cuda.empty_cache()
    # Few at a time: each needs a core of its own, and start-up is most of their time.
    waiting, found = list(SETTINGS.items()), {}
    while waiting:
        batch, waiting = waiting[:5], waiting[5:]
        running = [
            (
                name,
                subprocess.Popen(
                    [sys.executable, __file__, json.dumps(switches)],
                    env=os.environ | environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                ),
            )
            for name, (environment, switches) in batch
        ]
        for name, process in running:
            try:
                said, error = process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                said, error = "", "not within 60 s"
            found[name] = json.loads(said) if process.returncode == 0 else {"error": error[-500:]}
    path = Path(os.environ.get("OUT", ".")) / "host_time.json"
    without = {"energy": "what is timed is the host"}
    write_record(path, {"settings": found}, ceilings=ceilings, before=before, without=without)
    for name, result in found.items():
        if "error" in result:
            print(f"{name}: {result['error'].strip().splitlines()[-1]}")
            continue
        parts = {shape.split(", ")[0]: [] for shape in result["us"]}
        for shape, us in result["us"].items():
            parts[shape.split(", ")[0]].append(f"{us:.0f}")
        print(f"{name:26s} us: " + "; ".join(f"{shape} {'/'.join(values)}" for shape, values in parts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
