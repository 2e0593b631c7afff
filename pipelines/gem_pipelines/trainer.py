"""One training step, and the state it moves. Reads like the picture of the design: agree, look up, model, loss,
backward, agree, update.

A step is one optimizer step over `accumulate` global micro-batches, and it is a transaction: all of it happens, or
parameters, tables, optimizer state and random streams stay as they were, to the bit and on all ranks alike. Before
anything is computed all ranks agree on the batches (agreement.py). Then everything is computed that changes nothing:
losses, dense gradients, gradients of the looked-up vectors. In a second exchange the ranks agree that these are usable,
and only then tables and dense parameters are updated (lookup.py says why in this order, and what it costs).

On CUDA the host does not wait for that second exchange before it launches the update: the device knows its outcome.
Where a step is not usable the update adds zeros to the tables and skips the dense parameters, to the bit. The host
reads the outcome after it has launched everything, so the device still has work while the next step is begun.

A step that fails stops the run. With train.max_skipped_steps above 0 it is left out instead: it counts as a step, so
that step numbers, learning rates and checkpoints stay where they are, its samples are noted, and nothing is trained.

A step that is told the batches of the next one makes them ready on the way (ready.py).

Legend: B rows, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from gem_data.api import events_cost
from gem_data.interface import Batch, CostModel, Schema
from torch import Tensor

from gem_pipelines.agreement import Agreement, RemoteBatchError, StepTotals
from gem_pipelines.batches import BatchError
from gem_pipelines.config import RunConfig
from gem_pipelines.cost_run import stored_costs
from gem_pipelines.features import to_model_input
from gem_pipelines.imbalance import ImbalanceLog, WorkClock, own_load, within_budget
from gem_pipelines.late import LateRead, send
from gem_pipelines.lookup import LARGEST_GRADIENT, Lookup, bad_rows, largest_magnitude, look_up
from gem_pipelines.loss import bce_by_task, mean_by_task, metric_sums, scaled_loss
from gem_pipelines.metrics import BinarySums, TaskMetrics
from gem_pipelines.optimizer import DenseOptimizer, GradientError
from gem_pipelines.parallelize import ParallelModel
from gem_pipelines.ready import Begun, Coming, NotReady, Ready, begin_ready, make_ready, try_ready
from gem_pipelines.runtime import Runtime
from gem_pipelines.timing import PartClock

SHOWN_SAMPLES = 8
"""Sample ids in a message; a record holds all."""


class LossError(ValueError):
    """The loss is not a finite number; nothing of the batch was trained."""


@dataclass(kw_only=True)
class Position:
    """How far training is: optimizer steps, finished epochs, samples and tokens (events) over all ranks.

    skipped_steps, skipped_samples   left out because they could not be trained; `step` counts them, `samples` does not
    quarantined_samples              lost because their row group could not be read; where rows are requests, requests:
                                     nobody can say how many impressions each had
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    skipped_samples: int = 0
    quarantined_samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A step before its update.

    given, batches  as they were read, and as they are computed
    results         metric sums (T, 5) over all ranks, how many ranks have a bad table gradient, how many a bad dense
                    one, and the norm of the dense gradients; where the model computes
    """

    totals: StepTotals
    given: Sequence[Batch]
    batches: Sequence[Batch]
    lookup: Lookup
    gradients: dict[str, Tensor]
    results: Tensor


class Trainer:
    """Holds what training changes. Every rank calls `step` with its part of the same global batches."""

    def __init__(
        self,
        parallel: ParallelModel,
        *,
        schema: Schema,
        config: RunConfig,
        runtime: Runtime,
        total_steps: int,
        cost: CostModel | None = None,
        budget_cost: CostModel | None = None,
    ) -> None:
        """cost: the load of a row; None: its events. budget_cost: what balance.budget limits; None: that load."""
        self.cost = events_cost(schema) if cost is None else cost
        self.budget_cost = self.cost if budget_cost is None else budget_cost
        self.stored_costs = stored_costs(self.cost, self.budget_cost)  # for every checkpoint
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
        self._task_weight_T = torch.tensor(self.task_weights, dtype=torch.float64, device=runtime.device)
        self.metrics = TaskMetrics(self.tasks, window=config.train.metric_window)
        self.position = Position()
        self.imbalance = ImbalanceLog()
        self._ahead: Ready | NotReady | None = None
        self._dynamic = {feature for feature, policy in config.tables.policy_of().items() if policy == "zch"}
        # An update of zeros would average averaged copies and count ids that earn their rows: there the host waits.
        harmless = config.parallel.table_sync == "gradients" and not self._dynamic
        self.reads_late = runtime.device.type == "cuda" and harmless
        self.threads = ThreadPoolExecutor(1, "ready") if runtime.device.type == "cuda" else None
        self._agreement = Agreement(schema=schema, config=config, runtime=runtime, tasks=self.tasks)

    def step(
        self, batches: Coming, *, clock: PartClock, profiled: bool = False, upcoming: Coming | None = None
    ) -> dict[str, Any]:
        """Train one step on `batches` and return its "train" record, without times, or its "skip" record.

        upcoming  batches of the next step, which must then be given next; None: they are not known, or what lies
                  between (an evaluation, a checkpoint, another epoch) must not meet a step that has begun

        Raises BatchError, LossError, GradientError or RemoteError on all ranks at the same step.
        """
        random, work = self._random_state(), WorkClock(self.runtime.device)
        begun = self._begin_beside(upcoming)
        try:
            ready = self._begin(batches)
            computed = self._compute(ready, clock=clock, work=work, profiled=profiled)
            if upcoming is not None:  # the host's part of the next step, beside the device's backward of this one
                with clock.part("read"):
                    number = self.position.step + 2
                    self._ahead = try_ready(upcoming, step=number, begun=begun, **self._ready_parts())
            sums_T5, lr, grad_norm = self._update(computed, clock=clock)
        except (BatchError, RemoteBatchError, LossError, GradientError) as error:
            assert not isinstance(batches, Exception)  # agreement.stop raised, which does not come here
            self.optimizer.clear()
            self._set_random_state(random)
            if self.position.skipped_steps >= self.config.train.max_skipped_steps:
                raise
            return self._skip(batches, error)
        self.imbalance.add(own_load(ready.batches, cost=self.cost, seconds=work.seconds()))
        return self._account(computed.totals, sums_T5, lr=lr, grad_norm=grad_norm)

    def _update(self, computed: Computed, *, clock: PartClock) -> tuple[Tensor, float, float]:
        """Tables and dense parameters, if the ranks agree that the step is usable; else all raise, and nothing changed.

        Returns (metric sums (T, 5) on the CPU, learning rate, norm of the dense gradients).
        """
        late, gradients, skipped = LateRead(computed.results), computed.gradients, None
        if self.reads_late:
            usable = torch.isfinite(computed.results[:-1]).all() & (computed.results[-3:-1] == 0).all()
            gradients, skipped = {name: torch.where(usable, grad, 0.0) for name, grad in gradients.items()}, ~usable
        else:
            self._judge(late.read(), computed)
        with clock.part("tables"):
            computed.lookup.update(gradients)
        with clock.part("optimizer"):
            lr = self.optimizer.update(self.position.step, skipped=skipped)
        results = late.read()
        self._judge(results, computed)
        return results[:-3].view(len(self.tasks), -1), lr, float(results[-1])

    def stop_together(self, error: Exception) -> NoReturn:
        """Tell the other ranks, which are at the start of the same step, that this one cannot go on. Then raise."""
        self._begin(error)
        raise AssertionError("an error cannot be begun")

    def _begin(self, batches: Coming) -> Ready:
        """What the step before has made ready, or made so now. Raises what is wrong with the batches, on all ranks."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return make_ready(batches, step=self.position.step + 1, **self._ready_parts())
        given = ahead.coming if isinstance(ahead, NotReady) else ahead.batches
        assert given is batches, "another step than the one that was announced"
        if isinstance(ahead, NotReady):
            raise ahead.error
        return ahead

    def _ready_parts(self) -> dict[str, Any]:
        tables, schema = self.parallel.tables, self.schema
        pin = self.runtime.device.type == "cuda"
        parts = {"agreement": self._agreement, "tables": tables, "schema": schema, "cut": self.cut, "pin": pin}
        return parts | {"dynamic": self._dynamic}

    def _begin_beside(self, upcoming: Coming | None) -> Begun | None:
        """Have the thread start on the next step's batches; None where there is no thread, or nothing for it."""
        if self.threads is None or upcoming is None or isinstance(upcoming, Exception):
            return None
        packs = self.config.balance.budget is None
        parts = {"agreement": self._agreement, "schema": self.schema, "device": self.runtime.device, "packs": packs}
        return begin_ready(self.threads, upcoming, dynamic=self._dynamic, **parts)

    def cut(self, batches: Sequence[Batch]) -> list[Batch]:
        """What this rank computes at once: micro-batches within balance.budget. A collective where there is one."""
        return within_budget(batches, self.schema, self.budget_cost, self.config.balance.budget, self.runtime)

    def _compute(self, ready: Ready, *, clock: PartClock, work: WorkClock, profiled: bool) -> Computed:
        """Losses and gradients of a step, added up over the ranks. Changes no parameter, table or moment."""
        totals, device = ready.totals, self.runtime.device
        self._set_table_rate()
        padded, weight_T = ready.on_device(device), send(totals.weight, device)
        with clock.part("tables"):
            lookup = look_up(self.parallel.tables, self.parallel.specs, padded, ready.prepared)
        sums_T5 = torch.zeros(len(self.tasks), len(BinarySums.FIELDS), dtype=torch.float64, device=device)
        for number, batch in enumerate(padded):
            with self.parallel.accumulating(more_to_come=number + 1 < len(padded)):
                with work.forward():
                    given = {"on_host": ready.packed[number].batch, "clock": clock, "profiled": profiled}
                    logits_BT = self._forward(batch, lookup.leaves[number], **given)
                loss_T = bce_by_task(logits_BT, batch.labels, batch.weights)
                sums_T5 += metric_sums(logits_BT, batch.labels, batch.weights, loss_T)
                self._backward(loss_T, weight_T)
        with clock.part("optimizer"):
            norm = self.optimizer.clip()
        gradients = lookup.gradients()
        results = self._add_up(sums_T5, gradients, norm)
        return Computed(
            totals=totals, given=ready.batches, batches=padded, lookup=lookup, gradients=gradients, results=results
        )

    def _set_table_rate(self) -> None:
        tables = self.config.tables
        factor = self.optimizer.factor(self.position.step) if tables.scheduled else 1.0
        self.parallel.tables.set_learning_rate(tables.lr * factor)

    def _forward(
        self, batch: Batch, embeddings: dict[str, Tensor], *, on_host: Batch, clock: PartClock, profiled: bool
    ) -> Tensor:
        """Logits (B, T); on a profiled step the tables' outputs are marked, so that time from there on is theirs.
        on_host: the same batch on the CPU.
        """
        if profiled:
            clock.mark_backward("tables", embeddings)
        policies = self.parallel.policies
        return self.parallel(to_model_input(batch, embeddings, schema=self.schema, policies=policies, on_host=on_host))

    def _backward(self, loss_T: Tensor, weight_T: Tensor) -> None:
        """Gradients of the dense model and of the looked-up vectors. weight_T: of all ranks, beside loss_T."""
        scale = {"task_weights": self._task_weight_T, "world_size": self.runtime.world_size}
        scaled_loss(loss_T, weight_T, **scale).backward()

    def _add_up(self, sums_T5: Tensor, gradients: dict[str, Tensor], norm: Tensor) -> Tensor:
        """`Computed.results`, where the model computes. A collective; the norm is over all ranks already."""
        largest = largest_magnitude(gradients).to(sums_T5.device)
        norm = norm.detach().to(sums_T5.device)
        faults = torch.stack([~(largest <= LARGEST_GRADIENT), ~torch.isfinite(norm)]).double()
        total = self.runtime.sum(torch.cat([sums_T5.flatten(), faults]))
        return torch.cat([total, norm.double().view(1)])

    def _judge(self, results: Tensor, computed: Computed) -> None:
        """Raise what makes the step unusable: on all ranks, for `results`, on the CPU, are the same on all."""
        total_T5, faults, norm = results[:-3].view(len(self.tasks), -1), results[-3:-1], float(results[-1])
        bad = [task for task, row in zip(self.tasks, total_T5, strict=True) if not bool(torch.isfinite(row).all())]
        if not bad and not faults.any():
            return
        samples = self._samples(computed.given)
        where = f"step {self.position.step + 1}: "
        advice = (
            f"Nothing of it was trained: parameters, tables and optimizer state are as before the step ({samples}). "
            "Lower optimizer.lr or tables.lr, clip (optimizer.max_grad_norm), or leave such steps out "
            "(train.max_skipped_steps)."
        )
        if bad:
            raise LossError(f"{where}the loss of task {', '.join(bad)} is not finite. {advice}")
        if faults[0]:
            places = self.runtime.gather_text(self._bad_vectors(computed.gradients, computed.batches))
            found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(places) if text)
            raise GradientError(
                f"{where}a gradient that would enter a table is not finite or above {LARGEST_GRADIENT:g}: {found}. "
                f"{advice}"
            )
        raise GradientError(f"{where}the norm of the dense gradients is {norm}. {advice}")

    def _bad_vectors(self, gradients: dict[str, Tensor], batches: Sequence[Batch]) -> str:
        """Which features and samples of this rank have a gradient that must not be used."""
        pooled = {feature for spec in self.parallel.specs if spec.pooling != "none" for feature in spec.features}
        sample_ids = torch.cat([batch.sample_ids for batch in batches]).tolist()
        found = [
            f"feature {name!r} of sample_id {sample_ids[row]}" for name, row in bad_rows(gradients, batches, pooled)
        ]
        return ", ".join(found[:SHOWN_SAMPLES]) + (f", ... {len(found)} in all" if len(found) > SHOWN_SAMPLES else "")

    def _samples(self, batches: Sequence[Batch]) -> str:
        ids = self._sample_ids(batches)
        shown = ", ".join(map(str, ids[:SHOWN_SAMPLES])) + (", ..." if len(ids) > SHOWN_SAMPLES else "")
        return f"{len(ids)} samples: {shown}"

    def _sample_ids(self, batches: Sequence[Batch]) -> list[int]:
        """Sample ids of the step over all ranks, in rank order. A collective."""
        own = torch.cat([batch.sample_ids.cpu() for batch in batches]).long()
        found: list[int] = self.runtime.gather_rows(own).tolist()
        return found

    def _skip(self, batches: Sequence[Batch], error: ValueError) -> dict[str, Any]:
        """Count the step as left out; its record names the samples and the reason. Rows of the data that it
        lacked were lost to damaged row groups, and count as such.
        """
        sample_ids = self._sample_ids(batches)
        own = torch.tensor(sum(batch.rows for batch in batches))
        missing = sum(batch.global_rows for batch in batches) - int(self.runtime.sum(own))
        position = self.position
        position.step += 1
        position.quarantined_samples += missing
        position.skipped_steps += 1
        position.skipped_samples += len(sample_ids)
        return {
            "kind": "skip",
            "step": position.step,
            "epoch": position.epoch,
            "reason": str(error),
            "error": type(error).__name__,
            "sample_ids": sample_ids,
            "missing_rows": missing,
            "skipped_steps": position.skipped_steps,
            "max_skipped_steps": self.config.train.max_skipped_steps,
        }

    def _random_state(self) -> list[Tensor]:
        device = self.runtime.device
        cuda = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        return [torch.get_rng_state(), *cuda]

    def _set_random_state(self, state: list[Tensor]) -> None:
        torch.set_rng_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state(state[1], self.runtime.device)

    def _account(self, totals: StepTotals, sums_T5: Tensor, *, lr: float, grad_norm: float) -> dict[str, Any]:
        """Move the position and the metrics, and describe the step."""
        position = self.position
        position.step += 1
        position.samples += totals.rows
        position.tokens += totals.tokens
        position.quarantined_samples += totals.missing
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
            "missing_rows": totals.missing,
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
