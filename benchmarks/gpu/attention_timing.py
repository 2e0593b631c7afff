"""Timing on a GPU: CUDA events, the device spinning before each step so that Python is not in the time, medians."""

from __future__ import annotations

from collections.abc import Callable

import torch

LEAD_CYCLES = 2_000_000  # about 1 ms
_FLUSH_BYTES = 256 * 2**20
_buffers: dict[str, torch.Tensor] = {}


def flush_cache() -> None:
    """Overwrite 256 MB, five times the L2 cache."""
    if "flush" not in _buffers:
        _buffers["flush"] = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    _buffers["flush"].fill_(1)


def median_ms(fn: Callable[[], object], *, runs: int = 30, warmup: int = 5, flush: bool = False) -> float:
    """Median milliseconds of fn on the device."""
    for _ in range(warmup):
        one_ms(fn, flush=flush)
    pending = [_record(fn, flush) for _ in range(runs)]
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in pending)
    return times[len(times) // 2]


def one_ms(fn: Callable[[], object], *, flush: bool = False) -> float:
    """Milliseconds of one call (waits for it)."""
    start, end = _record(fn, flush)
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _record(fn: Callable[[], object], flush: bool) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    if flush:
        flush_cache()
    torch.cuda._sleep(LEAD_CYCLES)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    fn()
    end.record()
    return start, end


def matmul_tflops(runs: int = 20) -> float:
    """bf16 8192^3 on random data: the compute ceiling, as the card is now."""
    if "a" not in _buffers:
        _buffers["a"] = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        _buffers["b"] = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    a, b = _buffers["a"], _buffers["b"]
    return 2 * 8192**3 / median_ms(lambda: a @ b, runs=runs) / 1e9


def copy_tb_s(runs: int = 20) -> float:
    """Device copy of 2 GiB, read plus write: the memory ceiling."""
    source = torch.randint(-128, 127, (2**31,), device="cuda", dtype=torch.int8)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source), runs=runs) / 1e9
