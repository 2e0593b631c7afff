"""What was lost, why, and what saving cost: shown from the records as the trainer writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gem_pipelines.report import write_report
from gem_pipelines.report.incidents import SHOWN_INCIDENTS, incident_table, saves_table
from gem_pipelines.report.run_data import KINDS, read_run

MakeRun = Callable[..., Path]


def checkpoint(step: int, **more: Any) -> dict[str, Any]:
    record = {"kind": "checkpoint", "step": step, "bytes": 3_000_000, "seconds": 0.5, "hash_seconds": 0.01}
    record |= {"sync_seconds": 0.1, "stall_seconds": 0.02, "waited_seconds": 0.0, "asynchronous": True}
    return record | {"incremental": False, "error": None} | more


SKIP = {"kind": "skip", "step": 7, "reason": "the loss is nan <b>", "sample_ids": list(range(40, 52))}
SPIKE = {"kind": "spike", "step": 30, "figure": "loss", "value": 2.5, "median": 0.5, "distance": 12.0}
SPIKE |= {"sample_ids": [1, 2]}
GROUP = {"file": "train-00000.parquet", "row_group": 2, "rows": 40, "reason": "train-00000.parquet, row group 2: hash"}
QUARANTINE = {"kind": "quarantine", "step": 12, "quarantined_samples": 40, "groups": [GROUP]}


def add(run: Path, *records: dict[str, Any]) -> Path:
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return run


def test_what_did_not_go_as_planned(make_run: MakeRun) -> None:
    again = QUARANTINE | {"step": 25}  # a resumed run hears of the group once more
    failed = checkpoint(20, error="no space left", bytes=0, seconds=0.0)
    run = read_run(add(make_run(), SKIP, SPIKE, QUARANTINE, again, checkpoint(10), failed, checkpoint(40)))
    assert run.notes == ()
    table = incident_table(run)
    assert table is not None
    assert table.rows == (
        ("7", "step left out", "12: 40, 41, 42, 43, 44, ...", "the loss is nan <b>"),
        ("12", "row group in quarantine", "40 rows", "train-00000.parquet, row group 2: hash"),
        ("20", "checkpoint not written", "", "no space left"),
        ("30", "step stands out", "2: 1, 2", "loss 2.5000, median before 0.5000, 12.0 spreads above"),
    )


def test_what_saving_cost(make_run: MakeRun) -> None:
    saves = [checkpoint(20), checkpoint(40, incremental=True, bytes=100_000, stall_seconds=0.3, waited_seconds=0.25)]
    run = read_run(add(make_run(steps=60), checkpoint(20, seconds=9.0), *saves, checkpoint(60, error="no space")))
    table = saves_table(run)
    assert table is not None
    assert dict(table.rows) == {
        "written": "2",
        "not written": "1",
        "size of a full one, mean": "3 MB",
        "size of an incremental one, mean": "100 kB",
        "beside training": "3",
        "time of a save, mean": "0.5 s",
        "of it hashing, flushing to disk": "2.0%, 20.0%",
        "training stood still, mean and longest": "113 ms, 300 ms",
        "of it waiting for the save before": "0.2 s",
        "share of the time of steps": "4.90%",  # 0.34 s of 60 steps of 0.11 s and 0.34 s
    }


def test_a_run_without_either_has_neither(make_run: MakeRun) -> None:
    run = read_run(make_run())
    assert incident_table(run) is None
    assert saves_table(run) is None


def test_page_and_text_show_them_escaped_and_not_endlessly(make_run: MakeRun) -> None:
    run = make_run()
    add(run, *(SKIP | {"step": step} for step in range(1, SHOWN_INCIDENTS + 4)), checkpoint(20))
    for text in (write_report(run).read_text(), (run / "report.md").read_text()):
        assert "What did not go as planned" in text
        assert "Checkpoints" in text
        assert "3 more are in metrics.jsonl" in text
        assert text.count("&lt;b&gt;") == SHOWN_INCIDENTS
        assert "nan <b>" not in text


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"start", "resume"}))
def test_a_record_without_its_step_is_named(tmp_path: Path, kind: str) -> None:
    add(tmp_path, {"kind": "start"}, {"kind": kind, "step": "three"})
    with pytest.raises(ValueError, match=r'line 2: expected "step" to be an integer >= 0'):
        read_run(tmp_path)
