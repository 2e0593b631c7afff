"""How uneven a step was: max over mean across ranks of load, seconds, tokens, bytes and rows.

1 is perfect, W is everything on one of W ranks; what is above 1 in "seconds" is time that the other ranks wait.

"load" is predicted by the run's cost model. "seconds" is measured: on a CPU the processor time of the training thread
over the step, which leaves out waiting for other ranks; on CUDA the device time of the dense forward pass, between two
events that are complete by the time they are read, so that nothing waits for them (collectives inside it, as with
expert parallelism, count). "bytes" are those of the batch's tensors.

A step that is left out (train.max_skipped_steps) has no figures, since not every rank has done its work.

Cost: one all-gather of five numbers a step, between hosts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch
from gem_data.api import budget_batches
from gem_data.exchange import take_rows
from gem_data.interface import Batch, CostModel, Schema

from gem_pipelines.cost import batch_loads
from gem_pipelines.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """One rank's share of a step."""

    load: float
    seconds: float
    tokens: int
    bytes: int
    rows: int


def measure_imbalance(mine: StepLoad, runtime: Runtime) -> dict[str, float | None]:
    """Figure -> max over mean across ranks; None where all ranks have 0.

    Two ranks with 300 and 100 tokens: 1.5.
    """
    values = torch.tensor(astuple(mine), dtype=torch.float64)
    every_WK = runtime.gather(values)
    total, top = every_WK.sum(0).tolist(), every_WK.amax(0).tolist()
    names = [field.name for field in fields(StepLoad)]
    return {
        name: most * runtime.world_size / whole if whole > 0 else None
        for name, most, whole in zip(names, top, total, strict=True)
    }


def batch_bytes(batch: Batch) -> int:
    """Bytes of the batch's tensors."""
    tensors = [batch.sample_ids, batch.user_ids, batch.timestamps, batch.labels, batch.weights, batch.dense]
    tensors += [batch.row_index, batch.ids.values(), batch.ids.lengths()]
    if batch.requests is not None:
        tensors.append(batch.requests)
    for stream in batch.streams.values():
        tensors += [stream.offsets, stream.actions, stream.times]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def own_load(batches: Sequence[Batch], *, cost: CostModel, seconds: float) -> StepLoad:
    """This rank's share of a step on `batches`, which are on the CPU."""
    return StepLoad(
        load=sum(float(batch_loads(cost, batch).sum()) for batch in batches),
        seconds=seconds,
        tokens=sum(int(stream.offsets[-1]) for batch in batches for stream in batch.streams.values()),
        bytes=sum(batch_bytes(batch) for batch in batches),
        rows=sum(batch.rows for batch in batches),
    )


def within_budget(
    batches: Sequence[Batch], schema: Schema, cost: CostModel, budget: float | None, runtime: Runtime
) -> list[Batch]:
    """`batches` cut into micro-batches of at most `budget` load; equally many on all ranks, some perhaps without rows.
    Where the cost is of bytes, those that each micro-batch needs whatever its rows (per_step) are part of the load.

    A row that alone exceeds it is computed alone. Tables and dense parameters are updated once a step with the sum of
    gradients (lookup.py), so cutting changes memory and not the step.
    """
    if budget is None:
        return list(batches)
    room = budget - cost.per_step if cost.unit == "bytes" else budget
    cuts = [budget_batches(batch_loads(cost, batch), budget=room) for batch in batches]
    most = runtime.max(torch.tensor([len(cut) for cut in cuts], dtype=torch.float64)).long().tolist()
    found = []
    for batch, cut, count in zip(batches, cuts, most, strict=True):
        if count <= 1:
            found.append(batch)
            continue
        for start, stop in [*cut, *[(0, 0)] * (count - len(cut))]:
            found.append(take_rows(schema, batch, np.arange(start, stop)))
    return found


class WorkClock:
    """Seconds of this rank's own work in a step; see the module docstring."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = time.thread_time()
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the dense forward pass: on CUDA it is what is measured."""
        if self._device.type != "cuda":
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def seconds(self) -> float:
        """Until now."""
        if self._device.type != "cuda":
            return time.thread_time() - self._started
        return sum(float(begin.elapsed_time(end)) for begin, end in self._events) / 1e3
