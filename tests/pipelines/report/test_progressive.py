"""Windows of time: each evaluation of a next window is shown, from the records as the job writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gem_pipelines.report import write_report
from gem_pipelines.report.progressive import SHOWN_WINDOWS, progressive_panels, progressive_table
from gem_pipelines.report.run_data import read_run

MakeRun = Callable[..., Path]


def window(step: int, trained: int, *, ne: float | None = 0.91) -> dict[str, Any]:
    spent = {"trained": trained, "evaluated": trained + 1, "first": 1_767_225_600 + trained, "last": 1_767_312_000}
    tasks = {"click": {"ne": ne, "auc": 0.7231, "calibration": 1.02}}
    record = {"kind": "progressive", "step": step, "samples": 1200, "seconds": 1.5, "tasks": tasks}
    return record | {"time_window": spent}


def add(run: Path, *records: dict[str, Any]) -> Path:
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return run


def test_every_window_is_shown(make_run: MakeRun) -> None:
    directory = add(make_run(), window(20, 1, ne=0.87654), window(10, 0), window(20, 1, ne=0.87))  # resumed at 20
    run = read_run(directory)
    assert run.notes == ()
    table = progressive_table(run)
    assert table is not None
    assert table.rows == (
        ("0", "1", "2026-01-01 00:00:00 UTC", "10", "1,200", "click", "0.9100", "0.7231", "1.0200"),
        ("1", "2", "2026-01-01 00:00:01 UTC", "20", "1,200", "click", "0.8700", "0.7231", "1.0200"),
    )
    page = write_report(directory).read_text()
    assert "NE of the next window of time" in page
    for text in (page, (directory / "report.md").read_text()):
        assert "Windows of time" in text
        assert "2026-01-01 00:00:01 UTC" in text
        assert "does not know" not in text


def test_windows_predicted_together_are_all_named(make_run: MakeRun) -> None:
    record = window(10, 0)
    record["time_window"] = {**record["time_window"], "passed_over": [1], "evaluated": 2}
    table = progressive_table(read_run(add(make_run(), record)))
    assert table is not None
    assert table.rows[0][:2] == ("0", "1, 2")


def test_runs_without_windows_show_none(make_run: MakeRun) -> None:
    run = read_run(make_run())
    assert progressive_table(run) is None
    assert progressive_panels(run) == ()


def test_a_window_of_one_class_has_no_ne(make_run: MakeRun) -> None:
    run = read_run(add(make_run(), window(10, 0, ne=None)))
    assert math.isnan(run.progressive[0]["tasks"]["click"]["ne"])
    (panel,) = progressive_panels(run)
    assert panel.problem == "No window that was evaluated has an NE."


def test_the_latest_of_many_windows_are_shown(make_run: MakeRun) -> None:
    run = read_run(add(make_run(), *(window(1 + n, n) for n in range(SHOWN_WINDOWS + 7))))
    table = progressive_table(run)
    assert table is not None
    assert [row[0] for row in table.rows] == [str(n) for n in range(7, SHOWN_WINDOWS + 7)]
    assert table.note.startswith("7 earlier rows")


def test_a_broken_record_is_named(make_run: MakeRun) -> None:
    directory = add(make_run(), window(10, 0) | {"time_window": 3})
    with pytest.raises(ValueError, match=r"metrics.jsonl, line \d+: \"time_window\": expected an object, got 3"):
        read_run(directory)
