"""Reads a run directory: everything the report knows comes from here, and nothing from anywhere else.

Files of a run: `config.json`, `command.txt`, `versions.json`, `metrics.jsonl` and `predictions-<step>.parquet`. A run
that crashed leaves only some of them; what is absent is noted in `RunData.notes` and the rest is still read. A file
that is there but says nonsense is the reader's problem to know: ValueError with file and line.

`metrics.jsonl` is read line by line into one float64 column per figure (8 bytes a step and figure), since a long run
has more steps than dicts fit in memory. Where a resumed run wrote a step twice, the later record counts.

A resumed run has a `start` record for every process. The `end` record's seconds and throughput are of the last process
alone, so figures of the whole run are made from the train records here, and never from that one.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PREDICTIONS_PATTERN = re.compile(r"predictions-(\d+)\.parquet")
KINDS = ("start", "train", "eval", "resume", "end", "skip", "spike", "quarantine", "checkpoint", "progressive")
WARM_UP_STEPS = 3  # outcome.WARM_UP_STEPS, which cannot be imported without torch


@dataclass(frozen=True, kw_only=True)
class TrainLog:
    """The `train` records as columns, one row a step, steps ascending.

    steps     (S,) int64
    columns   figure -> (S,) float64, NaN where the record had null or nothing. Nested figures are dotted:
              {"loss_by_task": {"click": 0.4}} becomes "loss_by_task.click".
    repeated  steps that occurred more than once (a resumed run); the last record of each is kept
    process_step  (S,) int64, how many steps the process that wrote the record had trained with it: 1 is its first
    """

    steps: np.ndarray
    process_step: np.ndarray
    columns: dict[str, np.ndarray]
    repeated: int

    def column(self, name: str) -> np.ndarray:
        """The column, or all NaN if no record had it."""
        return self.columns.get(name, np.full(len(self.steps), np.nan))

    def steady(self) -> np.ndarray:
        """(S,) bool: all but the first WARM_UP_STEPS of every process; all if there are no others."""
        later: np.ndarray = self.process_step > WARM_UP_STEPS
        return later if later.any() else np.ones(len(self.steps), bool)

    def steady_column(self, name: str) -> np.ndarray:
        """The steady steps' values of a column that are not NaN."""
        values = self.column(name)[self.steady()]
        return values[np.isfinite(values)]

    def rate(self, name: str) -> float:
        """A figure that is per second, over all steady steps: 10/s for 1 s and 40/s for 3 s are 130 in 4 s, 32.5/s."""
        seconds, values = self.column("seconds"), self.column(name)
        counted = self.steady() & np.isfinite(seconds * values)
        total = float(seconds[counted].sum())
        return float((seconds * values)[counted].sum()) / total if total > 0 else math.nan

    def step_means(self, prefix: str, *, steady: bool) -> tuple[dict[str, float], int]:
        """Mean of each figure of a group over the steps that have it, and how many steps those are.

        steady: leave out every process's warm-up, unless nothing else has the group.
        """
        group = self.group(prefix)
        had = np.zeros(len(self.steps), bool)
        for values in group.values():
            had |= np.isfinite(values)
        if steady and (had & self.steady()).any():
            had &= self.steady()
        means = {name: float(np.nanmean(v[had])) for name, v in group.items() if np.isfinite(v[had]).any()}
        return means, int(had.sum())

    def elapsed_seconds(self) -> np.ndarray:
        """(S,) seconds spent in training steps up to each record.

        A run that records every k-th step is taken to have spent as long in the steps between as in the recorded one:
        steps 1, 3 with seconds 2, 4 give 2 and 2 + 2 * 4 = 10.
        """
        return np.cumsum(np.nan_to_num(self.column("seconds")) * np.diff(self.steps, prepend=0))

    def group(self, prefix: str) -> dict[str, np.ndarray]:
        """Columns below a nested figure: group("loss_by_task") -> {"click": ...}, in order of first occurrence."""
        start = prefix + "."
        return {name[len(start) :]: values for name, values in self.columns.items() if name.startswith(start)}


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One run. Dicts are the JSON as written, with NaN and infinities turned into None.

    evals        the `eval` records by step, ascending
    end          the `end` record, if the last start of the run reached its end
    incidents    the `skip`, `spike` and `quarantine` records by step; of one kind and step the last written
    saves        the `checkpoint` records by step, the last written of each
    progressive  the `progressive` records by step: evaluations of the next window of time
    predictions  the predictions file of the highest step
    notes        what is missing or odd, one sentence each
    """

    directory: Path
    config: dict[str, Any] | None
    command: str | None
    versions: dict[str, Any] | None
    starts: tuple[dict[str, Any], ...]
    train: TrainLog
    evals: tuple[dict[str, Any], ...]
    end: dict[str, Any] | None
    incidents: tuple[dict[str, Any], ...]
    saves: tuple[dict[str, Any], ...]
    progressive: tuple[dict[str, Any], ...]
    predictions: Path | None
    predictions_step: int | None
    notes: tuple[str, ...]

    @property
    def start(self) -> dict[str, Any]:
        """The last `start` record, or an empty dict."""
        return self.starts[-1] if self.starts else {}

    @property
    def last_step(self) -> int:
        """The highest step that any record speaks of; 0 if nothing was trained."""
        ends = [int(self.end["step"])] if self.end else []
        return max([0, *self.train.steps.tolist()[-1:], *(int(record["step"]) for record in self.evals), *ends])

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task names in the order in which the run wrote them."""
        names: dict[str, None] = {}
        for record in self.evals:
            names.update(dict.fromkeys(record["tasks"]))
        for prefix in ("loss_by_task", "window_ne"):
            names.update(dict.fromkeys(self.train.group(prefix)))
        return tuple(names)


