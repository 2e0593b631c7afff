"""The short table at the end of a run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from gem_pipelines.loop import Outcome


def print_outcome(outcome: Outcome) -> None:
    """Model, floors and the best possible NE side by side; then throughput."""
    end, tasks = outcome.end, outcome.evaluation["tasks"]
    table = Table(title=f"evaluation after step {end['step']}")
    for name in ("", "task", "NE", "AUC", "GAUC", "calibration", "rows"):
        table.add_column(name, justify="left" if name in ("", "task") else "right")
    for task, m in tasks.items():
        table.add_row(
            "model", task, *(_show(m[key]) for key in ("ne", "auc", "gauc", "calibration")), f"{m['count']:,}"
        )
    for name, floor in end["floors"].items():
        table.add_row(f"floor: {name}", floor.get("task", ""), _show(floor["ne"]), _show(floor["auc"]), "", "", "")
    if end["best_ne"] is not None:
        first = next(iter(tasks))
        table.add_row("best possible", first, _show(end["best_ne"]), "", "", "", "")
    console = Console()
    console.print(table)
    speed = end["throughput"]
    if speed["samples_per_s"] is not None:
        console.print(
            f"{speed['samples_per_s']:,.0f} samples/s, {speed['tokens_per_s']:,.0f} tokens/s, "
            f"{end['seconds']:.1f} s {_since(end['resumed_from'])}",
            highlight=False,
        )
    if speed["share_by_part"]:
        shares = ", ".join(f"{part} {100 * share:.0f} %" for part, share in speed["share_by_part"].items())
        console.print(f"time by part: {shares}", highlight=False)
    console.print(f"run: {outcome.run_dir}", highlight=False, soft_wrap=True)


def _since(resumed_from: int | None) -> str:
    """What the figures of the end record are of: the process that wrote it."""
    return "in all" if resumed_from is None else f"since it was resumed from step {resumed_from}"


def _show(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
