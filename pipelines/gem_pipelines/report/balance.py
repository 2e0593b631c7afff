"""What the report says of balance: max over mean across processes of load, time, tokens, bytes and rows, of all
steps: a record says the mean and the worst of those since the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from gem_pipelines.report.drawing import DASHES, MAX_SERIES, SERIES, Panel, draw, step_axis, thin
from gem_pipelines.report.facts import Table
from gem_pipelines.report.run_data import RunData

_NAMES = {
    "load": "predicted load",
    "seconds": "measured work (CUDA: forward)",
    "tokens": "tokens",
    "bytes": "bytes of the batch",
    "rows": "rows",
}


@dataclass(frozen=True, kw_only=True)
class _Figure:
    """One figure of imbalance in R + 1 records: the train records, and the end record, for steps behind the last of
    them. NaN in a record without it.

    means, worst  (R + 1,) over the steps since the record before
    steps         (R + 1,) how many of these have the figure
    """

    means: np.ndarray
    worst: np.ndarray
    steps: np.ndarray

    def mean(self) -> float:
        """Over all steps of the run."""
        return float(np.nansum(self.means * self.steps) / self.steps.sum())


def _figures(run: RunData) -> dict[str, _Figure]:
    """Those that any step has. A record of a version that kept only its own step's counts as that one step."""
    log, end = run.train, run.end or {}
    found = {}
    for name, own in log.group("imbalance").items():
        old = np.isnan(log.column(f"imbalance_steps.{name}"))

        def column(key: str, alone: np.ndarray, name: str = name, old: np.ndarray = old) -> np.ndarray:
            tail = end.get(f"imbalance_{key}", {}).get(name, np.nan)
            return np.append(np.where(old, alone, log.column(f"imbalance_{key}.{name}")), tail)

        steps = np.nan_to_num(column("steps", np.isfinite(own)))
        if steps.any():
            found[name] = _Figure(means=column("mean", own), worst=column("worst", own), steps=steps)
    return found


def imbalance_table(run: RunData) -> Table | None:
    """Mean and largest imbalance of every figure over all steps, recorded or not; None for a run of one process, or of
    a version without them.
    """
    figures = _figures(run)
    if _processes(run) < 2 or not figures:
        return None
    rows = tuple(
        (_NAMES.get(name, name), f"{figure.mean():.3f}", f"{np.nanmax(figure.worst):.3f}")
        for name, figure in figures.items()
    )
    steps = max(int(figure.steps.sum()) for figure in figures.values())
    return Table(
        title="Balance",
        headers=("max over mean of the processes", "mean of steps", "largest step"),
        rows=rows,
        note=f"1 is perfect; over {steps:,} steps of {_processes(run)} processes, also those between records; a step "
        "that was left out has none. Measured work is what one process did itself, without waiting.",
        numeric=frozenset({1, 2}),
    )


def imbalance_panels(run: RunData) -> tuple[Panel, ...]:
    """Imbalance over steps; none for a run of one process, which has nothing to balance."""
    title = "Balance of the processes"
    figures = _figures(run)
    if _processes(run) < 2:
        return ()
    if not figures:
        return (Panel(title=title, caption="", problem="No train record holds imbalance."),)
    between = any((figure.steps > 1).any() for figure in figures.values())
    at = np.append(run.train.steps, run.last_step)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for index, (name, values) in enumerate(list(figures.items())[:MAX_SERIES]):
            x, y = thin(at, values.means)
            marker = "o" if len(x) == 1 else ""
            axes.plot(x, y, color=SERIES[index], linestyle=DASHES[index], label=_NAMES.get(name, name), marker=marker)
            if between:
                x, y = thin(at, values.worst, reduce=np.max)
                axes.plot(x, y, color=SERIES[index], linestyle="", marker=".", markersize=3)
        axes.set_ylabel("max / mean")
        axes.set_ylim(bottom=1.0 - 0.02)
        step_axis(axes)
        axes.legend(loc="upper right")

    caption = "Largest share of a step over the mean share; 1 is perfect."
    if between:
        caption += " Lines: mean of the steps since the record before; points: the worst of them."
    return (draw("imbalance", title, caption, paint),)


def _processes(run: RunData) -> int:
    size = run.start.get("world_size") if run.starts else None
    return size if isinstance(size, int) else 1
