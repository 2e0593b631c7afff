"""Training in the order of time: where a window ends, how many steps there are, and the evaluation on what comes next.

With data.stream_seconds the epochs of the loader are windows of time (gem_data.streaming). At the end of each window,
after the checkpoint of that step, the model is evaluated on the next one, every row of which is strictly later and
which it has not seen: progressive evaluation. With data.drop_last a window may have no batch; it is not trained, and is
evaluated in one with the next that is, so that nothing is trained that was not predicted. All windows together are one
pass over the data, epoch 0.

A record of metrics.jsonl for each: {"kind": "progressive", "step", "time_window": {"trained": 3, "evaluated": 5,
"passed_over": [4], "first", "last"} (seconds of what was evaluated, 4 and 5), "missing_rows", "samples", "tasks",
"seconds"}. missing_rows: of row groups that cannot be used, which are left out as in training where
data.max_quarantined_rows is set.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from gem_data.interface import Batch, Loader, LoaderConfig
from gem_data.streaming import StreamingLoader

from gem_pipelines import evaluate
from gem_pipelines.balance import BalancedLoader
from gem_pipelines.config import RunConfig
from gem_pipelines.errors import ConfigError
from gem_pipelines.supervision import Supervision
from gem_pipelines.trainer import Trainer


def streaming(loader: Loader) -> StreamingLoader | None:
    """The streaming loader that `loader` is, or balances; None where it reads in another order."""
    inner = loader.inner if isinstance(loader, BalancedLoader) else loader
    return inner if isinstance(inner, StreamingLoader) else None


def total_steps(loader: Loader, config: RunConfig) -> int:
    """Optimizer steps of the run. A group of micro-batches does not reach into the next epoch or window.

    Raises ConfigError where a stream has fewer than train.steps.
    """
    accumulate, stream = config.data.accumulate, streaming(loader)
    if stream is None:
        return config.train.steps or config.train.epochs * -(-loader.batches_per_epoch // accumulate)
    held = sum(-(-batches // accumulate) for batches in stream.batches_by_window)
    if (config.train.steps or 0) > held:
        raise ConfigError(
            f"train.steps is {config.train.steps}; the {len(stream.windows)} windows of data.stream_seconds "
            f"{config.data.stream_seconds} hold {held} steps, and a stream is read once: lower it or leave it out"
        )
    return config.train.steps or held


def whole_epochs(loader: Loader, config: RunConfig, step: int) -> int:
    """Epochs that a run has finished after `step` steps; a stream's one epoch is all of its windows."""
    accumulate, stream = config.data.accumulate, streaming(loader)
    batches = (loader.batches_per_epoch,) if stream is None else stream.batches_by_window
    return step // sum(-(-count // accumulate) for count in batches)


def epoch_rows(loader: Loader, config: RunConfig, rows: int) -> dict[str, int]:
    """Rows of an epoch, and how many of them data.drop_last leaves out; `rows` has the training split.

    A stream that grew keeps the edges of windows that had begun, so what its run leaves out only its loader knows.
    """
    stream = streaming(loader)
    if stream is None:
        return {"epoch_rows": rows, "dropped_rows": rows - loader.rows_per_epoch}
    held = sum(window.rows for window in stream.windows)
    size = config.data.global_batch_size
    dropped = sum(window.rows % size for window in stream.windows) if config.data.drop_last else 0
    return {"epoch_rows": held, "dropped_rows": dropped}


def tell_of_no_prediction(loader: Loader, config: RunConfig, *, steps: int) -> str | None:
    """What to say at the start of a stream's run of `steps` in which no window would be predicted before it is trained.

    None where one is. It is no error: a log may grow, and then the next run predicts what came.
    """
    stream = streaming(loader)
    if stream is None:
        return None
    batches = stream.batches_by_window
    first = next(index for index, count in enumerate(batches) if count)
    first_steps = -(-batches[first] // config.data.accumulate)
    groups = sum(len(window.groups) for window in stream.windows)
    told = "no window of time is predicted before it is trained: "
    if first + 1 == len(stream.windows):
        windows = f"{len(batches)} window{'s' * (len(batches) > 1)}"
        held = (
            f"{config.data.source}: its {groups} row group{'s' * (groups > 1)}, seconds {stream.windows[0].first} to "
            f"{stream.windows[-1].last}, is {windows} of data.stream_seconds {config.data.stream_seconds}"
        )
        lower = "Lower data.stream_seconds, or write" if groups > 1 else "Windows are made of whole row groups: write"
        todo = "the data with shorter ones (gemline data prepare, requests or impressions --rows-per-group N)."
        return f"{told}{held}{', of which only the last has a batch' if first else ''}. {lower} {todo}"
    if steps < first_steps:
        return f"{told}train.steps {steps} ends before the first window does, which has {first_steps} steps."
    return None


def epoch_of(loader: Loader, batch: Batch) -> int:
    """0-based pass over the data that `batch` belongs to."""
    return 0 if streaming(loader) is not None else batch.step // loader.batches_per_epoch


def ends_epoch(loader: Loader, batch: Batch) -> bool:
    """Whether `batch`, the last that was handed out, is the last of its epoch or window."""
    stream = streaming(loader)
    first = 0 if stream is None else stream.first_step
    return (batch.step + 1 - first) % loader.batches_per_epoch == 0


def evaluates_window(loader: Loader) -> StreamingLoader | None:
    """The streaming loader where it has trained a window to its end, and another one follows."""
    stream = streaming(loader)
    return stream if stream is not None and stream.at_edge and stream.ahead else None


def lacks_window(loader: Loader, records: Iterable[Mapping[str, Any]], *, step: int) -> bool:
    """Whether `records` of metrics.jsonl have no evaluation at `step` of all that is ahead; a log may have grown."""
    stream = evaluates_window(loader)
    if stream is None:
        return False
    wanted = (stream.ahead[-1].index, stream.ahead[-1].last)
    found = [r["time_window"] for r in records if r["kind"] == "progressive" and r["step"] == step]
    return wanted not in [(window["evaluated"], window["last"]) for window in found]


def evaluate_next_window(
    stream: StreamingLoader, trainer: Trainer, *, config: LoaderConfig, supervision: Supervision
) -> dict[str, Any] | None:
    """The "progressive" record of what is ahead of the window that was trained; None on other ranks than 0."""
    started, step = time.perf_counter(), trainer.position.step
    supervision.enter("evaluate", step=step)
    loader = stream.later(config)
    assert loader is not None
    try:
        counted = _Counted(supervision.evaluating(loader, step=step))
        found = evaluate.predict(
            trainer.parallel, cast(Loader, counted), schema=trainer.schema, runtime=trainer.runtime, cut=trainer.cut
        )
    finally:
        loader.close()
    missing = counted.planned - int(trainer.runtime.sum(torch.tensor(counted.rows)))
    if not trainer.runtime.is_main:
        return None
    *passed, after = stream.ahead
    record = evaluate.evaluation_record(found, tasks=trainer.tasks, step=step, started=started)
    window = {
        "trained": stream.window,
        "evaluated": after.index,
        "passed_over": [window.index for window in passed],
        "first": stream.ahead[0].first,
        "last": after.last,
    }
    return {**record, "kind": "progressive", "time_window": window, "missing_rows": missing}


class _Counted:
    """A loader, and how many rows this rank had of it, and all ranks were to have."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self.rows, self.planned = loader, 0, 0

    def epoch(self) -> Iterator[Batch]:
        for batch in self._loader.epoch():
            self.rows += batch.rows
            self.planned += batch.global_rows
            yield batch
