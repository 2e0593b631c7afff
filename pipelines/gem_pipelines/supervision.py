"""What watches a job from inside: the record of what each rank does, the watchdog, and the count of useless restarts.

    supervise(...)      a collective at the start of a run, under its lock; raises RestartLoopError on every rank
    enter(phase, step)  the loop says what it does; rows(batches) with which rows
    close(ended)        at the end

Cost: see flight.py and watchdog.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from gem_data.interface import Batch, Loader

from gem_pipelines.config import TrainConfig
from gem_pipelines.flight import ENDED, FlightRecorder, clear_flights
from gem_pipelines.restarts import RestartLoopError, note_start
from gem_pipelines.rundir import RunDirectory
from gem_pipelines.runtime import Runtime
from gem_pipelines.watchdog import Watchdog


class Supervision:
    """Of one rank of one start. Without recorder and watchdog it does nothing: for jobs that are driven by hand."""

    def __init__(self, recorder: FlightRecorder | None = None, watchdog: Watchdog | None = None) -> None:
        self._recorder, self._watchdog = recorder, watchdog

    def enter(self, phase: str, *, step: int) -> None:
        """This rank begins `phase` ("step", "save", "evaluate", "finish") of `step`."""
        if self._watchdog is not None:
            self._watchdog.enter(phase, step=step)

    def rows(self, batches: Sequence[Batch]) -> None:
        """The rows of the step that this rank is in."""
        if self._recorder is not None:
            one = len(batches) == 1
            ids = batches[0].sample_ids if one else torch.cat([batch.sample_ids for batch in batches])
            index = batches[0].row_index if one else torch.cat([batch.row_index for batch in batches])
            self._recorder.rows(ids.cpu(), index.cpu())

    def evaluating(self, loader: Loader, *, step: int) -> Loader:
        """`loader`, of which each batch is a phase of its own, so that a long evaluation is no standstill."""
        return cast(Loader, _Watched(loader, self, step))

    def failing(self) -> None:
        """The step that this rank is in has failed: its record stays, and the limit counts anew, for what ends it."""
        if self._watchdog is not None:
            self._watchdog.count_anew()

    def close(self, *, ended: bool) -> None:
        """Watch no longer. ended: the run reached its end, so that this start does not count as a failed one."""
        if self._watchdog is not None:
            self._watchdog.stop()
        if self._recorder is not None and ended:
            self._recorder.enter(ENDED, step=self._recorder.step)


class _Watched:
    def __init__(self, loader: Loader, supervision: Supervision, step: int) -> None:
        self._loader, self._supervision, self._step = loader, supervision, step

    def epoch(self) -> Iterator[Batch]:
        for batch in self._loader.epoch():
            self._supervision.enter("evaluate", step=self._step)
            yield batch
        self._supervision.enter("evaluate", step=self._step)


def supervise(
    directory: RunDirectory,
    *,
    config: TrainConfig,
    runtime: Runtime,
    first_step: int,
    automatic: bool,
    files: Sequence[str],
) -> Supervision:
    """Start to watch this rank. A collective.

    first_step  where this start begins
    automatic   nobody decided on this start; False forgets earlier failures
    files       names of the data files

    Raises RestartLoopError on every rank where earlier automatic starts got nowhere.
    """
    told: list[tuple[int, str]] = []

    def note() -> None:
        limit = config.restart_limit
        told.append(
            note_start(directory.supervision, first_step=first_step, automatic=automatic, limit=limit, files=files)
        )
        clear_flights(directory.supervision)

    runtime.on_main(note)
    number, verdict = json.loads(runtime.from_main(json.dumps(told[0]) if told else ""))
    if verdict:
        raise RestartLoopError(verdict + f". To go on nevertheless: gemline train --resume --run-dir {directory.path}")
    recorder = FlightRecorder(directory.supervision, rank=runtime.rank, attempt=number)
    watchdog = Watchdog(
        directory.path,
        recorder,
        rank=runtime.rank,
        attempt=number,
        given_s=config.hang_limit_s,
        before_s=config.timeout_s,
    )
    watchdog.start()
    return Supervision(recorder, watchdog)
