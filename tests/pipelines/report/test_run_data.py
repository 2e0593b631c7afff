"""Reading a run directory: what is missing, what is broken, what was written twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gem_pipelines import outcome
from gem_pipelines.report import run_data
from gem_pipelines.report.run_data import read_run

MakeRun = Callable[..., Path]


def write_records(run: Path, *records: Any) -> None:
    run.mkdir(exist_ok=True)
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def test_a_completed_run(make_run: MakeRun) -> None:
    run = read_run(make_run(steps=40))
    assert run.notes == ()
    assert run.train.steps.tolist() == list(range(1, 41))
    assert run.tasks == ("click", "convert")
    assert run.train.column("samples")[4] == 5 * 512
    assert [record["step"] for record in run.evals] == [20, 40]
    assert run.last_step == 40
    assert run.predictions.name == "predictions-40.parquet"
    profiled = np.flatnonzero(np.isfinite(run.train.group("seconds_by_part")["read"]))
    assert profiled.tolist() == [0, 10, 20, 30], "steps without a profile are undefined, not shifted"


def test_null_and_not_finite_are_undefined(tmp_path: Path) -> None:
    text = '{"kind": "train", "step": 1, "loss": NaN, "mfu": null, "window_ne": {"a": Infinity}}'
    write_records(tmp_path, text, {"kind": "train", "step": 2, "loss": 0.5})
    train = read_run(tmp_path).train
    assert np.isnan(train.column("loss")).tolist() == [True, False]
    assert np.isnan(train.group("window_ne")["a"]).all()
    assert np.isnan(train.column("mfu")).all()


def test_steps_written_twice_count_as_last_written(tmp_path: Path) -> None:
    steps = [(1, 0.9), (2, 0.8), (3, 0.7), (2, 0.6), (3, 0.5), (4, 0.4)]
    records = [{"kind": "train", "step": step, "loss": loss} for step, loss in steps]
    records.insert(3, {"kind": "resume", "step": 1})
    records.insert(3, {"kind": "end", "step": 3})
    write_records(tmp_path, {"kind": "start"}, *records)
    run = read_run(tmp_path)
    assert run.train.steps.tolist() == [1, 2, 3, 4]
    assert run.train.column("loss").tolist() == [0.9, 0.6, 0.5, 0.4]
    assert run.train.repeated == 2
    assert run.end is None, "the end of the first part is not the end of the run"
    assert any("went on 1 time;" in note for note in run.notes)


def test_steps_after_every_start_are_told_from_the_others(tmp_path: Path) -> None:
    """10 steps; killed after 6 with a checkpoint at 4, from which a second process went on."""
    steps = [{"kind": "train", "step": step} for step in range(1, 11)]
    starts = [{"kind": "start", "resumed_from": None}, {"kind": "start", "resumed_from": 4}]
    write_records(tmp_path, starts[0], *steps[:6], starts[1], *steps[4:])
    train = read_run(tmp_path).train
    assert train.process_step.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]
    assert train.steady().tolist() == [False] * 3 + [True] + [False] * 3 + [True] * 3
    assert run_data.WARM_UP_STEPS == outcome.WARM_UP_STEPS


def test_a_run_of_few_steps_has_no_warm_up(tmp_path: Path) -> None:
    write_records(tmp_path, {"kind": "start"}, *({"kind": "train", "step": step} for step in (1, 2, 3)))
    assert read_run(tmp_path).train.steady().tolist() == [True] * 3


def test_elapsed_seconds_fill_steps_that_were_not_recorded(tmp_path: Path) -> None:
    write_records(tmp_path, *({"kind": "train", "step": step, "seconds": s} for step, s in ((1, 2.0), (3, 4.0))))
    assert read_run(tmp_path).train.elapsed_seconds().tolist() == [2.0, 10.0]


@pytest.mark.parametrize("missing", ["config.json", "versions.json", "command.txt", "metrics.jsonl"])
def test_a_missing_file_is_noted(make_run: MakeRun, missing: str) -> None:
    run = make_run(steps=3)
    (run / missing).unlink()
    assert any(missing in note for note in read_run(run).notes)


def test_a_cut_last_line_is_noted_and_the_rest_counts(make_run: MakeRun) -> None:
    run = make_run(steps=5)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:4]) + '\n{"kind": "train", "st')
    read = read_run(run)
    assert read.train.steps.tolist() == [1, 2, 3]
    assert any("line 5 is cut off" in note for note in read.notes)
    assert any("no end record" in note for note in read.notes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "train", "st', "expected one JSON object"),
        ("[1, 2]", "expected one JSON object"),
        ('{"step": 3}', 'expected the key "kind"'),
        ('{"kind": "train"}', 'expected "step" to be an integer >= 0, got None'),
        ('{"kind": "train", "step": "7"}', "got '7'"),
        ('{"kind": "train", "step": true}', "got True"),
        ('{"kind": "train", "step": 7, "loss": "low"}', "\"loss\": expected a number or null, got 'low'"),
        ('{"kind": "train", "step": 7, "window_ne": [1]}', '"window_ne": expected an object'),
        ('{"kind": "eval", "step": 7, "tasks": {"a": {"ne": "x"}}}', '"tasks.a.ne": expected a number or null'),
        ('{"kind": "end", "step": 7, "floors": 3}', '"floors": expected an object'),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    write_records(tmp_path, {"kind": "start"}, line, {"kind": "train", "step": 8})
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: ") as error:
        read_run(tmp_path)
    assert message in str(error.value)


def test_bytes_that_are_not_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "start"}\n\xff\xfe\n{"kind": "train", "step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_run(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "versions.json"])
def test_broken_json_is_named(make_run: MakeRun, name: str) -> None:
    run = make_run(steps=1)
    (run / name).write_text('{\n "a": 1,\n oops\n}')
    with pytest.raises(ValueError, match=rf"{name}, line 3: not JSON"):
        read_run(run)
    (run / name).write_text("[]")
    with pytest.raises(ValueError, match=rf"{name}, line 1: expected a JSON object"):
        read_run(run)


def test_what_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such directory"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="not a run directory"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="no such directory"):
        read_run(tmp_path / "notes.txt")


def test_the_predictions_of_the_highest_step_are_taken(make_run: MakeRun) -> None:
    run = make_run(steps=3)
    for name in (
        "predictions-20.parquet",
        "predictions-100.parquet",
        "predictions-x.parquet",
        "predictions-999.parquet.part",
    ):
        (run / name).write_bytes(b"")
    assert read_run(run).predictions.name == "predictions-100.parquet"


def test_unknown_kinds_are_noted(tmp_path: Path) -> None:
    write_records(tmp_path, {"kind": "train", "step": 1}, {"kind": "pause"}, {"kind": "pause"})
    assert any("'pause' (2)" in note for note in read_run(tmp_path).notes)