def read_run(directory: Path | str) -> RunData:
    """Reads the run directory at `directory`.

    Raises ValueError if it is not a run directory, or if a file in it is broken (named with its line).
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory}: expected a run directory, but there is no such directory.")
    if not any((directory / name).is_file() for name in ("metrics.jsonl", "config.json", "command.txt")):
        raise ValueError(
            f"{directory}: not a run directory: expected metrics.jsonl, config.json or command.txt in it, found none. "
            "Pass the directory that `gemline train` printed at its start."
        )
    notes: list[str] = []
    config = _read_json(directory / "config.json", notes)
    versions = _read_json(directory / "versions.json", notes)
    command = _read_text(directory / "command.txt", notes)
    metrics = _read_metrics(directory / "metrics.jsonl", notes)
    predictions_step, predictions = _last_predictions(directory, notes)
    return RunData(
        directory=directory,
        config=config,
        command=command,
        versions=versions,
        starts=tuple(metrics.starts),
        train=metrics.log.finish(),
        evals=tuple(metrics.evals[step] for step in sorted(metrics.evals)),
        end=metrics.end,
        incidents=tuple(metrics.incidents[key] for key in sorted(metrics.incidents)),
        saves=tuple(metrics.saves[step] for step in sorted(metrics.saves)),
        progressive=tuple(metrics.progressive[step] for step in sorted(metrics.progressive)),
        predictions=predictions,
        predictions_step=predictions_step,
        notes=tuple(notes),
    )


class _Columns:
    """Grows one array of doubles per figure; a figure that first occurs late is filled up with NaN."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.process_step = array("q")
        self.columns: dict[str, array[float]] = {}

    def add(self, step: int, figures: dict[str, float], *, process_step: int) -> None:
        self.steps.append(step)
        self.process_step.append(process_step)
        length = len(self.steps)
        for name, value in figures.items():
            column = self.columns.setdefault(name, array("d"))
            column.extend([math.nan] * (length - 1 - len(column)))
            column.append(value)

    def finish(self) -> TrainLog:
        steps = np.array(self.steps, dtype=np.int64)
        # The last record of each step: np.unique returns first positions, so look from the back.
        kept_steps, from_back = np.unique(steps[::-1], return_index=True)
        keep = len(steps) - 1 - from_back
        columns = {}
        for name, values in self.columns.items():
            full = np.full(len(steps), np.nan)
            full[: len(values)] = np.array(values, dtype=np.float64)
            columns[name] = full[keep]
        process_step = np.array(self.process_step, dtype=np.int64)[keep]
        repeated = len(steps) - len(kept_steps)
        return TrainLog(steps=kept_steps, process_step=process_step, columns=columns, repeated=repeated)


