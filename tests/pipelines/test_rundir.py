"""The run directory and where records go."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
from gem_pipelines import rundir
from gem_pipelines.errors import RunError
from gem_pipelines.recipes import find_recipe
from gem_pipelines.rundir import RunDirectory, json_line, read_records
from gem_pipelines.sinks import Sinks, curves


@pytest.fixture
def directory(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.create(find_recipe("debug"), command="gemline train --recipe debug")
    return run


def test_config_comes_back(directory):
    assert directory.read_config() == find_recipe("debug")
    assert (directory.path / "command.txt").read_text() == "gemline train --recipe debug\n"
    assert json.loads((directory.path / "versions.json").read_text())["interfaces"]["gem_data"][0] >= 1


def test_going_on_adds_the_command_and_what_it_ran_on(directory, monkeypatch):
    first = rundir.collect_versions()
    directory.go_on(find_recipe("debug"), command="gemline train --resume --run-dir a", step=10)
    assert json.loads((directory.path / "versions.json").read_text()) == first, "nothing changed, nothing to say"
    monkeypatch.setattr(rundir, "collect_versions", lambda: first | {"torch": "9.9"})
    directory.go_on(find_recipe("debug"), command="gemline train --resume --run-dir b", step=20)
    versions = json.loads((directory.path / "versions.json").read_text())
    assert versions == first | {"torch": "9.9", "earlier": [{"up_to_step": 20, **first}]}
    monkeypatch.setattr(rundir, "collect_versions", lambda: first | {"torch": "10.0"})
    directory.go_on(find_recipe("debug"), command="gemline train --resume --run-dir c", step=20)
    earlier = json.loads((directory.path / "versions.json").read_text())["earlier"]
    assert [(e["up_to_step"], e["torch"]) for e in earlier] == [(20, first["torch"]), (20, "9.9")]
    assert (directory.path / "command.txt").read_text().splitlines() == [
        "gemline train --recipe debug",
        "# resumed from step 10:",
        "gemline train --resume --run-dir a",
        "# resumed from step 20:",
        "gemline train --resume --run-dir b",
        "# resumed from step 20:",
        "gemline train --resume --run-dir c",
    ]


def test_broken_versions_stop_a_resume_before_anything_is_written(directory):
    (directory.path / "versions.json").write_text("{")
    with pytest.raises(RunError, match=r"versions\.json is not JSON.*remove it"):
        directory.go_on(find_recipe("debug"), command="gemline train --resume", step=10)
    assert (directory.path / "command.txt").read_text() == "gemline train --recipe debug\n"


def test_going_on_forgets_the_records_after_the_checkpoint(directory):
    config = find_recipe("debug")
    changed = dataclasses.replace(config, train=dataclasses.replace(config.train, print_every=7))
    directory.metrics_file.write_text("".join(json_line({"kind": "train", "step": s}) for s in (1, 2, 3)))
    directory.go_on(changed, command="gemline train --resume", step=2)
    assert [record["step"] for record in read_records(directory.metrics_file)] == [1, 2]
    assert directory.read_config() == changed


def test_a_run_is_not_overwritten(directory):
    with pytest.raises(RunError, match=r"holds a run already.*--resume"):
        directory.check_unused()
    RunDirectory(directory.path / "new").check_unused()


def test_nothing_to_resume(tmp_path):
    with pytest.raises(RunError, match="holds no run to resume"):
        RunDirectory(tmp_path).read_config()


def test_records_after_the_checkpoint_are_forgotten(directory):
    lines = [{"kind": "start"}, *({"kind": "train", "step": s} for s in (1, 2, 3)), {"kind": "eval", "step": 3}]
    lines += [{"kind": "end", "step": 2}]
    directory.metrics_file.write_text("".join(map(json_line, lines)) + '{"kind": "train", "st')
    directory.forget_after(2)
    assert read_records(directory.metrics_file) == lines[:3]


def test_what_was_written_ahead_of_the_checkpoint_is_forgotten(directory):
    kept = ["predictions-2.parquet", "predictions-x.parquet", ".hidden"]
    for name in [*kept, "predictions-3.parquet", ".predictions-2.parquet.17", ".metrics.jsonl.17"]:
        (directory.path / name).touch()
    before = {path.name for path in directory.path.iterdir()}
    directory.forget_after(2)
    left = {path.name for path in directory.path.iterdir()}
    assert before - left == {"predictions-3.parquet", ".predictions-2.parquet.17", ".metrics.jsonl.17"}


def test_a_broken_line_in_the_middle_is_an_error(directory):
    directory.metrics_file.write_text('{"kind": "start"}\n{"kind"\n{"kind": "train", "step": 1}\n')
    with pytest.raises(RunError, match="line 2"):
        read_records(directory.metrics_file)


def test_undefined_numbers_are_null():
    record = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": None}}
    assert json.loads(json_line(record)) == {"a": None, "b": [None, 1.5], "c": {"d": None}}


RECORD = {"kind": "train", "step": 4, "loss": 0.5, "window_ne": {"click": 0.9, "buy": None}, "time": "now"}


def test_curves_leave_out_what_is_not_a_number():
    assert curves(RECORD) == [("train/loss", 0.5), ("train/window_ne/click", 0.9)]


def test_tensorboard_beside_json_lines(directory):
    sinks = Sinks(directory, tensorboard=True, first_step=0, say=pytest.fail)
    sinks.write(RECORD)
    sinks.close()
    assert read_records(directory.metrics_file) == [RECORD]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory.path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(4, 0.5)]
    assert sorted(events.Tags()["scalars"]) == ["train/loss", "train/window_ne/click"]


@pytest.mark.parametrize("durable", [0, 2])
def test_tensorboard_hides_what_was_written_ahead_of_the_checkpoint(directory, durable):
    """Also where no checkpoint had become durable, and the run began at step 0 again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, steps, loss in ((0, (1, 2, 3, 4), 0.5), (durable, range(durable + 1, 4), 0.25)):
        sinks = Sinks(directory, tensorboard=True, first_step=first, say=pytest.fail)
        for step in steps:
            sinks.write({"kind": "train", "step": step, "loss": loss})
        sinks.close()
    events = EventAccumulator(str(directory.path / "tensorboard"))
    events.Reload()
    expected = [(step, 0.5 if step <= durable else 0.25) for step in (1, 2, 3)]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == expected


def test_without_tensorboard_it_says_so_once_and_goes_on(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said = []
    sinks = Sinks(directory, tensorboard=True, first_step=0, say=said.append)
    for _ in range(3):
        sinks.write(RECORD)
    sinks.close()
    assert len(said) == 1
    assert "TensorBoard events are not written" in said[0]
    assert len(read_records(directory.metrics_file)) == 3


def test_a_run_killed_while_its_directory_was_made_may_begin_again(tmp_path):
    """config.json is written last; an empty checkpoints/ holds nothing. A checkpoint without config.json does."""
    directory = RunDirectory(tmp_path / "run")
    directory.create(find_recipe("debug"), command="x")
    directory.config_file.unlink()
    directory.check_unused()
    (directory.checkpoints / "step-00000001").mkdir()
    with pytest.raises(RunError, match="holds a run already"):
        directory.check_unused()
