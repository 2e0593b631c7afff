"""What stands in the "end" record: throughput of the process, floors to compare with, the best NE that is possible.

Floors are what counting alone reaches on the same split (logistic regression on user and item ids, running
like-rates). They are computed from the written tables, by gem_datasets, and printed beside the model: a model below
them has learnt less than counting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from gem_data.interface import Schema
from gem_data.remote import DataPath

WARM_UP_STEPS = 3


class Throughput:
    """Samples and tokens per second of training steps, and share of time by part on profiled ones.

    The first WARM_UP_STEPS steps of a process are left out (first allocations, first reads) if there are more.
    Evaluation and checkpoints are not training time and not in it. Of this process only: the report of a resumed run
    takes its figures from the train records instead, by the same rule.
    """

    def __init__(self) -> None:
        self._first = _Sums()
        self._later = _Sums()
        self._parts: dict[str, float] = {}

    def add(self, record: dict[str, Any], *, seconds: float, parts: dict[str, float] | None) -> None:
        """Add one step."""
        sums = self._first if self._first.steps < WARM_UP_STEPS else self._later
        sums.steps += 1
        sums.seconds += seconds
        sums.rows += record["rows"]
        sums.events += record["events"]
        for part, value in (parts or {}).items():
            self._parts[part] = self._parts.get(part, 0.0) + value

    def _counted(self) -> _Sums:
        return self._later if self._later.steps else self._first

    def seconds_per_step(self) -> float:
        """Mean seconds of a step."""
        counted = self._counted()
        return counted.seconds / counted.steps if counted.steps else 0.0

    def summary(self) -> dict[str, Any]:
        """{"samples_per_s", "tokens_per_s", "share_by_part"}; None and {} where nothing was trained."""
        counted = self._counted()
        profiled = sum(self._parts.values())
        return {
            "samples_per_s": counted.rows / counted.seconds if counted.steps else None,
            "tokens_per_s": counted.events / counted.seconds if counted.steps else None,
            "share_by_part": {part: value / profiled for part, value in self._parts.items()} if profiled else {},
        }


@dataclass(kw_only=True)
class _Sums:
    steps: int = 0
    seconds: float = 0.0
    rows: int = 0
    events: int = 0


def best_possible_ne(schema: Schema, task: str) -> float | None:
    """NE of the planted truth, where the data set knows it."""
    known = schema.facts.get("best_ne")
    value = known.get(task) if isinstance(known, dict) else known
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def counting_floors(
    data: DataPath, schema: Schema, task: str, *, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Name -> {"auc", "ne", "task"} of every floor that these data have; `say` hears why one is missing."""
    from gem_datasets import floors as counting

    tables = {split: _read_split(data, schema, split, task) for split in ("train", "eval")}
    found: dict[str, dict[str, Any]] = {}
    for name, compute in (("logistic", counting.logistic_floor), ("running rate", counting.running_rate_floor)):
        try:
            figures = compute(tables["train"], tables["eval"], task)
        except ValueError as reason:
            say(f"floor '{name}' is not known for these data: {reason}")
            continue
        found[name] = {"auc": figures["auc"], "ne": figures["ne"], "task": task}
    return found


def _read_split(data: DataPath, schema: Schema, split: str, task: str) -> pa.Table:
    """The columns that floors count, of all files of a split."""
    wanted = {"user_id", "id.item", "timestamp", f"label.{task}", f"weight.{task}"}
    tables = []
    for file in schema.files:
        if file.split == split:
            with (data / file.path).open("rb") as opened, pq.ParquetFile(opened) as parquet:
                present = parquet.schema_arrow.names
                tables.append(parquet.read(columns=[name for name in present if name in wanted]))
    table = pa.concat_tables(tables)
    return _plain(table) if schema.impression else table


def _plain(table: pa.Table) -> pa.Table:
    """A table of requests with a row for each impression."""
    label = next(name for name in table.column_names if name.startswith("label."))
    owners = pc.list_parent_indices(table.column(label).combine_chunks())
    return pa.table(
        {
            name: pc.list_flatten(table.column(name))
            if pa.types.is_list(kind) or pa.types.is_large_list(kind)
            else table.column(name).take(owners)
            for name, kind in zip(table.column_names, table.schema.types, strict=True)
        }
    )
