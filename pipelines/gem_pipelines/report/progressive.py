"""What the report says of windows of time: each was evaluated before it was trained, by what came earlier alone."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from gem_pipelines.report.drawing import DASHES, MAX_SERIES, SERIES, Panel, draw, shorten, step_axis
from gem_pipelines.report.facts import Table, moment
from gem_pipelines.report.formatting import count, number, plain
from gem_pipelines.report.run_data import RunData

SHOWN_WINDOWS = 50


def progressive_table(run: RunData) -> Table | None:
    """Every window that was evaluated, the latest ones where there are many; None for a run without windows of time."""
    rows = []
    for record in run.progressive:
        window = record["time_window"]
        for task, values in record["tasks"].items():
            rows.append(
                (
                    count(window.get("trained")),
                    ", ".join(count(index) for index in (*window.get("passed_over", ()), window.get("evaluated"))),
                    moment(window.get("first")),
                    count(record["step"]),
                    count(record.get("samples")),
                    task,
                    *(plain(values.get(name)) for name in ("ne", "auc", "calibration")),
                )
            )
    if not rows:
        return None
    hidden = len(rows) - SHOWN_WINDOWS
    note = f"{hidden:,} earlier rows are in metrics.jsonl. " if hidden > 0 else ""
    return Table(
        title="Windows of time",
        headers=("trained up to", "evaluated", "from", "step", "samples", "task", "NE", "AUC", "calibration"),
        rows=tuple(rows[-SHOWN_WINDOWS:]),
        note=note + "Every row of an evaluated window is strictly later than all that was trained until then.",
        numeric=frozenset({0, 1, 3, 4, 6, 7, 8}),
    )


def progressive_panels(run: RunData) -> tuple[Panel, ...]:
    """NE of every next window over steps; none for a run without windows of time."""
    series: dict[str, list[tuple[int, float]]] = {}
    for record in run.progressive:
        for task, values in record["tasks"].items():
            ne = number(values.get("ne"))
            if np.isfinite(ne):
                series.setdefault(task, []).append((record["step"], ne))
    if not run.progressive:
        return ()
    title = "NE of the next window of time"
    if not series:
        return (Panel(title=title, caption="", problem="No window that was evaluated has an NE."),)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for index, (task, pairs) in enumerate(list(series.items())[:MAX_SERIES]):
            x, y = zip(*pairs, strict=True)
            marker = "o" if len(x) <= 40 else ""
            axes.plot(x, y, color=SERIES[index], linestyle=DASHES[index], marker=marker, label=shorten(task))
        axes.set_ylabel("NE (lower is better)")
        step_axis(axes)
        axes.legend(loc="upper right")

    return (draw("progressive", title, "Each window is evaluated before it is trained.", paint),)
