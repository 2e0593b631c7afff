"""What a step costs host and GPU, for parallel_rank.py: launches, waits, busy and idle time, communication beside work.

`watched` times the host's parts of a step by the clock; `profiled` reads torch's profiler, rank by rank.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gem_pipelines.trainer as trainer_module
import torch
from gem_pipelines.late import LateRead
from gem_pipelines.trainer import Trainer

Spans = list[tuple[float, float]]

# Calls of the CUDA runtime that put work on a queue, and those that wait for it.
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
PHASES = ("_begin", "_forward", "_backward", "_add_up", "_update", "_account")


@contextmanager
def watched(trainer: Trainer) -> Iterator[dict[str, float]]:
    """Phase of a step -> host seconds while inside. "wait": for the outcome of a step, which is part of "_update"."""
    spent: dict[str, float] = {}
    undo: list[tuple[Any, str, Any, bool]] = []

    def watch(owner: Any, name: str, label: str) -> None:
        inner, own = getattr(owner, name), name in vars(owner)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[label] = spent.get(label, 0.0) + time.perf_counter() - begin

        undo.append((owner, name, inner, own))
        setattr(owner, name, call)

    for name in PHASES:
        watch(trainer, name, name.strip("_"))
    watch(trainer.optimizer, "clip", "clip")
    watch(trainer_module, "try_ready", "next")
    watch(trainer_module, "look_up", "look_up")
    watch(trainer_module, "own_load", "imbalance")
    watch(LateRead, "read", "wait")
    try:
        yield spent
    finally:
        for owner, name, inner, own in reversed(undo):
            if own:
                setattr(owner, name, inner)
            else:
                delattr(owner, name)


def waits_by_line(run: Callable[[int], None]) -> dict[str, int]:
    """Line of Python -> how often the host waited for the device there in two steps, most first: torch's own detector.
    It misses waits on events and those of libraries beside torch.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = Counter(
        f"{'/'.join(Path(one.filename).parts[-2:])}:{one.lineno}" for one in said if "synchroniz" in str(one.message)
    )
    return dict(lines.most_common())


def profiled(run: Callable[[int], None], steps: int = 3) -> dict[str, Any]:
    """Figures a step of this rank: seconds of its GPU in NCCL kernels and copies between GPUs, the part of them beside
    no other kernel, in other kernels, and in any; launches; waits of the host; the longest gaps of the GPU.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run(steps)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        found.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return figures(events, steps)


def figures(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """`profiled` of the events of a Chrome trace, times in microseconds."""
    moving: Spans = []
    computing: Spans = []
    named = []
    launches = waits = 0
    for event in events:
        kind, name = event.get("cat"), event.get("name", "")
        if kind in ("cuda_runtime", "cuda_driver"):
            launches += name.startswith(LAUNCHES)
            waits += name.startswith(WAITS)
        if kind not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        lower = name.lower()
        communicates = "nccl" in lower or "peer to peer" in lower or "ptop" in lower
        (moving if communicates else computing).append(span)
        named.append((*span, name[:60]))
    busy = union([*moving, *computing])
    return {
        "communication_s": length(union(moving)) / 1e6 / steps,
        "exposed_communication_s": uncovered(union(moving), union(computing)) / 1e6 / steps,
        "computing_s": length(union(computing)) / 1e6 / steps,
        "busy_s": length(busy) / 1e6 / steps,
        "launches": launches / steps,
        "kernels": len(named) / steps,
        "waits": (waits - 1) / steps,  # one is the profiler's own
        "gaps": longest_gaps(sorted(named))[: 4 * steps],
        "kernels_ms": longest_kernels(named, steps),
    }


def longest_gaps(named: list[tuple[float, float, str]]) -> list[tuple[float, str, str]]:
    """(ms, kernel before, kernel after) of the times in which nothing runs, longest first; `named` by start."""
    found, end, before = [], named[0][1] if named else 0.0, ""
    for start, stop, name in named:
        if start > end:
            found.append(((start - end) / 1e3, before, name))
        if stop >= end:
            end, before = stop, name
    return sorted(found, reverse=True)


def longest_kernels(named: list[tuple[float, float, str]], steps: int) -> list[tuple[float, float, str]]:
    """(ms a step, launches a step, name) of the kernels that take longest together."""
    total: dict[str, list[float]] = {}
    for start, stop, name in named:
        entry = total.setdefault(name, [0.0, 0.0])
        entry[0] += (stop - start) / 1e3 / steps
        entry[1] += 1 / steps
    return sorted(((ms, count, name) for name, (ms, count) in total.items()), reverse=True)[:15]


def union(spans: Spans) -> Spans:
    """Disjoint and ascending. Example: (0, 2), (1, 3), (5, 6) -> (0, 3), (5, 6)."""
    found: Spans = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def length(spans: Spans) -> float:
    return sum(stop - start for start, stop in spans)


def uncovered(spans: Spans, by: Spans) -> float:
    """Length of `spans` outside of `by`, both disjoint and ascending. Example: (0, 10) by (2, 3), (8, 12): 7."""
    together = length(union([*spans, *by]))
    return together - length(by)
