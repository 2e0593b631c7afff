"""What all ranks tell each other before a step changes anything, and how they stop or go on together.

Two small all-reduces a step. The first, before the forward pass: weight sums (the loss is normalised by the global
ones), batches, faults, rows, tokens, FLOPs. The second, after the dense backward and before any update: loss sums, and
whether a gradient must not be used. A fault of one rank is therefore seen by all at the same step, while parameters,
tables and optimizer state are as they were. Texts (which rank, which sample) travel only when there is a fault.

Legend: B rows, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from gem_data.interface import Batch, Schema
from torch import Tensor

from gem_pipelines.batches import BatchError, check_batch, event_lengths, impressions_of
from gem_pipelines.config import RunConfig
from gem_pipelines.errors import RemoteError, told
from gem_pipelines.model.flops import PARTS as MODEL_PARTS
from gem_pipelines.model.flops import training_flops
from gem_pipelines.runtime import Runtime


class RemoteBatchError(RemoteError):
    """Another rank holds a bad batch in this step; no rank trained it."""


class MissingRowsError(ValueError):
    """A global batch came with fewer or more rows than its loader said; no rank trained it."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What all ranks agreed on before a step. weight: (T,) float64 weight sums of the whole step, on the CPU.

    rows     samples: of requests, their impressions
    missing  rows of the data that the plan has in this step and no rank got: quarantined by the loaders
    """

    weight: Tensor
    rows: int
    tokens: int
    missing: int
    flops_by_part: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What a rank finds of its own batches: what is wrong, weight sums by task, and the counts of `_own_sums`."""

    error: BatchError | None
    weights: list[float]
    counts: list[int]


class Agreement:
    """The first exchange of a step."""

    def __init__(self, *, schema: Schema, config: RunConfig, runtime: Runtime, tasks: Sequence[str]) -> None:
        self.schema, self.config, self.runtime, self.tasks = schema, config, runtime, tuple(tasks)

    def examine(self, batches: Sequence[Batch]) -> Examined:
        """Check this rank's batches and add up what every rank must know of them. Of this rank alone, so any thread."""
        try:
            for batch in batches:
                check_batch(batch, self.schema, open_ids=self.config.tables.open_ids())
        except BatchError as found:
            weights, counts = self._own_sums((), bad=True)
            return Examined(error=found, weights=weights, counts=counts)
        weights, counts = self._own_sums(batches, bad=False)
        return Examined(error=None, weights=weights, counts=counts)

    def totals(self, batches: Sequence[Batch], *, step: int, examined: Examined | None = None) -> StepTotals:
        """Add up over the ranks what each found of its batches. `step` is 1-based, for messages; examined: what
        `examine` gave for them; None: it is called now.

        Raises BatchError, or RemoteBatchError where the bad batch is another rank's; RemoteError where ranks cannot go
        on. On all ranks at once; nothing has changed then.
        """
        own = self.examine(batches) if examined is None else examined
        error = own.error
        weights, counts = self._exchange(own.weights, own.counts)
        if counts[1] or counts[2] or counts[0] != len(batches) * self.runtime.world_size:
            self._raise(counts, len(batches), step, error)
        # The loaders plan rows of the data; what is trained and counted are samples, of which a request has several.
        planned = sum(batch.global_rows for batch in batches)
        if planned != counts[5] and not 0 < planned - counts[5] <= planned * bool(
            self.config.data.max_quarantined_rows
        ):
            raise MissingRowsError(
                f"step {step}: the ranks hold {counts[5]:.0f} rows, the loaders planned {planned}; no rank trained them"
            )
        return StepTotals(
            weight=torch.tensor(weights, dtype=torch.float64),
            rows=int(counts[3]),
            tokens=int(counts[4]),
            missing=planned - int(counts[5]),
            flops_by_part={part: int(count) for part, count in zip(MODEL_PARTS, counts[6:], strict=True)},
        )

    def stop(self, error: Exception, *, step: int) -> NoReturn:
        """Tell the other ranks, which are at the start of the same step, that this one cannot go on. Then raise."""
        _, counts = self._exchange([0.0] * len(self.tasks), [0, 1, 0, 0, 0, 0, *(0 for _ in MODEL_PARTS)])
        self._raise(counts, 0, step, error)

    def _own_sums(self, batches: Sequence[Batch], *, bad: bool) -> tuple[list[float], list[int]]:
        """Weights by task, and [batches, cannot go on, bad, samples, tokens, rows, FLOPs by part] of this rank."""
        weight_T = torch.zeros(len(self.tasks), dtype=torch.float64)
        samples = tokens = rows = 0
        flops = dict.fromkeys(MODEL_PARTS, 0)
        for batch in batches:
            weight_T += batch.weights.double().sum(0)
            lengths = event_lengths(batch)
            samples += batch.sample_ids.shape[0]
            rows += batch.rows
            tokens += sum(int(length.sum()) for length in lengths.values())
            counted = training_flops(
                self.config.model, self.schema, lengths, rows=batch.rows, impressions=impressions_of(batch)
            )
            flops = {part: flops[part] + counted[part] for part in MODEL_PARTS}
        return weight_T.tolist(), [len(batches), 0, int(bad), samples, tokens, rows, *flops.values()]

    def _exchange(self, weights: list[float], counts: list[int]) -> tuple[list[float], list[float]]:
        total = self.runtime.sum(torch.tensor([*weights, *counts], dtype=torch.float64)).tolist()
        return total[: len(weights)], total[len(weights) :]

    def _raise(self, counts: list[float], batches: int, step: int, own: Exception | None) -> NoReturn:
        """Every rank learns which rank has what, and raises; a rank with an error raises the error itself."""
        fatal = bool(counts[1])
        stops = own is not None and not (fatal and isinstance(own, BatchError))
        texts = self.runtime.gather_text(told(own) if own is not None and stops else "")
        numbers = [int(text) for text in self.runtime.gather_text(str(batches))]
        if own is not None and stops:
            raise own
        kind = RemoteError if fatal or not counts[2] else RemoteBatchError
        for rank, text in enumerate(texts):
            if text:
                raise kind(f"step {step}: rank {rank} reported: {text}")
        raise RemoteError(f"step {step}: the ranks have different numbers of batches {numbers}; no rank trained them")
