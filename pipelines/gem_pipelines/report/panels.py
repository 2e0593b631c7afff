"""The figures of the report. Each takes the run and returns a `Panel`, drawn or with the reason why not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gem_pipelines.report.curves import TaskCurves
from gem_pipelines.report.drawing import (
    DASHES,
    GRID,
    INK,
    MAX_SERIES,
    SERIES,
    Panel,
    axis_number,
    count_axis,
    draw,
    shorten,
    step_axis,
    thin,
)
from gem_pipelines.report.facts import Floor, LengthSummary, floors, peak_note
from gem_pipelines.report.run_data import RunData


def _absent(title: str, problem: str) -> Panel:
    return Panel(title=title, caption="", problem=problem)


def loss_panel(run: RunData) -> Panel:
    """Training loss over steps, total and by task."""
    title = "Training loss"
    series = [("total", run.train.column("loss"))]
    by_task = run.train.group("loss_by_task")
    if len(by_task) > 1:
        series += list(by_task.items())
    series = [(name, values) for name, values in series if np.isfinite(values).any()]
    if not series:
        return _absent(title, "No train record holds a loss.")

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for index, (name, values) in enumerate(series[:MAX_SERIES]):
            x, y = thin(run.train.steps, values)
            axes.plot(x, y, color=SERIES[index], linestyle=DASHES[index], label=shorten(name))
            if len(x) == 1:
                axes.plot(x, y, "o", color=SERIES[index])
        axes.set_ylabel("loss")
        step_axis(axes)
        if len(series) > 1:
            axes.legend(loc="upper right")

    caption = "Loss of the training batches."
    if len(run.train.steps) > 400:
        caption += f" Each point is the mean of about {len(run.train.steps) / 400:.0f} steps."
    return draw("loss", title, caption + _more(len(series)), paint)


def _more(count: int) -> str:
    return f" The first {MAX_SERIES} of {count} series are drawn." if count > MAX_SERIES else ""


def ne_panel(run: RunData) -> Panel:
    """Window NE of training and NE of evaluation over steps, against the floors and the best possible NE."""
    title = "Normalized entropy (NE) against the floors"
    window = {t: v for t, v in run.train.group("window_ne").items() if np.isfinite(v).any()}
    levels = [floor for floor in floors(run) if np.isfinite(floor.ne)]
    evals = {task: _eval_series(run, task, "ne") for task in run.tasks}
    evals = {task: series for task, series in evals.items() if len(series[0])}
    if not window and not evals:
        return _absent(title, "Neither a train record nor an eval record holds an NE.")
    tasks = [task for task in run.tasks if task in window or task in evals][: MAX_SERIES - 1]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        seen: list[float] = [floor.ne for floor in levels]
        for index, task in enumerate(tasks):
            if task in window:
                x, y = thin(run.train.steps, window[task])
                axes.plot(x, y, color=SERIES[index], linewidth=1.1, label=f"{shorten(task, 14)}: train window")
                seen += y[len(y) // 2 :].tolist()  # the first steps would squeeze everything else
            if task in evals:
                x, y = evals[task]
                marker = "o" if len(x) <= 40 else ""
                label = f"{shorten(task, 14)}: eval"
                axes.plot(x, y, color=SERIES[index], linewidth=1.6, marker=marker, label=label, linestyle=DASHES[1])
                seen += y.tolist()
        _draw_levels(axes, levels)
        low, high = min(seen), max(seen)
        room = max((high - low) * 0.08, 0.005)
        axes.set_ylim(low - room, high + room)
        axes.set_ylabel("NE (lower is better)")
        step_axis(axes)
        figure.legend(loc="outside lower center", ncols=2)

    lines = len(levels) + sum((task in window) + (task in evals) for task in tasks)
    caption = (
        "Log loss divided by the entropy of the mean label: 1 is what a constant prediction reaches. "
        "Early steps may lie above the frame."
    )
    return draw("ne", title, caption, paint, height=3.1 + 0.2 * ((lines + 1) // 2))


def _draw_levels(axes: Axes, levels: list[Floor]) -> None:
    for index, floor in enumerate(levels):
        style = DASHES[1 + index % (len(DASHES) - 1)]
        name = "best" if floor.name == "best possible" else floor.name
        label = shorten(name, 20) + (f", {shorten(floor.task, 20)}" if floor.task else "") + f" {floor.ne:.4g}"
        axes.axhline(floor.ne, color=INK, linewidth=1.2, linestyle=style, label=label)


def _eval_series(run: RunData, task: str, metric: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(record["step"], record["tasks"].get(task, {}).get(metric, np.nan)) for record in run.evals]
    pairs = [(step, value) for step, value in pairs if np.isfinite(value)]
    return np.array([step for step, _ in pairs]), np.array([value for _, value in pairs])


def calibration_panel(curves: TaskCurves, index: int) -> Panel:
    """Observed rate against mean prediction in quantile bins, with the number of rows of each bin below."""
    title = f"Calibration: {shorten(curves.task, 40)}"
    if not curves.bins:
        return _absent(title, "No row has a prediction, a label and a weight that count." + _weightless([curves]))
    predicted = np.array([b.mean_prediction for b in curves.bins])
    rate = np.array([b.rate for b in curves.bins])
    count = np.array([b.count for b in curves.bins])
    error = 2 * np.sqrt(np.maximum(rate * (1 - rate), 0) / count)
    colour = SERIES[index % MAX_SERIES]

    def paint(figure: Figure) -> None:
        axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[3.2, 1])
        left, right = _room(curves.bins[0].low, curves.bins[-1].high)
        bottom, top = _room(min(predicted.min(), (rate - error).min()), max(predicted.max(), (rate + error).max()))
        axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=DASHES[1], label="perfect")
        axes.errorbar(predicted, rate, yerr=error, color=colour, marker="o", markersize=4, elinewidth=1, label="model")
        axes.set_xlim(left, right)
        axes.set_ylim(bottom, top)
        axes.set_ylabel("observed rate")
        axes.legend(loc="upper left")
        starts = np.array([b.low for b in curves.bins])
        # A bin ends where the next begins, or where its own predictions end, if that comes first.
        ends = np.minimum([b.high for b in curves.bins], [*starts[1:], np.inf])
        widths = np.maximum(ends - starts, (right - left) / 400)
        below.bar(starts, count, widths, align="edge", color=colour, alpha=0.55, edgecolor=INK, linewidth=0.5)
        below.set_ylabel("rows")
        below.set_xlabel("mean prediction of the bin")
        below.set_ylim(0, count.max() * 1.15)
        below.xaxis.set_major_locator(MaxNLocator(6))
        below.yaxis.set_major_locator(MaxNLocator(2))
        below.yaxis.set_major_formatter(axis_number)

    caption = (
        f"{len(curves.bins)} bins with about equal numbers of rows ({count.min():,} to {count.max():,}); whiskers are "
        "two standard errors. Points on the dashed line are calibrated."
    ) + _weightless([curves])
    return draw(f"calibration-{index}", title, caption, paint, height=3.7)


def _weightless(all_curves: Sequence[TaskCurves]) -> str:
    """How many rows were left out for their weight of 0, by task where there are several."""
    found = [curves for curves in all_curves if curves.weightless]
    if not found:
        return ""
    if len(all_curves) == 1:
        return f" {found[0].weightless:,} rows of weight 0 count nowhere."
    return f" Rows of weight 0, which count nowhere: {', '.join(f'{c.task} {c.weightless:,}' for c in found)}."


def _room(low: float, high: float) -> tuple[float, float]:
    """Limits of an axis of probabilities that shows [low, high] with some room."""
    room = max((high - low) * 0.05, 1e-4)
    return max(0.0, low - room), min(1.0, high + room)


def roc_panel(run: RunData, all_curves: tuple[TaskCurves, ...]) -> Panel:
    """ROC curves of all tasks in one figure."""
    title = "ROC curve"
    drawn = [curves for curves in all_curves if curves.roc_fpr is not None]
    undefined = "; ".join(f"{curves.task} is {curves.problem}" for curves in all_curves if curves.problem)
    if not drawn:
        return _absent(title, undefined or "No predictions.")
    last = run.evals[-1]["tasks"] if run.evals else {}

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=DASHES[1], label="chance")
        for index, curves in enumerate(drawn[:MAX_SERIES]):
            auc = last.get(curves.task, {}).get("auc", np.nan)
            label = shorten(curves.task, 20) + (f", AUC {auc:.4f}" if np.isfinite(auc) else "")
            axes.plot(curves.roc_fpr, curves.roc_tpr, color=SERIES[index], linestyle=DASHES[index], label=label)
        axes.set_xlabel("false positive rate")
        axes.set_ylabel("true positive rate")
        axes.set_xlim(-0.01, 1.01)
        axes.set_ylim(-0.01, 1.01)
        axes.legend(loc="lower right")

    caption = f"Predictions of step {run.predictions_step}. Higher and further left is better."
    caption += (f" {undefined}." if undefined else "") + _weightless(all_curves) + _more(len(drawn))
    return draw("roc", title, caption, paint, height=3.7)


def length_panel(summaries: tuple[LengthSummary, ...]) -> Panel:
    """How long the streams of the data are."""
    title = "Lengths of the event streams"
    if not summaries:
        return _absent(title, "The start record holds no lengths of streams.")
    wide = max(summary.length.max() for summary in summaries) > 50

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for index, summary in enumerate(summaries[:MAX_SERIES]):
            axes.plot(
                summary.share,
                summary.length,
                color=SERIES[index],
                linestyle=DASHES[index],
                marker="o",
                markersize=4,
                label=shorten(summary.name),
            )
        axes.set_xlabel("share of rows with at most this length")
        axes.set_ylabel("events per row")
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        if wide:
            axes.set_yscale("symlog", linthresh=10)
        axes.yaxis.set_major_formatter(axis_number)
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left")

    caption = "Quantiles of the training split, one line a stream."
    if wide:
        caption += " The scale is linear up to 10 events and logarithmic above."
    return draw("lengths", title, caption + _more(len(summaries)), paint)


def parts_panel(run: RunData, group: str, title: str, caption: str, *, seconds: bool) -> Panel:
    """Bars of one figure by part of the model, as share of the sum."""
    means, steps = run.train.step_means(group, steady=seconds)
    total = float(sum(means.values()))
    if not means or total <= 0:
        return _absent(title, f"No train record holds {group}.")

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        names = list(means)
        values = np.array([means[name] for name in names])
        axes.barh(range(len(names)), values / total, color=SERIES[0 if seconds else 2], height=0.66)
        axes.set_yticks(range(len(names)), [shorten(name, 16) for name in names])
        axes.invert_yaxis()
        for row, value in enumerate(values):
            text = f"{value * 1e3:.3g} ms" if seconds else axis_number(value)
            axes.text(value / total + 0.012, row, f"{value / total:.1%}  ({text})", va="center", fontsize=9.5)
        axes.set_xlim(0, min(1.0, values.max() / total) * 1.0 + 0.36)
        axes.set_xticks([tick for tick in (0, 0.2, 0.4, 0.6, 0.8, 1) if tick <= values.max() / total + 0.2])
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.set_xlabel("share of a step")
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)

    height = 1.0 + 0.3 * len(means)
    return draw(group.replace("_", "-"), title, f"{caption} Mean of {steps:,} steps.", paint, height=max(2.2, height))


def throughput_panel(run: RunData) -> Panel:
    """Samples/s and tokens/s over steps, one above the other."""
    title = "Throughput"
    series = [("samples/s", run.train.column("samples_per_s")), ("tokens/s", run.train.column("tokens_per_s"))]
    return _stack(run, "throughput", title, "Of each training step; pauses between steps are not counted.", series)


def flops_panel(run: RunData) -> Panel:
    """Achieved FLOP/s and MFU over steps."""
    series = [("FLOP/s", run.train.column("flops_per_s")), ("MFU", run.train.column("mfu"))]
    caption = f"FLOPs count real lengths and masks, not padding. {peak_note(run)}".strip()
    return _stack(run, "flops", "Achieved FLOP/s", caption, series)


def optimizer_panel(run: RunData) -> Panel:
    """Learning rate and gradient norm over steps."""
    series = [("learning rate", run.train.column("learning_rate")), ("gradient norm", run.train.column("grad_norm"))]
    return _stack(run, "optimizer", "Optimizer", "Dense learning rate, and the gradient norm before clipping.", series)


def _stack(run: RunData, identity: str, title: str, caption: str, series: list[tuple[str, np.ndarray]]) -> Panel:
    series = [(name, values) for name, values in series if np.isfinite(values).any()]
    if not series:
        return _absent(title, "No train record holds these figures.")

    def paint(figure: Figure) -> None:
        stack = np.atleast_1d(figure.subplots(len(series), 1, sharex=True))
        for index, (axes, (name, values)) in enumerate(zip(stack, series, strict=True)):
            x, y = thin(run.train.steps, values)
            axes.plot(x, y, color=SERIES[index], marker="o" if len(x) == 1 else "")
            axes.set_ylabel(name)
            axes.set_ylim(0, max(y.max() * 1.1, 1e-30))
            count_axis(axes.yaxis)
        step_axis(stack[-1])
        figure.align_ylabels(list(stack))

    return draw(identity, title, caption, paint, height=3.3)


def memory_panel(run: RunData) -> Panel:
    """Memory of the process over training time."""
    title = "Memory"
    memory = run.train.column("memory_bytes")
    if not np.isfinite(memory).any():
        return _absent(title, "No train record holds memory_bytes.")
    seconds = run.train.elapsed_seconds()
    timed = seconds[-1] > 0
    unit, size = ("GiB", 2**30) if np.nanmax(memory) >= 2**30 else ("MiB", 2**20)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        x, y = thin(seconds if timed else run.train.steps, memory / size)
        axes.plot(x, y, color=SERIES[3], marker="o" if len(x) == 1 else "")
        axes.fill_between(x, y, color=SERIES[3], alpha=0.15, linewidth=0)
        axes.set_ylim(0, y.max() * 1.12)
        axes.set_ylabel(f"memory ({unit})")
        axes.set_xlabel("seconds of training" if timed else "step")
        axes.axhline(y.max(), color=GRID, linewidth=0.8)

    peak = f"Largest value: {np.nanmax(memory) / size:.4g} {unit}."
    return draw("memory", title, f"Memory of the process as the train records state it. {peak}", paint)
