"""One training step, and the state it moves. Reads like the picture of the design: agree, embed, model, loss,
backward, step.

A step is one optimizer step over `accumulate` global micro-batches. Before anything changes, all ranks exchange one
small vector: weight sums (the loss is normalised by the global ones), rows, tokens, FLOPs, how many batches each has,
and whether a batch is bad. So all ranks stop at the same step when one of them holds a bad batch or none. A second
exchange adds up the loss after forward, still before backward: a loss that is not finite stops all ranks while tables
and parameters are as they were (with accumulation, as they were before this micro-batch).

Legend: B rows, T tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from gem_data.interface import Batch, Schema
from torch import Tensor

from gem_pipelines.batches import check_batch, event_lengths, pad_empty
from gem_pipelines.config import RunConfig
from gem_pipelines.errors import RemoteError
from gem_pipelines.features import to_model_input
from gem_pipelines.loss import bce_by_task, mean_by_task, metric_sums, scaled_loss
from gem_pipelines.metrics import BinarySums, TaskMetrics
from gem_pipelines.model.flops import PARTS as MODEL_PARTS
from gem_pipelines.model.flops import training_flops
from gem_pipelines.optimizer import DenseOptimizer
from gem_pipelines.parallelize import ParallelModel
from gem_pipelines.runtime import Runtime
from gem_pipelines.timing import PartClock


class LossError(ValueError):
    """The loss is not a finite number; nothing of the batch was trained."""


@dataclass(kw_only=True)
class Position:
    """How far training is: optimizer steps, finished epochs, samples and tokens (events) over all ranks."""

    step: int = 0
    epoch: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """What all ranks agreed on before a step. weight: (T,) float64 weight sums of the whole step, on the CPU."""

    weight: Tensor
    rows: int
    tokens: int
    flops_by_part: dict[str, int]


class Trainer:
    """Holds what training changes. Every rank calls `step` with its part of the same global batches."""

    def __init__(
        self, parallel: ParallelModel, *, schema: Schema, config: RunConfig, runtime: Runtime, total_steps: int
    ) -> None:
        self.parallel = parallel
        self.schema = schema
        self.config = config
        self.runtime = runtime
        self.tasks = tuple(label.name for label in schema.labels)
        self.task_weights = resolve_task_weights(config.train.task_weights, self.tasks)
        self.optimizer = DenseOptimizer(
            parallel.module.named_parameters(),
            config.optimizer,
            total_steps=total_steps,
            placement=parallel.placement,
        )
        self.metrics = TaskMetrics(self.tasks, window=config.train.metric_window)
        self.position = Position()

    def step(self, batches: list[Batch], *, clock: PartClock, profiled: bool = False) -> dict[str, Any]:
        """Train one step on `batches` and return its "train" record, without times.

        Raises BatchError, LossError or RemoteError on all ranks at the same step.
        """
        totals = self._agree(batches)
        self._set_table_rate()
        sums_T5 = torch.zeros(len(self.tasks), len(BinarySums.FIELDS), dtype=torch.float64)
        for number, batch in enumerate(batches):
            batch = pad_empty(batch, self.schema).to(self.runtime.device)
            with self.parallel.accumulating(more_to_come=number + 1 < len(batches)):
                logits_BT = self._forward(batch, clock=clock, profiled=profiled)
                loss_T = bce_by_task(logits_BT, batch.labels, batch.weights)
                sums_T5 += self._agree_on_loss(metric_sums(logits_BT, batch.labels, batch.weights, loss_T))
                self._backward(loss_T, totals)
        with clock.part("optimizer"):
            lr, grad_norm = self.optimizer.step(self.position.step)
        return self._account(totals, sums_T5, lr=lr, grad_norm=grad_norm)

    def _agree(self, batches: list[Batch]) -> StepTotals:
        """Check this rank's batches and add up what every rank must know. Nothing has changed when this raises."""
        try:
            for batch in batches:
                check_batch(batch, self.schema)
        except ValueError as error:
            self.stop_together(error)
        weight_T = torch.zeros(len(self.tasks), dtype=torch.float64)
        rows = tokens = 0
        flops = dict.fromkeys(MODEL_PARTS, 0)
        for batch in batches:
            weight_T += batch.weights.double().sum(0)
            lengths = event_lengths(batch)
            rows += batch.sample_ids.shape[0]
            tokens += sum(int(length.sum()) for length in lengths.values())
            counted = training_flops(self.config.model, self.schema, lengths, rows=batch.sample_ids.shape[0])
            flops = {part: flops[part] + counted[part] for part in MODEL_PARTS}
        weights, counts = self._exchange(weight_T.tolist(), [len(batches), 0, rows, tokens, *flops.values()])
        if counts[1] or counts[0] != len(batches) * self.runtime.world_size:
            self._raise_together("", len(batches))
        return StepTotals(
            weight=torch.tensor(weights, dtype=torch.float64),
            rows=int(counts[2]),
            tokens=int(counts[3]),
            flops_by_part={part: int(count) for part, count in zip(MODEL_PARTS, counts[4:], strict=True)},
        )

    def _exchange(self, weights: list[float], counts: list[int]) -> tuple[list[float], list[float]]:
        """Sums over ranks of the weights by task and of [batches, errors, rows, tokens, FLOPs by part]."""
        total = self.runtime.sum(torch.tensor([*weights, *counts], dtype=torch.float64)).tolist()
        return total[: len(weights)], total[len(weights) :]

    def stop_together(self, error: ValueError) -> NoReturn:
        """Tell the other ranks, which are at the start of the same step, that this one cannot go on. Then raise."""
        self._exchange([0.0] * len(self.tasks), [0, 1, 0, 0, *(0 for _ in MODEL_PARTS)])
        self._raise_together(str(error), 0, cause=error)

    def _raise_together(self, error: str, batches: int, *, cause: ValueError | None = None) -> NoReturn:
        """Every rank learns which rank has what, and raises; the rank with the error raises the error itself."""
        errors = self.runtime.gather_text(error)
        counts = [int(text) for text in self.runtime.gather_text(str(batches))]
        step = self.position.step + 1
        if cause is not None:
            raise cause
        for rank, text in enumerate(errors):
            if text:
                raise RemoteError(f"step {step}: rank {rank} reported: {text}")
        raise RemoteError(f"step {step}: the ranks have different numbers of batches {counts}; no rank trained them")

    def _set_table_rate(self) -> None:
        tables = self.config.tables
        factor = self.optimizer.factor(self.position.step) if tables.scheduled else 1.0
        self.parallel.tables.set_learning_rate(tables.lr * factor)

    def _forward(self, batch: Batch, *, clock: PartClock, profiled: bool) -> Tensor:
        """Logits (B, T); on a profiled step the tables' outputs are marked, so that their backward is timed."""
        with clock.part("tables"):
            embeddings = self.parallel.tables(batch.ids)
        if profiled:
            clock.mark_backward("tables", embeddings)
        return self.parallel(to_model_input(batch, embeddings, schema=self.schema))

    def _agree_on_loss(self, sums_T5: Tensor) -> Tensor:
        """The sums over all ranks, on the CPU. Not finite on one rank is not finite on all: all raise."""
        total_T5 = self.runtime.sum(sums_T5).cpu()
        if not bool(torch.isfinite(total_T5).all()):
            bad = [task for task, row in zip(self.tasks, total_T5, strict=True) if not bool(torch.isfinite(row).all())]
            raise LossError(
                f"step {self.position.step + 1}: the loss of task {', '.join(bad)} is not finite; "
                "the batch was not trained. "
                "Lower optimizer.lr or tables.lr, or clip (optimizer.max_grad_norm)."
            )
        return total_T5

    def _backward(self, loss_T: Tensor, totals: StepTotals) -> None:
        """Gradients of the dense model; the tables are updated on the way."""
        scaled_loss(
            loss_T,
            totals.weight.to(loss_T.device),
            task_weights=self.task_weights,
            world_size=self.runtime.world_size,
        ).backward()

    def _account(self, totals: StepTotals, sums_T5: Tensor, *, lr: float, grad_norm: float) -> dict[str, Any]:
        """Move the position and the metrics, and describe the step."""
        position = self.position
        position.step += 1
        position.samples += totals.rows
        position.tokens += totals.tokens
        sums = {task: BinarySums.from_list(row) for task, row in zip(self.tasks, sums_T5.tolist(), strict=True)}
        self.metrics.update(sums)
        loss_T = mean_by_task(sums_T5[:, BinarySums.FIELDS.index("log_loss")], totals.weight)
        weighted_T = loss_T * torch.tensor(self.task_weights, dtype=torch.float64)
        present = {task: bool(weight > 0) for task, weight in zip(self.tasks, totals.weight, strict=True)}
        return {
            "kind": "train",
            "step": position.step,
            "epoch": position.epoch,
            "samples": position.samples,
            "tokens": position.tokens,
            "loss": float(weighted_T.sum()),
            "loss_by_task": {
                task: float(loss) if present[task] else None for task, loss in zip(self.tasks, loss_T, strict=True)
            },
            **self.metrics.record(),
            "learning_rate": lr,
            "grad_norm": grad_norm,
            "rows": totals.rows,
            "events": totals.tokens,
            "flops_by_part": totals.flops_by_part,
            "flops": sum(totals.flops_by_part.values()),
        }


def resolve_task_weights(given: tuple[float, ...], tasks: tuple[str, ...]) -> tuple[float, ...]:
    """One weight per task; empty means 1 each. A wrong number of weights is a ValueError."""
    if given and len(given) != len(tasks):
        raise ValueError(
            f"train.task_weights has {len(given)} values, the data has {len(tasks)} tasks: {', '.join(tasks)}"
        )
    return tuple(float(weight) for weight in given) if given else (1.0,) * len(tasks)
