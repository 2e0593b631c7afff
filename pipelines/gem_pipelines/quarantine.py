"""Row groups that cannot be used, left out of training: heard of by the loaders, counted by all ranks, written down.

A rank meets a damaged row group when its loader decodes it, perhaps batches before its rows are due. What all ranks see
alike is that a global batch has fewer rows than planned; at that step they tell each other what they heard. So the
count is exact whoever reads the group, and every rank reaches the cap at the same step.

Cost: nothing until something is damaged; one subtraction a step.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from gem_data.interface import DataError

from gem_pipelines.errors import RunError
from gem_pipelines.runtime import Runtime


class TooMuchDamageError(RunError):
    """More rows were lost to damaged row groups than data.max_quarantined_rows allows."""


class Quarantine:
    """What this rank's loader heard of. `hear` may be called from the loader's reading thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[dict[str, Any]] = []
        self._known: set[tuple[str | None, int | None]] = set()

    def hear(self, error: DataError, rows: int) -> None:
        """A row group of `rows` rows cannot be used. A group that was heard of before is not noted again."""
        with self._lock:
            key = (error.file, error.row_group)
            if key not in self._known:
                self._known.add(key)
                self._new.append({"file": error.file, "row_group": error.row_group, "rows": rows, "reason": str(error)})

    def exchange(self, runtime: Runtime) -> list[dict[str, Any]]:
        """What any rank heard of since the last time, each group once, in the order of ranks. A collective."""
        with self._lock:
            mine, self._new = self._new, []
        found: dict[tuple[str | None, int | None], dict[str, Any]] = {}
        for rank, text in enumerate(runtime.gather_text(json.dumps(mine))):
            for entry in json.loads(text):
                found.setdefault((entry["file"], entry["row_group"]), {**entry, "rank": rank})
        with self._lock:  # the rank that evaluates a row group may be another one than that which trains it
            self._known |= set(found)
        return list(found.values())


def check_cap(lost: int, limit: int, groups: list[dict[str, Any]], *, step: int) -> None:
    """Raise TooMuchDamageError, on every rank alike, where more rows are lost than allowed."""
    if lost > limit:
        reasons = "; ".join(entry["reason"] for entry in groups) or "see the quarantine records of metrics.jsonl"
        raise TooMuchDamageError(
            f"step {step}: {lost} rows are lost to damaged row groups, data.max_quarantined_rows allows {limit}: "
            f"{reasons}"
        )
