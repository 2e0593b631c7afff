"""Collectives between the GPUs of one host, alone and under a matrix product. Needs at least two GPUs.

    OUT=results torchrun --nproc-per-node=2 benchmarks/gpu/comm.py [--sizes-mib 1 4 16 64 256]

1. all_gather, reduce_scatter, all_reduce and all_to_all of 1 to 256 MiB a rank (bf16), by NCCL, and the all_gather by
   peer copies (gem_comm.peer_copy) and by torch's low-contention operator. Every result is checked before it is timed.
2. A 64 MiB all_gather under an 8192^3 bf16 product: the product alone, the collective alone, both together; how much
   the product is slowed. NCCL as it is, with max_ctas 1, 4 and 8, low-contention, and ours.
3. A line through the NCCL all-gathers: what a topology file's [[tier]] takes.

NVLink multicast stays off (NCCL_NVLS_ENABLE=0 and TORCH_SYMM_MEM_DISABLE_MULTICAST=1 are set unless they are already),
so NCCL's zero-CTA policy is not among the candidates. Rank 0 writes comm.json into $OUT with the device's state.
A candidate that cannot run is listed with its reason. Times are medians, of the slowest rank; energy is that of rank
0's card.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages" / "comm"))

from bench_ceilings import measure_ceilings
from device import describe_working_device, joules_per_call
from gem_comm.interface import Call, Collectives
from gem_comm.peer_copy import PeerCopyCollectives
from gem_comm.probing import fit_line
from gem_comm.torch_collectives import TorchCollectives
from record import write_record

MIB = 1 << 20
SIDE = 8192
OVERLAP_MIB = 64
Run = Callable[[], Any]


def slowest(value: float) -> float:
    """The largest value of all ranks."""
    x = torch.tensor([value], device="cuda", dtype=torch.float64)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return float(x)


def milliseconds(run: Run, *, repeat: int, warm: int = 5) -> float:
    """Median time of `run` on the current stream, ranks started together."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        dist.barrier()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return slowest(statistics.median(times))


def joules(run: Run, ms: float) -> dict[str, Any]:
    """Energy of one call on rank 0's card, over about a second: as many calls on every rank."""
    calls, index = max(10, math.ceil(1000 / ms)), torch.cuda.current_device()
    dist.barrier()
    found, why_not = joules_per_call(run, wait=torch.cuda.synchronize, calls=calls, index=index)
    return {"joules": found} if why_not is None else {"joules": None, "energy_unavailable": why_not}


