"""What the machine gives: peak of a large matmul, and memory of this process.

The peak is measured, not looked up: it is the best of a few matmuls in the dtype the dense layers run in, with the
threads this process has. MFU against it says how far the model's useful FLOP/s are from what this process could
reach.
"""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import torch


def matmul_peak_flops_per_s(device: torch.device, *, budget_s: float = 0.5) -> float:
    """Best FLOP/s of square matmuls of one size: float32, 1024 on a CPU; bfloat16, 8192 on CUDA.

    Runs for about `budget_s` seconds, at least three times. Draws no random numbers.
    """
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a_MK = torch.ones(size, size, device=device, dtype=dtype)
    best, spent, runs = float("inf"), 0.0, 0
    while spent < budget_s or runs < 3:
        start = time.perf_counter()
        torch.mm(a_MK, a_MK)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        best, spent, runs = min(best, seconds), spent + seconds, runs + 1
    return 2.0 * size**3 / best


def memory_bytes(device: torch.device) -> int:
    """Peak allocated on a CUDA device since the last reset, or the resident size of this process now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    # No /proc (macOS): the largest size so far; there in bytes, elsewhere in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
