"""Where records go: metrics.jsonl always, TensorBoard beside it where it can be imported. Rank 0 only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gem_pipelines.rundir import RunDirectory, json_line

_STEP_KINDS = ("train", "eval", "progressive")
_NOT_CURVES = ("kind", "step", "time", "time_window", "imbalance_steps")


class Sinks:
    """Writes every record to all sinks. `say` prints a line to the user."""

    def __init__(
        self, directory: RunDirectory, *, tensorboard: bool, first_step: int, say: Callable[[str], None]
    ) -> None:
        self._file = open(directory.metrics_file, "a", buffering=1)  # noqa: SIM115 - closed in close()
        self._writer = _tensorboard_writer(directory.path / "tensorboard", first_step, say) if tensorboard else None

    def write(self, record: dict[str, Any]) -> None:
        """Append one record; a whole line reaches the system before this returns."""
        self._file.write(json_line(record))
        self._file.flush()
        if self._writer is not None and record["kind"] in _STEP_KINDS:
            for tag, value in curves(record):
                self._writer.add_scalar(tag, value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def curves(record: dict[str, Any]) -> list[tuple[str, float]]:
    """(tag, value) of every number in a record, nested names joined by "/".

    >>> curves({"kind": "eval", "step": 5, "tasks": {"click": {"ne": 0.9, "auc": None}}})
    [('eval/tasks/click/ne', 0.9)]
    """
    found: list[tuple[str, float]] = []

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{path}/{key}", item)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((path, float(value)))

    walk(record["kind"], {key: value for key, value in record.items() if key not in _NOT_CURVES})
    return found


def _tensorboard_writer(directory: Path, first_step: int, say: Callable[[str], None]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        say(f"TensorBoard events are not written: {error}. metrics.jsonl has everything.")
        return None
    # Events of a killed run after the checkpoint are hidden by TensorBoard; also where it had none and starts again.
    return SummaryWriter(str(directory), purge_step=first_step + 1)
