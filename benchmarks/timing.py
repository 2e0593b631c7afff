"""Timers. The first mistake with a GPU is to stop the clock when the launch returns; these wait for the device.

cpu_seconds(function, repeat=5)              CPU time of this process, so that waiting and other programs do not count
device_milliseconds(function, repeat=50)     CUDA events around each call, then one synchronisation
"""

from __future__ import annotations

import resource
from collections.abc import Callable


def cpu_clock() -> float:
    """User and system time of this process (all threads) and of its finished children, seconds."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def cpu_seconds(function: Callable[[], object], *, repeat: int) -> list[float]:
    """CPU seconds of each of `repeat` calls, after one unmeasured."""
    function()
    samples = []
    for _ in range(repeat):
        start = cpu_clock()
        function()
        samples.append(cpu_clock() - start)
    return samples


def device_milliseconds(
    function: Callable[[], object], *, repeat: int, warm_up: int = 10, lead_cycles: int = 0, flush_bytes: int = 0
) -> list[float]:
    """Milliseconds the current CUDA stream spends on each of `repeat` calls.

    lead_cycles  the device spins that long before each call, so that the launches of a short call are queued when it
                 starts and are not measured (about 2 million cycles a millisecond)
    flush_bytes  size of a buffer to write before each call, so that no call finds its inputs in the L2 cache
    """
    import torch

    if not torch.cuda.is_available():
        raise ValueError("device_milliseconds needs a CUDA device; for the CPU take cpu_seconds")
    for _ in range(warm_up):
        function()
    buffer = torch.empty(flush_bytes, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    torch.cuda.synchronize()
    for start, end in events:
        if flush_bytes:
            buffer.zero_()
        if lead_cycles:
            torch.cuda._sleep(lead_cycles)
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]
