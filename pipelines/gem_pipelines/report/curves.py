"""Calibration and ROC curves from a predictions file of any size, in fixed memory.

Every prediction is counted in a cell: the upper bits of its float32 bit pattern (monotone for numbers >= 0), so that
numbers closer than 2^-13 of their size share a cell. About a million cells (25 MB per task) hold what both curves
need, whatever the number of rows. Sorting all rows instead would be exact, and would need the whole file in memory.
The curves are for the eye; the figures in the result table come from the run's own exact metrics. As in those, a row of
weight 0 counts nowhere; how many there are is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_SHIFT = 10
_CELLS = (int(np.float32(1.0).view(np.uint32)) >> _SHIFT) + 1


@dataclass(frozen=True, kw_only=True)
class CalibrationBin:
    """One quantile bin: `low` and `high` bound the predictions, means are weighted, `count` counts rows with weight.

    Example: three rows with predictions 0.1, 0.2, 0.3, labels 0, 0, 1 and weights 1, 1, 2 in one bin:
    mean_prediction (0.1 + 0.2 + 0.6) / 4 = 0.225, rate 2 / 4 = 0.5, count 3.
    """

    low: float
    high: float
    count: int
    weight: float
    mean_prediction: float
    rate: float


@dataclass(frozen=True, kw_only=True)
class TaskCurves:
    """Curves of one task; `problem` says why a curve is undefined.

    roc_fpr, roc_tpr  (P,) float64 from (0, 0) to (1, 1), or None with `problem` set
    rows              of the file: those below, and those that the curves are made from
    weightless        rows of weight 0, whatever else they hold: they count in no bin and in no curve
    skipped           rows with weight whose prediction is not a number in [0, 1], or whose label is not 0 or 1, and
                      rows whose weight is not a number >= 0
    """

    task: str
    rows: int
    weightless: int
    skipped: int
    bins: tuple[CalibrationBin, ...]
    roc_fpr: np.ndarray | None
    roc_tpr: np.ndarray | None
    problem: str | None


class _Cells:
    """Sums per cell of one task: rows, weight, weight of positives, weighted prediction."""

    def __init__(self) -> None:
        self.count = np.zeros(_CELLS)
        self.weight = np.zeros(_CELLS)
        self.positive = np.zeros(_CELLS)
        self.predicted = np.zeros(_CELLS)
        self.rows = 0
        self.weightless = 0
        self.skipped = 0

    def add(self, label: np.ndarray, prediction: np.ndarray, weight: np.ndarray) -> None:
        good = (prediction >= 0) & (prediction <= 1) & ((label == 0) | (label == 1))
        good &= (weight > 0) & np.isfinite(weight)
        weightless = int((weight == 0).sum())
        self.rows += len(label)
        self.weightless += weightless
        self.skipped += len(label) - weightless - int(good.sum())
        label, prediction, weight = label[good], prediction[good], weight[good]
        cell = np.maximum(prediction.astype(np.float32), 0).view(np.uint32) >> _SHIFT  # maximum: no sign bit of -0.0
        self.count += np.bincount(cell, minlength=_CELLS)
        self.weight += np.bincount(cell, weight, minlength=_CELLS)
        self.positive += np.bincount(cell, weight * label, minlength=_CELLS)
        self.predicted += np.bincount(cell, weight * prediction, minlength=_CELLS)


def read_curves(path: Path, *, bins: int = 15, points: int = 300, batch_rows: int = 1 << 18) -> tuple[TaskCurves, ...]:
    """Curves of every task in a predictions file (columns label.<t>, prediction.<t> and, optionally, weight.<t>).

    Raises ValueError naming the file if it is not such a file.
    """
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: expected a Parquet file of predictions ({error}).") from error
    with file:
        names = file.schema_arrow.names
        tasks = [name.removeprefix("prediction.") for name in names if name.startswith("prediction.")]
        if not tasks:
            raise ValueError(f"{path}: expected columns prediction.<task>, found {', '.join(names) or 'none'}.")
        lacking = [f"label.{task}" for task in tasks if f"label.{task}" not in names]
        if lacking:
            raise ValueError(f"{path}: expected the column {lacking[0]}, found {', '.join(names)}.")
        found = []
        for task in tasks:
            try:
                cells = _read_cells(file, task, batch_rows)
            except (pa.ArrowException, OSError, ValueError) as error:
                raise ValueError(f"{path}: the columns of task {task!r} cannot be read ({error}).") from error
            found.append(_curves(task, cells, bins, points))
        return tuple(found)


def _read_cells(file: pq.ParquetFile, task: str, batch_rows: int) -> _Cells:
    cells = _Cells()
    columns = [f"label.{task}", f"prediction.{task}"]
    if f"weight.{task}" in file.schema_arrow.names:
        columns.append(f"weight.{task}")
    for batch in file.iter_batches(batch_size=batch_rows, columns=columns):
        values = {name: _doubles(batch.column(name)) for name in batch.schema.names}
        weight = values.get(f"weight.{task}", np.ones(batch.num_rows))
        cells.add(values[f"label.{task}"], values[f"prediction.{task}"], weight)
    return cells


def _curves(task: str, cells: _Cells, bins: int, points: int) -> TaskCurves:
    fpr, tpr, problem = _roc(cells, points)
    return TaskCurves(
        task=task,
        rows=cells.rows,
        weightless=cells.weightless,
        skipped=cells.skipped,
        bins=_calibration(cells, bins),
        roc_fpr=fpr,
        roc_tpr=tpr,
        problem=problem,
    )


def _doubles(column: pa.Array) -> np.ndarray:
    return column.cast(pa.float64()).to_numpy(zero_copy_only=False)  # null becomes NaN


def _calibration(cells: _Cells, bins: int) -> tuple[CalibrationBin, ...]:
    """Bins of about equal row count; rows with equal predictions always share one bin."""
    used = np.flatnonzero(cells.count)
    if not len(used):
        return ()
    passed = np.cumsum(cells.count[used])
    # A cell belongs to the bin in which the middle of its rows lies.
    middle = passed - cells.count[used] / 2
    bin_of = np.minimum((middle / passed[-1] * bins).astype(np.int64), bins - 1)
    result = []
    for index in np.unique(bin_of):
        mine = used[bin_of == index]
        weight = float(cells.weight[mine].sum())
        result.append(
            CalibrationBin(
                low=_cell_value(mine[0]),
                high=_cell_value(mine[-1] + 1),
                count=int(cells.count[mine].sum()),
                weight=weight,
                mean_prediction=float(cells.predicted[mine].sum()) / weight,
                rate=float(cells.positive[mine].sum()) / weight,
            )
        )
    return tuple(result)


def _cell_value(cell: int) -> float:
    """The smallest number of a cell, at most 1."""
    return min(1.0, float(np.array([int(cell) << _SHIFT], dtype=np.uint32).view(np.float32)[0]))


def _roc(cells: _Cells, points: int) -> tuple[np.ndarray | None, np.ndarray | None, str | None]:
    used = np.flatnonzero(cells.weight)[::-1]  # from the highest prediction down
    positive = cells.positive[used]
    negative = cells.weight[used] - positive
    positives, negatives = float(positive.sum()), float(negative.sum())
    if cells.rows == 0:
        return None, None, "undefined: no rows"
    if cells.weightless == cells.rows:
        return None, None, "undefined: no row has weight"
    if positives <= 0 or negatives <= 0:
        only = "0" if positives <= 0 else "1"
        return None, None, f"undefined: all labels with weight are {only}" if len(used) else "undefined: no valid rows"
    tpr = np.concatenate([[0.0], np.cumsum(positive) / positives])
    fpr = np.concatenate([[0.0], np.cumsum(negative) / negatives])
    if len(tpr) > points:
        # Even steps along the curve's length, so that steep and flat parts are drawn equally well.
        along = fpr + tpr
        keep = np.unique(np.searchsorted(along, np.linspace(0, along[-1], points)).clip(0, len(along) - 1))
        keep = np.union1d(keep, [0, len(along) - 1])
        fpr, tpr = fpr[keep], tpr[keep]
    return fpr, tpr, None
