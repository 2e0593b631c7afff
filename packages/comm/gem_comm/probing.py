"""Measuring the running cluster: which ranks share a host, and what bandwidth and latency each tier reaches.

`probe_topology` times all-gathers of a few sizes over groups that lie inside one host and over groups with one rank of
each host, and fits a line to each: seconds = latency * steps + bytes sent / bandwidth. Hosts are found by exchanging
host names; levels between hosts (zones, spines) do not show from a few ranks, so what joins the hosts is one tier,
called "network". Cost: some seconds at start, `sizes_bytes` of memory times the ranks of a group, twice.

A probe is a measurement on an idle network by one job: good for planning this job, no promise under load.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from gem_comm.interface import CommError, Tier, Topology
from gem_comm.meshes import exchange_hosts
from gem_comm.torch_collectives import TorchCollectives

SIZES_BYTES = (64 << 10, 1 << 20, 16 << 20)
CUDA_SIZES_BYTES = (1 << 20, 16 << 20, 256 << 20)
"""Over NVLink the launch takes as long as some megabytes: smaller messages show no bandwidth."""


def fit_line(sent_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(latency_s, bandwidth_bytes_per_s) of seconds = latency + bytes / bandwidth, least squares of relative errors.

    Relative, because a plain fit would let the largest message decide alone. A fit through points that do not rise
    with size raises CommError.
    """
    weights = [1.0 / (s * s) for s in seconds]
    total = sum(weights)
    mean_x = sum(w * b for w, b in zip(weights, sent_bytes, strict=True)) / total
    mean_y = sum(w * s for w, s in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (b - mean_x) ** 2 for w, b in zip(weights, sent_bytes, strict=True))
    both = sum(w * (b - mean_x) * (s - mean_y) for w, b, s in zip(weights, sent_bytes, seconds, strict=True))
    if spread == 0 or both <= 0:
        raise CommError(
            f"times {[f'{s:.3g}' for s in seconds]} s do not rise with {list(sent_bytes)} bytes: probe larger sizes"
        )
    slope = both / spread
    return max(0.0, mean_y - slope * mean_x), 1.0 / slope


def probe_topology(
    *,
    device: torch.device | str,
    sizes_bytes: Sequence[int] | None = None,
    repeats: int = 5,
    host: str | None = None,
    name: str = "probed",
) -> Topology:
    """Topology of the default group's ranks; a collective. `host`: this rank's host name (default: the machine's).

    Every rank returns the same topology: a point is the slowest rank's median of `repeats` runs. Hosts must run equally
    many ranks. Hosts of one rank each, or one host, give a topology of one tier. sizes_bytes: what a rank gives to each
    all-gather; None: SIZES_BYTES, or CUDA_SIZES_BYTES on CUDA.
    """
    device = torch.device(device)
    if sizes_bytes is None:
        sizes_bytes = CUDA_SIZES_BYTES if device.type == "cuda" else SIZES_BYTES
    if not dist.is_initialized():
        raise CommError("no process group yet: call torch.distributed.init_process_group first")
    members: dict[str, list[int]] = {}
    for rank, found in enumerate(exchange_hosts(host or socket.gethostname())):
        members.setdefault(found, []).append(rank)
    if len({len(ranks) for ranks in members.values()}) != 1:
        counts = {found: len(ranks) for found, ranks in members.items()}
        raise CommError(f"hosts run different numbers of ranks: {counts}; start equally many on each, or write a file")
    across = [list(ranks) for ranks in zip(*members.values(), strict=True)]
    tiers = []
    for tier, groups in (("host", list(members.values())), ("network", across)):
        steps = len(groups[0]) - 1
        if steps == 0:
            continue
        points = _measure(groups, sizes_bytes, device, repeats)
        latency, bandwidth = fit_line([steps * size for size in sizes_bytes], points)
        size = len(groups[0]) if tier == "host" and len(members) > 1 else None
        tiers.append(Tier(name=tier, group_size=size, bandwidth_bytes_per_s=bandwidth, latency_s=latency / steps))
    if not tiers:
        raise CommError("one rank alone has no network to probe")
    return Topology(name=name, tiers=tuple(tiers), source=f"probed with all-gathers of {tuple(sizes_bytes)} bytes")


def _measure(
    groups: Sequence[Sequence[int]], sizes_bytes: Sequence[int], device: torch.device, repeats: int
) -> list[float]:
    """Seconds of one all-gather for each size, all groups at work at once."""
    made = [dist.new_group(list(ranks), group_desc="probe") for ranks in groups]
    mine = next(made[number] for number, ranks in enumerate(groups) if dist.get_rank() in ranks)
    comm = TorchCollectives(mine, axis="probe")
    points = []
    for size in sizes_bytes:
        x = torch.zeros(size, dtype=torch.uint8, device=device)
        times = []
        for number in range(repeats + 1):
            dist.barrier()
            start = time.perf_counter()
            comm.all_gather(x)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:  # the first opens connections
                times.append(time.perf_counter() - start)
        slowest = torch.tensor([statistics.median(times)], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        points.append(float(slowest))
    dist.destroy_process_group(mine)
    return points
