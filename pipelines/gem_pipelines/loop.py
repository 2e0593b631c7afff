"""The loop of a job: read -> step -> mark as trained -> record -> checkpoint -> evaluate, to the last step.

The checkpoint comes before the evaluation of the same step, so that a failing evaluation loses nothing; a resumed run
that finds none for its step makes up for it first. All ranks walk through the same calls; rank 0 alone prints and
writes.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gem_data.api import build_loader
from gem_data.interface import Batch, Loader, LoaderConfig, Schema
from gem_data.remote import DataPath

from gem_pipelines import checkpoint, evaluate
from gem_pipelines.checkpoint_format import step_directory
from gem_pipelines.checkpoint_saver import Saver
from gem_pipelines.config_codec import to_json
from gem_pipelines.errors import ExchangeError
from gem_pipelines.ledger import Ledger
from gem_pipelines.measure import matmul_peak_flops_per_s, memory_bytes
from gem_pipelines.outcome import Throughput, best_possible_ne, counting_floors
from gem_pipelines.parallelize import parameter_counts
from gem_pipelines.progress import ProgressDisplay
from gem_pipelines.quarantine import Quarantine, check_cap
from gem_pipelines.replica_check import check_replicas, copied_tensors
from gem_pipelines.rundir import RunDirectory, read_records
from gem_pipelines.runlock import RunLock
from gem_pipelines.sinks import Sinks
from gem_pipelines.spikes import SpikeWatch
from gem_pipelines.supervision import Supervision
from gem_pipelines.timing import PartClock, only_new_garbage
from gem_pipelines.trainer import Trainer
from gem_pipelines.windows import (
    ends_epoch,
    epoch_of,
    epoch_rows,
    evaluate_next_window,
    evaluates_window,
    lacks_window,
    streaming,
    tell_of_no_prediction,
    total_steps,
    whole_epochs,
)

_CLOSING_SECONDS = 1.0  # until the error of a job whose loader does not close is told


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a finished run says: its directory, its end record and its last evaluation."""

    run_dir: Path
    end: dict[str, Any]
    evaluation: dict[str, Any]