@dataclass
class _Metrics:
    log: _Columns = field(default_factory=_Columns)
    starts: list[dict[str, Any]] = field(default_factory=list)
    evals: dict[int, dict[str, Any]] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    incidents: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    saves: dict[int, dict[str, Any]] = field(default_factory=dict)
    progressive: dict[int, dict[str, Any]] = field(default_factory=dict)
    resumes: int = 0
    before: int | None = 0  # the step after which the present process began; None = one before its first record
    unknown: dict[str, int] = field(default_factory=dict)


def _read_metrics(path: Path, notes: list[str]) -> _Metrics:
    metrics = _Metrics()
    if not path.is_file():
        notes.append("metrics.jsonl is missing: no losses, metrics or times can be shown.")
        return metrics
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line, parse_constant=lambda _: None)
            except ValueError as error:
                if not line.endswith(b"\n"):  # only the last line can lack its end: the job died while writing it
                    notes.append(f"metrics.jsonl: line {number} is cut off (the job died while writing it); ignored.")
                    break
                raise ValueError(
                    f"{path}, line {number}: expected one JSON object, got {_shorten(line)} ({error}). "
                    "Remove or repair this line."
                ) from error
            _add_record(metrics, record, f"{path}, line {number}")
    again = metrics.resumes + max(0, len(metrics.starts) - 1)
    if again:
        notes.append(
            f"The run was stopped and went on {again} time{'s' if again > 1 else ''}; "
            "a step that was trained twice counts once, as last written."
        )
    if metrics.unknown:
        kinds = ", ".join(f"{kind!r} ({count})" for kind, count in metrics.unknown.items())
        notes.append(f"metrics.jsonl has records of kinds that this report does not know, not shown: {kinds}.")
    _note_gaps(metrics, notes)
    return metrics


def _note_gaps(metrics: _Metrics, notes: list[str]) -> None:
    if not metrics.starts:
        notes.append("metrics.jsonl has no start record: sizes of the model and facts about the data are not known.")
    if not metrics.log.steps:
        notes.append("metrics.jsonl has no train record: no step was finished.")
    if not metrics.evals:
        notes.append("metrics.jsonl has no eval record: the model was not evaluated.")
    if metrics.end is None:
        notes.append("metrics.jsonl has no end record: the run has not finished, or it was stopped or crashed.")


def _add_record(metrics: _Metrics, record: Any, where: str) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected one JSON object, got {_shorten(record)}.")
    kind = record.get("kind")
    if not isinstance(kind, str):
        raise ValueError(f'{where}: expected the key "kind" (one of {", ".join(KINDS)}), got {_shorten(kind)}.')
    stepped = kind in KINDS and kind not in ("start", "resume")
    if stepped and (type(record.get("step")) is not int or record["step"] < 0):
        raise ValueError(f'{where}: expected "step" to be an integer >= 0, got {_shorten(record.get("step"))}.')
    if kind == "train":
        if metrics.before is None:
            metrics.before = record["step"] - 1
        metrics.log.add(record["step"], _figures(record, where), process_step=record["step"] - metrics.before)
    elif kind == "eval":
        metrics.evals[record["step"]] = _checked_eval(record, where)
    elif kind == "progressive":
        window = _mapping(record.get("time_window"), f'{where}: "time_window"')
        metrics.progressive[record["step"]] = {**_checked_eval(record, where), "time_window": window}
    elif kind == "start":
        resumed_from = record.get("resumed_from")
        metrics.before = resumed_from if type(resumed_from) is int else None if metrics.starts else 0
        metrics.starts.append(record)
        metrics.end = None
    elif kind == "resume":
        metrics.resumes += 1
        metrics.before = record["step"] if type(record.get("step")) is int else None
        metrics.end = None
    elif kind == "end":
        metrics.end = _checked_end(record, where)
    elif kind == "checkpoint":
        metrics.saves[record["step"]] = record
    elif kind in ("skip", "spike", "quarantine"):
        metrics.incidents[record["step"], kind] = record
    else:
        metrics.unknown[kind] = metrics.unknown.get(kind, 0) + 1


