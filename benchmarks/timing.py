"""Timers. The first mistake with a GPU is to stop the clock when the launch returns; these wait for the device.

cpu_seconds(function, repeat=5)              CPU time of this process, so that waiting and other programs do not count
device_milliseconds(function, repeat=50)     CUDA events around each call, then one synchronisation
"""

from __future__ import annotations

import ctypes
import resource
import sys
import time
from collections.abc import Callable


def keep_memory() -> None:
    """Let this process (and those it forks) keep what it frees, instead of giving it back to the system each time.

    glibc hands large blocks to the system and gets them back as fresh pages, or does not, by rules that look at the
    history of the process: one and the same call of a codec took between 1 and 3 times the base's in different
    processes, since its pages were cleared anew or not. No effect with another C library.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, 1 << 25)  # the most that it takes
        mallopt(trim_threshold, (1 << 31) - 1)


def cpu_clock() -> float:
    """User and system time of this process (all threads) and of its finished children, seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class YardstickClock:
    """CPU seconds, corrected for how fast the machine is at the moment; a timer for timeit, asv and pytest-benchmark.

    On a shared machine the same instructions cost up to twice the CPU time from one minute to the next (a neighbour on
    the other hyper-thread, a lower clock), base and head alike only on average. So at every reading a fixed piece of
    work, the yardstick, is timed, outside of what is measured, and the time since the reading before counts at the
    speed that its two ends had: a "second" is what takes as long as 2,500 yardsticks (on a quiet core of about 2023 one
    takes 0.4 ms, so that this is about a second). The yardstick mixes small matrix products, a stream through 2 MB and
    dictionary work, since each of them alone follows the cases less well.

    Cost: one yardstick a reading. Not for calls much shorter than that.
    """

    NOMINAL_S = 1 / 2500

    def __init__(self) -> None:
        import torch

        self._square = torch.full((96, 96), 0.01)
        self._stream = torch.ones(1 << 19)
        self._total = 0.0
        self._since: float | None = None
        self._yardstick = self._measure()

    def _measure(self) -> float:
        start = cpu_clock()
        for _ in range(4):
            self._square @ self._square
        self._stream.mul_(1.0)
        table = {}
        for i in range(1500):
            table[i % 50] = i
        return cpu_clock() - start

    def __call__(self) -> float:
        """Corrected seconds since the first reading, without the time of the yardsticks."""
        now = cpu_clock()
        yardstick = self._measure()
        if self._since is not None:
            speed = self.NOMINAL_S / ((self._yardstick + yardstick) / 2)
            self._total += (now - self._since) * speed
        self._yardstick = yardstick
        self._since = cpu_clock()
        return self._total


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
