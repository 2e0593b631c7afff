"""Exact counts of memory that tensors do not show: of Python, numpy (tracemalloc knows its arrays) and Arrow.

    heap_bytes         bytes that Python and numpy allocate in blocks of 3 KiB and more: arrays, bytes, long lists
    arrow_bytes        bytes that Arrow allocates: decoded columns, results of its functions, builders
    arrow_peak_bytes   most of them alive at once, beyond what was there before the call

Where: data, datasets, checkpoints, metrics and the ledger move their bytes in numpy and Arrow, where count_tensors sees
nothing. One more copy of what an epoch reads is one more Python call among ten thousand, but a tenth more heap_bytes.

How: neither tracemalloc nor Arrow keeps a sum of what was allocated, only what is alive. So the call is traced opcode
by opcode, and what is alive grows and shrinks from one to the next: by one array in `x + 1`, back by one where the
result is stored in x. What one operation allocates and frees again within itself is not seen. Growth of the heap counts
in whole KiB, and not below three: small objects come with free lists, caches and hashes, which differ from process to
process (so a peak of the heap cannot be exact, and is none of the counters). The call must be deterministic and run in
the calling thread; Arrow's threads may allocate, as long as they are done when its function returns. Cost: 10 to 20
times the call.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# Beside a large block an operation allocates a string by which C looks up an attribute, 53 to 59 bytes, or finds it in
# the cache of attributes, by chance. So borders must lie beside the sizes that are common: the least
# between JSON's 2,983 and arrays' 3,104, and, by OFFSET_BYTES added before cutting to whole units, the others at 424 +
# 1024 k: of the cases' 815 sizes 30 are within 64 bytes (at 724 it was 217, every file opened as text among them).
UNIT_BYTES, LEAST_BYTES, OFFSET_BYTES = 1024, 3072, 600


def count_all(inputs: Any, run: Callable[[Any], Any]) -> dict[str, int]:
    """What tensors show, and what they do not."""
    from cases.counting import count_tensors

    return {**count_tensors(inputs, run), **count_memory(inputs, run)}


def count_memory(inputs: Any, run: Callable[[Any], Any]) -> dict[str, int]:
    """The counts of one call of `run`; those of Arrow are 0 in a process that has not loaded pyarrow."""
    with no_collection():
        tracemalloc.start()
        try:
            for _ in range(2):  # the first call fills caches and free lists
                seen = Allocations()
                with seen:
                    result = run(inputs)
                del result
        finally:
            tracemalloc.stop()
    return seen.totals()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """All garbage collected before, none within: a collection frees, and calls finalizers, at a moment of its own."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Allocations:
    """Adds up what is allocated while it is entered, with tracemalloc running."""

    def __enter__(self) -> Allocations:
        pyarrow = sys.modules.get("pyarrow")
        arrow_bytes: Callable[[], int] = pyarrow.total_allocated_bytes if pyarrow else lambda: 0
        traced_bytes = tracemalloc.get_traced_memory
        heap_now, arrow_now, arrow_start = traced_bytes()[0], arrow_bytes(), arrow_bytes()
        self.heap_units = self.arrow_bytes = self.arrow_peak_bytes = 0

        def on_event(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal heap_now, arrow_now
            before, heap_now = heap_now, traced_bytes()[0]
            if heap_now - before >= LEAST_BYTES:
                self.heap_units += (heap_now - before + OFFSET_BYTES) // UNIT_BYTES
            before, arrow_now = arrow_now, arrow_bytes()
            if arrow_now > before:
                self.arrow_bytes += arrow_now - before
                self.arrow_peak_bytes = max(self.arrow_peak_bytes, arrow_now - arrow_start)
            return on_event

        def on_frame(frame: FrameType, event: str, argument: Any) -> Any:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return on_event(frame, event, argument)

        self._before = sys.gettrace()
        sys.settrace(on_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def totals(self) -> dict[str, int]:
        """The counts so far."""
        return {
            "heap_bytes": self.heap_units * UNIT_BYTES,
            "arrow_bytes": self.arrow_bytes,
            "arrow_peak_bytes": self.arrow_peak_bytes,
        }
