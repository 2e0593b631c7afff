"""How uneven a step was: max over mean across ranks of load, seconds, tokens, bytes and rows.

1 is perfect, W is everything on one of W ranks; what is above 1 in "seconds" is time that the other ranks wait.

"load" is predicted by the run's cost model. "seconds" is measured: on a CPU the processor time of the training thread
over the step, which leaves out waiting for other ranks; on CUDA the device time of the dense forward pass, between two
events that are complete by the time they are read, so that nothing waits for them (collectives inside it, as with
expert parallelism, count). "bytes" are those of the batch's tensors.

A step that is left out (train.max_skipped_steps) has no figures, since not every rank has done its work.

Every step is measured, and nothing is exchanged for it until its figures are needed: a rank keeps its own five numbers,
and a record sends those of all steps since the record before. So does a checkpoint that lies between two records, which
keeps what came of them: a resumed run neither loses nor repeats a step, on any number of processes.

Cost: 40 bytes a step and rank, in one all-gather a record between hosts; none in steps that are not recorded.

Legend: W ranks, S steps, K figures.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch
from gem_data.api import budget_batches
from gem_data.exchange import take_rows
from gem_data.interface import Batch, CostModel, Schema
from torch import Tensor

from gem_pipelines.cost import batch_loads
from gem_pipelines.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """One rank's share of a step. seconds: of its own work; on CUDA of the dense forward pass alone."""

    load: float
    seconds: float
    tokens: int
    bytes: int
    rows: int


FIGURES = tuple(field.name for field in fields(StepLoad))
_AT_ONCE = 1000  # steps in one all-gather: 40 KB a rank


def measure_imbalance(own_SK: Tensor, runtime: Runtime) -> Tensor:
    """(S, K) of this rank -> (S, K) max over mean across ranks, NaN where all ranks have 0. A collective.

    Two ranks with 300 and 100 tokens: 1.5.
    """
    every_WSK = runtime.gather(own_SK.flatten()).view(-1, *own_SK.shape)
    return every_WSK.amax(0) * every_WSK.shape[0] / every_WSK.sum(0)


class ImbalanceLog:
    """Imbalance of the steps since the last record. All ranks add the same steps, and exchange after the same ones."""

    def __init__(self) -> None:
        self._own = array("d")  # K numbers a step that is not exchanged yet
        self._clear()

    def _clear(self) -> None:
        self._last: dict[str, float | None] = {}
        self._sums = dict.fromkeys(FIGURES, 0.0)
        self._worst: dict[str, float | None] = dict.fromkeys(FIGURES)
        self._steps = dict.fromkeys(FIGURES, 0)

    def add(self, mine: StepLoad) -> None:
        """This rank's share of one more step."""
        self._own.extend(astuple(mine))

    def record(self, runtime: Runtime) -> dict[str, dict[str, Any]]:
        """What a record says, after which counting begins anew; {} where no step was added. A collective.

        imbalance         figure -> max over mean across ranks of the last step; None where all ranks have 0
        imbalance_mean    its mean over the steps since the last record, this one among them; None where none has it
        imbalance_worst   the largest of them
        imbalance_steps   how many steps have it

        Tokens of two ranks in three steps (4, 4), (6, 2), (5, 3): imbalance 1.25, mean 1.25, worst 1.5, steps 3.
        """
        self._exchange(runtime)
        if not self._last:
            return {}
        found: dict[str, dict[str, Any]] = {
            "imbalance": self._last,
            "imbalance_mean": {name: self._sums[name] / n if n else None for name, n in self._steps.items()},
            "imbalance_worst": self._worst,
            "imbalance_steps": self._steps,
        }
        self._clear()
        return found

    def state_dict(self, runtime: Runtime) -> dict[str, dict[str, Any]]:
        """What a checkpoint keeps of the steps since the last record; the same on all ranks. A collective where steps
        are to be exchanged.
        """
        self._exchange(runtime)
        kept = {"last": self._last, "sums": self._sums, "worst": self._worst, "steps": self._steps}
        return {name: dict(value) for name, value in kept.items()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Inverse of `state_dict`."""
        self._own = array("d")
        self._last, self._sums = dict(state["last"]), dict(state["sums"])
        self._worst, self._steps = dict(state["worst"]), dict(state["steps"])

    def _exchange(self, runtime: Runtime) -> None:
        own_SK = torch.tensor(self._own, dtype=torch.float64).view(-1, len(FIGURES))
        self._own = array("d")
        for part_SK in own_SK.split(_AT_ONCE) if len(own_SK) else ():
            for row in measure_imbalance(part_SK, runtime).tolist():
                self._last = {
                    name: None if math.isnan(value) else value for name, value in zip(FIGURES, row, strict=True)
                }
                for name, value in self._last.items():
                    if value is None:
                        continue
                    worst = self._worst[name]
                    self._sums[name] += value
                    self._worst[name] = value if worst is None else max(worst, value)
                    self._steps[name] += 1


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
