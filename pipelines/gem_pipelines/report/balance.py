"""What the report says of balance: max over mean across processes of load, time, tokens, bytes and rows."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from gem_pipelines.report.drawing import DASHES, MAX_SERIES, SERIES, Panel, draw, step_axis, thin
from gem_pipelines.report.facts import Table
from gem_pipelines.report.run_data import RunData

_NAMES = {
    "load": "predicted load",
    "seconds": "measured work",
    "tokens": "tokens",
    "bytes": "bytes of the batch",
    "rows": "rows",
}


def imbalance_table(run: RunData) -> Table | None:
    """Mean and largest imbalance of every figure; None for a run of one process, or of a version without them."""
    means, steps = run.train.step_means("imbalance", steady=True)
    if _processes(run) < 2 or not means:
        return None
    group = run.train.group("imbalance")
    rows = tuple(
        (_NAMES.get(name, name), f"{mean:.3f}", f"{np.nanmax(group[name]):.3f}") for name, mean in means.items()
    )
    return Table(
        title="Balance",
        headers=("max over mean of the processes", "mean of steps", "largest step"),
        rows=rows,
        note=f"1 is perfect; over {steps:,} steps of {_processes(run)} processes. Measured work is what one process "
        "did itself, without waiting.",
        numeric=frozenset({1, 2}),
    )


def imbalance_panels(run: RunData) -> tuple[Panel, ...]:
    """Imbalance over steps; none for a run of one process, which has nothing to balance."""
    title = "Balance of the processes"
    group = {name: v for name, v in run.train.group("imbalance").items() if np.isfinite(v).any()}
    if _processes(run) < 2:
        return ()
    if not group:
        return (Panel(title=title, caption="", problem="No train record holds imbalance."),)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for index, (name, values) in enumerate(list(group.items())[:MAX_SERIES]):
            x, y = thin(run.train.steps, values)
            marker = "o" if len(x) == 1 else ""
            axes.plot(x, y, color=SERIES[index], linestyle=DASHES[index], label=_NAMES.get(name, name), marker=marker)
        axes.set_ylabel("max / mean")
        axes.set_ylim(bottom=1.0 - 0.02)
        step_axis(axes)
        axes.legend(loc="upper right")

    return (draw("imbalance", title, "Largest share of a step over the mean share; 1 is perfect.", paint),)


def _processes(run: RunData) -> int:
    size = run.start.get("world_size") if run.starts else None
    return size if isinstance(size, int) else 1
