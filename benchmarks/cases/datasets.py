"""Generating the synthetic data set: every option at its default but the size."""

from __future__ import annotations

from functools import partial
from typing import Any

from cases.case import Case
from cases.counting import count_tensors

ROWS = 2000


def run(options: dict[str, Any]) -> Any:
    import gem_datasets

    return gem_datasets.load("synthetic", **options)


def check(options: dict[str, Any], data: Any) -> None:
    """The promised split, histories strictly earlier than their row, parallel lists of equal length."""
    assert data.train.num_rows + data.eval.num_rows == ROWS
    assert max(data.train.column("timestamp").to_pylist()) < min(data.eval.column("timestamp").to_pylist())
    for row in data.eval.slice(0, 100).to_pylist():
        for stream in data.schema["streams"]:
            names = [key for key in row if key.startswith(f"stream.{stream['name']}.")]
            assert len({len(row[name]) for name in names}) == 1
            assert all(time < row["timestamp"] for time in row[f"stream.{stream['name']}.time"])


CASES = (
    Case(
        name="datasets.synthetic_ragged",
        make=partial(dict, rows=ROWS, users=200, items=500, seed=1),
        run=run,
        check=check,
        count=count_tensors,
        repeat=40,
    ),
)
