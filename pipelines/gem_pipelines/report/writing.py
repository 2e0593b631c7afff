"""Puts a report together and writes it beside the run."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from gem_pipelines.report import panels as draw
from gem_pipelines.report.balance import imbalance_panels, imbalance_table
from gem_pipelines.report.curves import TaskCurves, read_curves
from gem_pipelines.report.drawing import Panel
from gem_pipelines.report.facts import Table, all_tables, best_possible, floors, length_summaries
from gem_pipelines.report.formatting import count, plain, quantity
from gem_pipelines.report.incidents import incident_table, saves_table
from gem_pipelines.report.markdown import render_markdown
from gem_pipelines.report.page import render_page
from gem_pipelines.report.progressive import progressive_panels, progressive_table
from gem_pipelines.report.run_data import RunData, read_run

MAX_CALIBRATION_PANELS = 4


def write_report(run_dir: Path | str) -> Path:
    """Writes report.html and report.md into a run directory and returns the path of the page.

    Reads nothing but the run directory, and also reports a run that is not finished or crashed: the page then says
    what is missing. The page is one file without scripts and without the network. Same run, same bytes.

    Raises ValueError, naming file and line, if `run_dir` is not a run directory or a file in it is broken.
    """
    run = read_run(run_dir)
    curves, notes = _curves(run)
    notes = (*run.notes, *notes)
    tables = _tables(run)
    page = render_page(run, tables=tables, panels=_panels(run, curves), tiles=_tiles(run), notes=notes)
    _replace(run.directory / "report.md", render_markdown(run, tables=tables, notes=notes))
    path = run.directory / "report.html"
    _replace(path, page)
    return path


def _tables(run: RunData) -> tuple[Table, ...]:
    """Every table; those of windows, balance, checkpoints and incidents stand behind the throughput's."""
    tables = list(all_tables(run))
    more = [progressive_table(run), imbalance_table(run), saves_table(run), incident_table(run)]
    titles = [table.title for table in tables]
    behind = titles.index("Throughput") + 1 if "Throughput" in titles else 0
    tables[behind:behind] = [table for table in more if table is not None]
    return tuple(tables)


def _curves(run: RunData) -> tuple[tuple[TaskCurves, ...], tuple[str, ...]]:
    """The curves, and what is wrong with the predictions. A crash can leave a file without its end: that is a note."""
    if run.predictions is None:
        return (), ()
    try:
        curves = read_curves(run.predictions)
    except ValueError as error:
        return (), (f"The predictions cannot be read: {error}",)
    notes = [
        f"{run.predictions.name}: {curve.skipped:,} of {curve.rows:,} rows of task {curve.task!r} have a prediction "
        "outside [0, 1], a label other than 0 and 1, or a weight that is not a number >= 0; the curves leave them out."
        for curve in curves
        if curve.skipped
    ]
    return curves, tuple(notes)


def _panels(run: RunData, curves: tuple[TaskCurves, ...]) -> tuple[Panel, ...]:
    calibration = [draw.calibration_panel(curve, index) for index, curve in enumerate(curves[:MAX_CALIBRATION_PANELS])]
    if not calibration:
        calibration = [Panel(title="Calibration", caption="", problem="No predictions.")]
    return (
        draw.ne_panel(run),
        *progressive_panels(run),
        draw.loss_panel(run),
        *calibration,
        draw.roc_panel(run, curves),
        draw.length_panel(length_summaries(run)),
        draw.parts_panel(run, "seconds_by_part", "Time by part", "Time of a profiled training step.", seconds=True),
        draw.parts_panel(
            run, "flops_by_part", "FLOPs by part", "Forward and backward, from real lengths and masks.", seconds=False
        ),
        draw.throughput_panel(run),
        draw.flops_panel(run),
        *imbalance_panels(run),
        draw.memory_panel(run),
        draw.optimizer_panel(run),
    )


def _tiles(run: RunData) -> tuple[tuple[str, str], ...]:
    """The handful of figures to see first."""
    tiles: list[tuple[str, str]] = []
    for task, values in list((run.evals[-1]["tasks"] if run.evals else {}).items())[:2]:
        tiles.append((f"NE, {task}", plain(values.get("ne"))))
        tiles.append((f"AUC, {task}", plain(values.get("auc"))))
    levels = [floor for floor in floors(run) if math.isfinite(floor.ne) and floor.name.startswith("floor: ")]
    if levels:
        best = min(levels, key=lambda floor: floor.ne)
        tiles.append(("NE of the best floor" + (f", {best.task}" if best.task else ""), plain(best.ne)))
    for task, ne in list(best_possible(run).items())[:1]:
        tiles.append((f"best possible NE, {task}", plain(ne)))
    rate = run.train.steady_column("samples_per_s")
    if len(rate):
        tiles.append(("samples/s, median step", quantity(float(np.median(rate)))))
    samples = run.train.column("samples")
    if np.isfinite(samples).any():
        tiles.append(("samples seen", count(np.nanmax(samples))))
    return tuple(tiles)


def _replace(path: Path, text: str) -> None:
    """Writes beside the target and renames, so that a reader sees the old report or the new one, never half."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