class Job:
    """The loop around `Trainer.step`."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        loader: Loader,
        data: DataPath,
        directory: RunDirectory,
        total_steps: int,
        lock: RunLock | None = None,
        quarantine: Quarantine | None = None,
    ) -> None:
        self.quarantine = Quarantine() if quarantine is None else quarantine
        self.spikes = SpikeWatch(trainer.config.train.spike_factor)
        self.ledger = Ledger(directory.path / "ledger", runtime=trainer.runtime, enabled=trainer.config.train.ledger)
        self.trainer = trainer
        self.loader = loader
        self.data = data
        self.directory = directory
        self.total_steps = total_steps
        self.runtime = trainer.runtime
        self.config = trainer.config
        self.schema: Schema = trainer.schema
        self.display = ProgressDisplay(
            total_steps=total_steps, print_every=self.config.train.print_every, enabled=self.runtime.is_main
        )
        train = self.config.train
        self.saver = Saver(
            directory.checkpoints,
            runtime=self.runtime,
            keep=train.keep_checkpoints,
            asynchronous=train.checkpoint_async,
            full_every=train.checkpoint_full_every,
            on_error=train.on_save_error,
            lock=lock,
            say=self.display.say,
        )
        self.throughput = Throughput()
        self.supervision = Supervision()
        self._sinks: Sinks | None = None
        self._last_eval: dict[str, Any] | None = None
        self._announced: list[Batch] | Exception | None = None

    def restore_latest(self) -> int:
        """Load the newest sound checkpoint and return its step; 0 where the run was killed before its first."""
        say = self.display.say
        found = checkpoint.find_latest(self.directory.checkpoints, say=say) if self.runtime.is_main else None
        step = int(self.runtime.from_main(str(-1 if found is None else found)))
        if step < 0:
            say("no checkpoint to resume from: starting at step 0")
            return 0
        directory = step_directory(self.directory.checkpoints, step)
        for difference in checkpoint.restore(directory, self.trainer, self.loader):
            say(f"{directory.name}: {difference}")
        if streaming(self.loader) is not None:  # windows that had begun keep their edges, also in a log that grew
            self.total_steps = total_steps(self.loader, self.config)
        self.saver.resumed_from(step)
        say(f"resumed from step {step}")
        return step

    def train(self, *, resumed_from: int | None, survey: dict[str, Any] | None) -> Outcome | None:
        """Train to the last step; returns the outcome on rank 0. `survey`: what survey_data said, for the record."""
        started = time.perf_counter()
        first = self.trainer.position.step
        peak = self._peak_flops_per_s()
        if self.runtime.is_main:
            train = self.config.train
            self._sinks = Sinks(self.directory, tensorboard=train.tensorboard, first_step=first, say=self.display.say)
        self.saver.check_room(self.trainer)
        self._write(self._start_record(peak, resumed_from, survey))
        self.display.start(first, total_steps=self.total_steps)
        unpredicted = tell_of_no_prediction(self.loader, self.config, steps=self.total_steps)
        if unpredicted is not None:
            self.display.say(f"warning: {unpredicted}")
        ended = False
        told: threading.Timer | None = None
        try:
            if resumed_from is not None and self._misses_evaluation():
                self._evaluate()
            if resumed_from is not None and self._lacks_window():
                self._evaluate_window()
            steps = self._steps()
            with only_new_garbage():
                while self.trainer.position.step < self.total_steps:
                    self._one_step(steps, peak)
                    self._save_and_evaluate()
            self.supervision.enter("finish", step=self.total_steps)
            self.saver.finish(self.total_steps)  # exit code 0 means that the last checkpoint is durable
            self._record_saves()
            end = self._end_record(time.perf_counter() - started, resumed_from)
            self._write(end)
            ended = True
        except BaseException:
            self.supervision.failing()
            told = _tell_if_slow(self.runtime.rank, self.trainer.position.step)
            raise
        finally:
            try:
                self.loader.close()  # still watched: after an error, a reader that stands still would keep this rank
            finally:
                self.supervision.close(ended=ended)
                if told is not None:
                    told.cancel()
            self.display.stop()
            self.saver.close()
            if self._sinks is not None:
                self._sinks.close()
        if not self.runtime.is_main:
            return None
        assert self._last_eval is not None
        return Outcome(run_dir=self.directory.path, end=end, evaluation=self._last_eval)

    def _steps(self) -> Iterator[list[Batch]]:
        """Groups of `accumulate` micro-batches, epoch after epoch; a group does not reach into the next epoch."""
        accumulate = self.config.data.accumulate
        while True:
            group: list[Batch] = []
            for batch in self.loader.epoch():
                group.append(batch)
                if len(group) == accumulate:
                    yield group
                    group = []
            if group:
                yield group

    def _one_step(self, steps: Iterator[list[Batch]], peak: float) -> None:
        number = self.trainer.position.step + 1
        self.supervision.enter("step", step=number)
        train = self.config.train
        # Step 1 pays for first allocations: profiling starts at step 2.
        profiled = train.profile_every > 0 and (number - 2) % train.profile_every == 0
        begin = time.perf_counter()
        clock = PartClock(device=self.runtime.device, synchronize=profiled)
        with clock.part("read"):
            batches = self._read(steps)
            upcoming = self._announce(steps, batches)
        self.supervision.rows(batches)
        with clock.watching(self.trainer.parallel.module.parts()) if profiled else nullcontext():
            record = self.trainer.step(batches, clock=clock, profiled=profiled, upcoming=upcoming)
        self.loader.mark_trained(batches[-1])
        skipped, missing = record["kind"] == "skip", record.pop("missing_rows")
        self.ledger.note(batches, step=number, epoch=self.trainer.position.epoch, trained=not skipped)
        if skipped:
            self._record_skip(record)
        if missing:
            self._record_quarantine(number)
        if skipped:
            return
        self._flag_spike(record, batches)
        recorded = number % train.record_every == 0 or number == self.total_steps
        if recorded:
            record |= self.trainer.imbalance.record(self.runtime)
        seconds = time.perf_counter() - begin
        parts = clock.seconds() if profiled else None
        self.throughput.add(record, seconds=seconds, parts=parts)
        if recorded:
            self._record_step(record, seconds=seconds, parts=parts, peak=peak)

    def _read(self, steps: Iterator[list[Batch]]) -> list[Batch]:
        """The next step's batches. Data that cannot be read here stops every rank at this step, not this one alone."""
        coming, self._announced = self._announced or self._fetch(steps), None
        if isinstance(coming, Exception):
            self.trainer.stop_together(coming)
        self.trainer.position.epoch = epoch_of(self.loader, coming[0])
        return coming

    def _fetch(self, steps: Iterator[list[Batch]]) -> list[Batch] | Exception:
        """The batches of one more step, or why there can be none."""
        failed = self.saver.failure()
        if failed is not None:
            return failed
        try:
            return next(steps)
        except ExchangeError:  # no failed read: there may be nobody left to tell
            raise
        except Exception as error:  # whatever it is: the other ranks wait for this one
            return error

    def _announce(self, steps: Iterator[list[Batch]], batches: list[Batch]) -> list[Batch] | Exception | None:
        """What the next step will train, so that this one can make it ready; None before an evaluation, a checkpoint,
        another epoch or the end, which then find no step begun.
        """
        step = self.trainer.position.step + 1
        ends = ends_epoch(self.loader, batches[-1])
        if not self.config.parallel.overlap or ends or self._saves_at(step) or self._evaluates_at(step):
            return None
        self._announced = self._fetch(steps)
        return self._announced

    def _record_skip(self, record: dict[str, Any]) -> None:
        self._write(record)
        count, limit = record["skipped_steps"], record["max_skipped_steps"]
        self.display.say(f"STEP {record['step']} LEFT OUT ({count} of at most {limit}): {record['reason']}")

    def _flag_spike(self, record: dict[str, Any], batches: list[Batch]) -> None:
        """Note a step that stands out, with the samples of all ranks. The figures are the same on all of them."""
        spike = self.spikes.look(loss=record["loss"], grad_norm=record["grad_norm"])
        if spike is None:
            return
        samples = self.runtime.gather_rows(torch.cat([batch.sample_ids.cpu() for batch in batches])).tolist()
        self._write({"kind": "spike", "step": record["step"], **vars(spike), "sample_ids": samples})
        self.display.say(
            f"SPIKE at step {record['step']}: {spike.figure} {spike.value:.4g}, median before {spike.median:.4g}, "
            f"{spike.distance:.0f} spreads above; its {len(samples)} samples are in metrics.jsonl"
        )

    def _check_replicas(self, step: int) -> None:
        every = self.config.train.replica_check_every
        if every and (step % every == 0 or self._saves_at(step)):
            copied = copied_tensors(self.trainer.parallel, self.trainer.optimizer, self.runtime)
            check_replicas(copied, self.runtime, step=step)

    def _record_quarantine(self, step: int) -> None:
        """Rows of this step are lost: note which row groups, and stop all ranks where it is too much."""
        groups = self.quarantine.exchange(self.runtime)
        lost, limit = self.trainer.position.quarantined_samples, self.config.data.max_quarantined_rows
        if groups:
            self._write({"kind": "quarantine", "step": step, "quarantined_samples": lost, "groups": groups})
        for group in groups:
            self.display.say(f"QUARANTINED, not trained: {group['reason']}")
        check_cap(lost, limit, groups, step=step)

    def _record_step(
        self, record: dict[str, Any], *, seconds: float, parts: dict[str, float] | None, peak: float
    ) -> None:
        rows, events = record.pop("rows"), record.pop("events")
        record |= {
            "seconds": seconds,
            "samples_per_s": rows / seconds,
            "tokens_per_s": events / seconds,
            "flops_per_s": record["flops"] / seconds,
            "mfu": record["flops"] / seconds / peak,
            "memory_bytes": memory_bytes(self.runtime.device),
        }
        if self.trainer.parallel.policies:
            record |= self._policy_counts()
        if parts is not None:
            record["seconds_by_part"] = parts
        self._write(record)
        left = (self.total_steps - record["step"]) * self.throughput.seconds_per_step()
        self.display.show(record, seconds_left=left)

    def _save_and_evaluate(self) -> None:
        """The checkpoint comes first: what was trained must outlive an evaluation that fails."""
        step = self.trainer.position.step
        self._check_replicas(step)
        if self._saves_at(step):
            self.supervision.enter("save", step=step)
            self.ledger.commit(step)
            self.saver.save(self.trainer, self.loader)
        self._record_saves()
        if self._evaluates_at(step):
            self._evaluate()
        self._evaluate_window()

    def _saves_at(self, step: int) -> bool:
        every = self.config.train.checkpoint_every
        return step == self.total_steps or bool(every and step % every == 0)

    def _policy_counts(self) -> dict[str, dict[str, int]]:
        """Ids seen, and those outside their table, by feature with a policy; over all ranks since this process began,
        evaluations included.
        """
        counts = self.trainer.parallel.tables.policy_counts()
        own = torch.tensor([[found["ids"], found["outside"]] for found in counts.values()], dtype=torch.float64)
        seen, outside = self.runtime.sum(own).long().t().tolist()
        found = {
            "ids_seen": dict(zip(counts, seen, strict=True)),
            "ids_outside": dict(zip(counts, outside, strict=True)),
        }
        for kind in ("inserted", "evicted"):  # of the feature's table, the same on all ranks
            if any(kind in count for count in counts.values()):
                found[f"ids_{kind}"] = {feature: count[kind] for feature, count in counts.items() if kind in count}
        return found

    def _record_saves(self) -> None:
        for record in self.saver.records():
            self._write(record)

    def _evaluates_at(self, step: int) -> bool:
        every = self.config.train.eval_every
        return step == self.total_steps or bool(every and step % every == 0)

    def _misses_evaluation(self) -> bool:
        """Whether a resumed run stopped between the checkpoint of its step and the evaluation; the last step of a
        finished run is evaluated once more, for the outcome.
        """
        step = self.trainer.position.step
        return step > 0 and self._evaluates_at(step) and (self._lacks_evaluation() or step == self.total_steps)

    def _lacks_evaluation(self) -> bool:
        """Whether metrics.jsonl has no evaluation at the present step. A collective."""
        main, step = self.runtime.is_main, self.trainer.position.step
        return self.runtime.from_main(str(int(main and self.directory.has_evaluation(step)))) == "0"

    def _lacks_window(self) -> bool:
        """Whether metrics.jsonl has no evaluation, at the present step, of all that is ahead of it. A collective."""
        lacks = False
        if self.runtime.is_main:
            file, step = self.directory.metrics_file, self.trainer.position.step
            lacks = lacks_window(self.loader, read_records(file) if file.exists() else (), step=step)
        return self.runtime.from_main(str(int(lacks))) == "1"

    def _evaluate_window(self) -> None:
        """At the end of a window of time: how well the model predicts the next one."""
        stream = evaluates_window(self.loader)
        if stream is None:
            return
        config = self._evaluation_config()
        record = evaluate_next_window(stream, self.trainer, config=config, supervision=self.supervision)
        if record is not None:
            self._write(record)
            window = record["time_window"]
            lost = f" ({record['missing_rows']} rows cannot be used)" if record["missing_rows"] else ""
            told = f"window {window['trained']} trained, predicted {window['evaluated']}{lost}: {_figures(record)}"
            self.display.say(told)

    def _evaluate(self) -> None:
        self.supervision.enter("evaluate", step=self.trainer.position.step)
        started = time.perf_counter()
        loader = build_loader(
            self.data,
            split="eval",
            config=self._evaluation_config(),
            rank=self.runtime.rank,
            world_size=self.runtime.world_size,
        )
        try:
            watched = self.supervision.evaluating(loader, step=self.trainer.position.step)
            predictions = evaluate.predict(
                self.trainer.parallel, watched, schema=self.schema, runtime=self.runtime, cut=self.trainer.cut
            )
        finally:
            loader.close()
        if not self.runtime.is_main:
            return
        step, tasks = self.trainer.position.step, self.trainer.tasks
        if self.config.train.predictions:
            evaluate.write_predictions(self.directory.predictions_file(step), predictions, tasks)
        self._last_eval = evaluate.evaluation_record(predictions, tasks=tasks, step=step, started=started)
        self._write(self._last_eval)
        self.display.say(f"evaluated at step {step}: {_figures(self._last_eval)}")

    def _evaluation_config(self) -> LoaderConfig:
        data = self.config.data
        return LoaderConfig(
            global_batch_size=self.config.train.eval_batch_size,
            shuffle=False,
            max_length=data.max_length,
            prefetch=data.prefetch,
            readers=data.readers,
            open_ids=self.config.tables.open_ids(),
            features=data.features,
            labels=data.labels,
        )

    def _peak_flops_per_s(self) -> float:
        """Peak over all ranks: given per device, or measured on every rank at the same time."""
        given = self.config.train.peak_flops_per_s
        self.runtime.barrier()
        mine = matmul_peak_flops_per_s(self.runtime.device) if given is None else given
        return float(self.runtime.sum(torch.tensor([mine], dtype=torch.float64)))

    def _start_record(self, peak: float, resumed_from: int | None, survey: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "kind": "start",
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "resumed_from": resumed_from,
            "config": to_json(self.config),
            "world_size": self.runtime.world_size,
            "parameters": parameter_counts(self.trainer.parallel),
            "table_placement": self.trainer.parallel.tables.placement(),
            "peak_flops_per_s": peak,
            "peak_source": "measured" if self.config.train.peak_flops_per_s is None else "given",
            "data": survey,
            "total_steps": self.total_steps,
        }

    def _surveyed(self) -> bool:
        rows = sum(file.rows for file in self.schema.files)
        return rows <= self.config.train.survey_rows and not self.config.data.max_quarantined_rows

    def _end_record(self, seconds: float, resumed_from: int | None) -> dict[str, Any]:
        """`seconds` and "throughput" are of this process alone, which trained what came after `resumed_from`."""
        task = self.trainer.tasks[0]
        floors: dict[str, dict[str, Any]] = {}
        if self.runtime.is_main and self._surveyed():
            floors = counting_floors(self.data, self.schema, task, say=self.display.say)
        return {
            "kind": "end",
            "step": self.trainer.position.step,
            "whole_epochs": whole_epochs(self.loader, self.config, self.trainer.position.step),
            **epoch_rows(self.loader, self.config, sum(f.rows for f in self.schema.files if f.split == "train")),
            "resumed_from": resumed_from,
            "seconds": seconds,
            "throughput": self.throughput.summary(),
            "floors": floors,
            "best_ne": best_possible_ne(self.schema, task),
            "status": "completed",
            **self.trainer.imbalance.record(
                self.runtime
            ),  # of steps behind the last record, where the last was left out
        }

    def _write(self, record: dict[str, Any]) -> None:
        if self._sinks is not None:
            self._sinks.write(record)


def _tell_if_slow(rank: int, after_step: int) -> threading.Timer:
    """Write the present exception where closing down takes longer than a second: the watchdog may end the process
    before it is told as usual.
    """
    what = f"rank {rank}: the run failed after step {after_step}, and its loader is slow to close:"
    text = f"{what}\n{traceback.format_exc()}"
    timer = threading.Timer(_CLOSING_SECONDS, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    return timer


def _figures(record: dict[str, Any]) -> str:
    return "  ".join(f"{t} NE {_show(m['ne'])} AUC {_show(m['auc'])}" for t, m in record["tasks"].items())


def _show(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