# What a train record holds besides figures that vary; a string or a list here is a broken record.
_FIGURES = ("epoch", "samples", "tokens", "loss", "learning_rate", "grad_norm", "seconds", "samples_per_s")
_FIGURES += ("tokens_per_s", "flops", "flops_per_s", "mfu", "memory_bytes")
_GROUPS = ("loss_by_task", "window_ne", "flops_by_part", "seconds_by_part", "ids_seen", "ids_outside")
_IMBALANCE = ("imbalance", "imbalance_mean", "imbalance_worst", "imbalance_steps")


def _figures(record: dict[str, Any], where: str) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name in _FIGURES:
        figures[name] = _number(record.get(name), f'{where}: "{name}"')
    for group in (*_GROUPS, *_IMBALANCE):
        for name, value in _checked_group(record, group, where).items():
            figures[f"{group}.{name}"] = value
    return figures


def _checked_group(record: dict[str, Any], group: str, where: str) -> dict[str, float]:
    values = _mapping(record.get(group), f'{where}: "{group}"')
    return {name: _number(value, f'{where}: "{group}.{name}"') for name, value in values.items()}


def _checked_eval(record: dict[str, Any], where: str) -> dict[str, Any]:
    tasks = {}
    for task, values in _mapping(record.get("tasks"), f'{where}: "tasks"').items():
        values = _mapping(values, f'{where}: "tasks.{task}"')
        tasks[task] = {name: _number(value, f'{where}: "tasks.{task}.{name}"') for name, value in values.items()}
    return {**record, "tasks": tasks}


def _checked_end(record: dict[str, Any], where: str) -> dict[str, Any]:
    floors = {}
    for name, values in _mapping(record.get("floors"), f'{where}: "floors"').items():
        values = _mapping(values, f'{where}: "floors.{name}"')
        floors[name] = {key: value for key, value in values.items() if isinstance(value, (int, float, str))}
    throughput = _mapping(record.get("throughput"), f'{where}: "throughput"')
    imbalance = {group: _checked_group(record, group, where) for group in _IMBALANCE}
    return {**record, "floors": floors, "throughput": throughput, **imbalance}


def _number(value: Any, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where}: expected a number or null, got {_shorten(value)}.")
    return float(value)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, got {_shorten(value)}.")
    return value


def _read_json(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        notes.append(f"{path.name} is missing.")
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg}). Repair or remove the file.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text ({error}). Repair or remove the file.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}, line 1: expected a JSON object, got {_shorten(value)}.")
    return value


def _read_text(path: Path, notes: list[str]) -> str | None:
    if not path.is_file():
        notes.append(f"{path.name} is missing: the exact command is not known.")
        return None
    return path.read_text(encoding="utf-8", errors="replace").strip()


def _last_predictions(directory: Path, notes: list[str]) -> tuple[int | None, Path | None]:
    found = []
    for path in directory.iterdir():
        match = PREDICTIONS_PATTERN.fullmatch(path.name)
        if match and path.is_file():
            found.append((int(match.group(1)), path))
    if not found:
        notes.append("No predictions-<step>.parquet: calibration and ROC curves cannot be drawn.")
        return None, None
    return max(found)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
