"""What a person sees while a run goes: a bar where the output is a terminal, one line every few steps otherwise.

Rank 0 only; NO_COLOR and the width of the terminal are rich's business.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ProgressDisplay:
    """Shows train records. `enabled` is False on all ranks but the first."""

    def __init__(self, *, total_steps: int, print_every: int, enabled: bool) -> None:
        self._total = total_steps
        self._print_every = print_every
        self._enabled = enabled
        self._console = Console(file=sys.stdout)
        self._bar: Progress | None = None
        if enabled and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("train"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("train", total=total_steps, figures="")

    def start(self, step: int, *, total_steps: int) -> None:
        """Begin at `step` steps done of so many, which of a log that grew are more than at first."""
        self._total = total_steps
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=total_steps)
            self._bar.start()

    def show(self, record: dict[str, Any], *, seconds_left: float) -> None:
        """Show one train record."""
        if not self._enabled:
            return
        step = record["step"]
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=figures(record))
        elif step == 1 or step == self._total or step % self._print_every == 0:
            print(f"step {step}/{self._total}  {figures(record)}  left {seconds_left:.0f} s", flush=True)

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


def figures(record: dict[str, Any]) -> str:
    """Loss, window NE by task, samples/s and tokens/s of a train record."""
    ne = " ".join(f"{task} {_number(value)}" for task, value in record["window_ne"].items())
    return (
        f"loss {_number(record['loss'])}  NE {ne}  "
        f"{record['samples_per_s']:,.0f} samples/s  {record['tokens_per_s']:,.0f} tokens/s"
    )


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