def candidates(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """All-gather candidates: name -> collectives or callable x -> whole; or why it is not there."""
    found: dict[str, Any] = {"nccl": TorchCollectives(group, axis="world")}
    for ctas in (1, 4, 8):
        try:
            options = dist.ProcessGroupNCCL.Options()
            options.config.max_ctas = ctas
            limited = dist.new_group(list(range(dist.get_world_size())), backend="nccl", pg_options=options)
            found[f"nccl max_ctas {ctas}"] = TorchCollectives(limited, axis="world")
        except (AttributeError, RuntimeError, TypeError) as problem:
            found[f"nccl max_ctas {ctas}"] = f"not available: {problem}"
    try:
        found["peer_copy"] = PeerCopyCollectives(found["nccl"], group=group, device=device, reserve_bytes=256 * MIB)
    except ValueError as problem:
        found["peer_copy"] = str(problem)
    if hasattr(torch.ops.symm_mem, "_low_contention_all_gather"):
        found["low_contention"] = lambda x: torch.ops.symm_mem._low_contention_all_gather(x, group.group_name)
    return found


def gather_of(candidate: Any, x: torch.Tensor, out: torch.Tensor) -> Run:
    if isinstance(candidate, Collectives):
        return lambda: candidate.start(Call(kind="all_gather", x=x, out=out)).wait()
    return lambda: torch.ops._c10d_functional.wait_tensor(candidate(x))


def check_gather(name: str, run: Run, x: torch.Tensor) -> None:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    if not torch.equal(run(), torch.cat(parts)):
        raise ValueError(f"{name}: the gathered tensor is wrong")


def sizes_table(found: dict[str, Any], sizes: list[int], repeat: int) -> list[dict[str, Any]]:
    """Every collective of every size."""
    rows, world = [], dist.get_world_size()
    nccl = found["nccl"]
    for mib in sizes:
        x = torch.randn(mib * MIB // 2, device="cuda").to(torch.bfloat16)
        out = x.new_empty(x.numel() * world)
        for name in ("nccl", "peer_copy", "low_contention"):
            candidate = found.get(name, "absent")
            if isinstance(candidate, str):
                rows.append({"what": "all_gather", "by": name, "mib": mib, "reason": candidate})
                continue
            run = gather_of(candidate, x, out)
            check_gather(name, run, x)
            ms = milliseconds(run, repeat=repeat)
            rows.append({"what": "all_gather", "by": name, "mib": mib, "ms": ms, **joules(run, ms)})
        whole = x.new_ones(x.numel() * world)
        part = nccl.reduce_scatter(whole)
        if not torch.equal(part, torch.full_like(part, world)):
            raise ValueError("reduce_scatter is wrong")
        each = [x.numel() // world] * world
        runs = {
            "reduce_scatter": lambda whole=whole: nccl.reduce_scatter(whole),
            "all_reduce": lambda x=x: nccl.all_reduce(x),
            "all_to_all": lambda x=x, each=each: nccl.all_to_all(x, send_rows=each, receive_rows=each),
        }
        for what, run in runs.items():
            ms = milliseconds(run, repeat=repeat)
            rows.append({"what": what, "by": "nccl", "mib": mib, "ms": ms, **joules(run, ms)})
    return rows


def overlap_table(found: dict[str, Any], repeat: int) -> list[dict[str, Any]]:
    """A 64 MiB all-gather on a stream of its own beside one product."""
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    x = torch.randn(OVERLAP_MIB * MIB // 2, device="cuda").to(torch.bfloat16)
    out = x.new_empty(x.numel() * dist.get_world_size())
    side = torch.cuda.Stream()

    def product() -> None:
        torch.matmul(a, b, out=c)

    rows = []
    for name, candidate in found.items():
        if isinstance(candidate, str):
            rows.append({"by": name, "reason": candidate})
            continue
        run = gather_of(candidate, x, out)
        check_gather(name, run, x)

        def both(run: Run = run) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            product()
            torch.cuda.current_stream().wait_stream(side)

        alone = milliseconds(product, repeat=repeat)
        rows.append(
            {
                "by": name,
                "product_ms": alone,
                "gather_ms": milliseconds(run, repeat=repeat),
                "together_ms": (together := milliseconds(both, repeat=repeat)),
                "longer_than_product": together / alone - 1,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--repeat", type=int, default=20)
    given = parser.parse_args()
    # read by NCCL and by torch's symmetric memory when they start, which is below
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=120))
    group = dist.group.WORLD
    assert group is not None
    if dist.get_world_size() < 2:
        print("comm.py compares GPUs with each other: start it with torchrun on at least two", file=sys.stderr)
        return 1
    before = describe_working_device(local)
    ceilings, _ = measure_ceilings()
    torch.cuda.empty_cache()
    found = candidates(group, device)
    sizes = sizes_table(found, given.sizes_mib, given.repeat)
    overlap = overlap_table(found, given.repeat)
    gathers = [row for row in sizes if row["what"] == "all_gather" and row["by"] == "nccl"]
    steps = dist.get_world_size() - 1
    latency, bandwidth = fit_line([steps * row["mib"] * MIB for row in gathers], [row["ms"] / 1e3 for row in gathers])
    if dist.get_rank() == 0:
        record = {
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "world_size": dist.get_world_size(),
            "sizes": sizes,
            "overlap": overlap,
            "line": {"latency_s": latency / steps, "bandwidth_bytes_per_s": bandwidth},
        }
        write_record(Path(os.environ.get("OUT", ".")) / "comm.json", record, ceilings=ceilings, before=before)
        for row in (*sizes, *overlap, record["line"]):
            print({k: round(v, 4) if isinstance(v, float) and v < 1e3 else v for k, v in row.items()}, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
