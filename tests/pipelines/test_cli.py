"""The command line: exit codes, one clear message for every mistake, and what the commands print."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gem_data.damage import refresh_block_hashes
from gem_pipelines.cli import main
from gem_pipelines.cli.train import repeat_command, with_overrides
from gem_pipelines.errors import ConfigError
from gem_pipelines.recipes import find_recipe
from gem_pipelines.rundir import read_records

SMALL = [
    *(
        "--data.global-batch-size",
        "32",
        "--train.steps",
        "3",
        "--train.checkpoint-every",
        "2",
        "--train.profile-every",
        "2",
    ),
    *("--train.peak-flops-per-s", "1e9"),
]


@pytest.fixture(scope="module")
def run(debug_data, tmp_path_factory) -> Path:
    """A finished run of three steps, with a profiled one."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", "--recipe", "debug", "--data", str(debug_data), "--run-dir", str(directory), *SMALL]) == 0
    return directory


def test_a_run_leaves_what_it_promises(run, debug_data):
    assert {path.name for path in run.iterdir()} == {
        *(
            "config.json",
            "cost.json",
            "command.txt",
            "versions.json",
            "metrics.jsonl",
            "tensorboard",
            "predictions-3.parquet",
        ),
        *("checkpoints", "supervision", "run.lock"),
    }
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    records = read_records(run / "metrics.jsonl")
    saves = [record for record in records if record["kind"] == "checkpoint"]
    assert [(save["step"], save["error"]) for save in saves] == [(2, None), (3, None)]
    assert all(save["bytes"] > 1e4 and save["stall_seconds"] > 0 for save in saves)
    records = [record for record in records if record["kind"] != "checkpoint"]  # they come when they are written
    assert [record["kind"] for record in records] == ["start", "train", "train", "train", "eval", "end"]
    start, _, profiled, last, evaluation, end = records
    assert start["parameters"]["dense"] > 0
    assert start["data"]["splits"]["train"]["rows"] == 320
    assert (start["peak_flops_per_s"], start["peak_source"]) == (1e9, "given")
    assert set(profiled["seconds_by_part"]) == {
        *("read", "tables", "sequence", "interaction", "cross", "heads", "optimizer", "other")
    }
    assert sum(profiled["seconds_by_part"].values()) == pytest.approx(profiled["seconds"], rel=0.05)
    assert "seconds_by_part" not in last
    assert last["samples"] == 96
    assert last["flops"] == sum(last["flops_by_part"].values()) > 0
    assert last["mfu"] == pytest.approx(last["flops"] / last["seconds"] / 1e9)
    assert last["memory_bytes"] > 1e7
    assert evaluation["samples"] == 80
    assert set(end["floors"]) == {"logistic", "running rate"}
    assert (end["status"], end["resumed_from"]) == ("completed", None)
    assert 0 < end["best_ne"] < 1


def test_the_predictions_give_the_metrics_of_the_record(run):
    from sklearn.metrics import roc_auc_score

    table = pq.read_table(run / "predictions-3.parquet")
    assert table.column_names[:5] == ["sample_id", "user_id", "label.click", "weight.click", "prediction.click"]
    assert table.num_rows == len(set(table["sample_id"].to_pylist())) == 80
    record = next(r for r in read_records(run / "metrics.jsonl") if r["kind"] == "eval")
    label, prediction = table["label.click"].to_numpy(), table["prediction.click"].to_numpy()
    assert record["tasks"]["click"]["auc"] == pytest.approx(roc_auc_score(label, prediction), rel=1e-12)
    assert record["tasks"]["click"]["calibration"] == pytest.approx(prediction.sum() / label.sum(), rel=1e-12)


def test_the_command_repeats_the_run(run, debug_data):
    expected = f"gemline train --recipe debug --data {debug_data} {' '.join(SMALL)}\n"
    assert (run / "command.txt").read_text() == expected
    assert repeat_command(["--run-dir=x", "--recipe", "a b"]) == "gemline train --recipe 'a b'"
    assert repeat_command(["--run-dir=x", "--resume"], resume=True) == "gemline train --run-dir=x --resume"


def test_the_report_can_be_written(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert main(["report", str(copy)]) == 0
    assert (copy / "report.html").stat().st_size > 1000
    assert str(copy / "report.html") in capsys.readouterr().out


def test_a_run_is_neither_overwritten_nor_trained_twice(run, debug_data, capsys):
    assert main(["train", "--recipe", "debug", "--data", str(debug_data), "--run-dir", str(run)]) == 1
    assert "holds a run already" in capsys.readouterr().err
    before = (run / "checkpoints" / "step-00000003" / "manifest.json").read_bytes()
    assert main(["train", "--resume", "--run-dir", str(run)]) == 0
    assert "resumed from step 3" in capsys.readouterr().out
    assert (run / "checkpoints" / "step-00000003" / "manifest.json").read_bytes() == before
    kinds = [r["kind"] for r in read_records(run / "metrics.jsonl") if r["kind"] != "checkpoint"]
    assert kinds == ["start", "train", "train", "train", "eval", "start", "eval", "end"]
    assert read_records(run / "metrics.jsonl")[-1]["resumed_from"] == 3
    lines = (run / "command.txt").read_text().splitlines()
    assert lines[1:] == ["# resumed from step 3:", f"gemline train --resume --run-dir {run}"]


def test_resuming_with_another_model_lists_what_differs(run, capsys):
    assert main(["train", "--resume", "--run-dir", str(run), "--model.layers", "3", "--optimizer.lr", "1"]) == 1
    message = capsys.readouterr().err
    assert "config model.layers: stored 2, this run has 3" in message
    assert "config optimizer.lr: stored 0.003, this run has 1.0" in message


def test_checkpoints_are_inspected_and_verified(run, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert main(["ckpt", "verify", str(copy)]) == 0
    assert capsys.readouterr().out.count("sound") == 2
    assert main(["ckpt", "inspect", str(copy / "checkpoints" / "step-00000002")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tensors"]["tables.item.momentum"] == "float32 [61]"
    assert shown["about"]["config"]["name"] == "debug"
    path = copy / "checkpoints" / "step-00000003" / "tensors-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert main(["ckpt", "verify", str(copy)]) == 1
    out = capsys.readouterr().out
    assert f"step-00000003: DAMAGED\n  tensors-00000.safetensors bytes 0..{len(data)}: xxh3 is" in out
    assert main(["ckpt", "verify", str(tmp_path)]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err


def test_data_is_prepared_inspected_and_verified(tmp_path, capsys):
    out = str(tmp_path / "data")
    assert main(["data", "prepare", "parity", "rows=300", "--out", out]) == 0
    assert "train: 240 rows\neval: 60 rows" in capsys.readouterr().out
    assert main(["data", "inspect", out]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["eval"]["rows"] == 60
    small = str(tmp_path / "small")
    assert main(["data", "prepare", "parity", "rows=300", "--out", small, "--rows-per-group", "100"]) == 0
    assert main(["data", "requests", small, "--out", f"{small}-r", "--impression", "id.item"]) == 0
    assert main(["data", "impressions", f"{small}-r", "--out", f"{small}-i"]) == 0
    assert main(["data", "impressions", f"{small}-r", "--out", f"{small}-j", "--rows-per-group", "60"]) == 0
    made = [pq.ParquetFile(next(Path(f"{small}{end}").glob("train-*"))) for end in ("", "-r", "-i", "-j")]
    assert [file.num_row_groups for file in made] == [3, 3, 3, 4]
    assert main(["data", "prepare", "parity", "--out", str(tmp_path / "no"), "--rows-per-group", "0"]) == 1
    assert "rows_per_group: expected at least 1, came 0" in capsys.readouterr().err
    assert main(["data", "verify", out]) == 0
    path = next(Path(out).glob("train-*.parquet"))
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 8
    path.write_bytes(data)
    capsys.readouterr()
    assert main(["data", "verify", out]) == 1
    assert path.name in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["train"], "--recipe is missing; one of: debug, dynamic_cpu, ml100k_cpu, synthetic_cpu"),
        (["train", "--recipe", "debug", "--optimizer.lrr", "1"], "unknown config key 'optimizer.lrr'"),
        (["train", "--recipe", "debug", "--resum"], "did you mean '--resume'?"),
        (["train", "--recipe", "debug", "--data", "nowhere"], "data.source is 'nowhere'"),
        (["train", "--resume"], "--resume needs --run-dir"),
        (["train", "--resume", "--run-dir", "nowhere"], "holds no run to resume"),
        (["train", "--resume", "--run-dir", "x", "--recipe", "debug"], "leave out --recipe"),
        (["config", "show"], "needs --recipe or --run"),
        (["config", "show", "--recpe", "debug"], "unknown config key 'recpe'; did you mean '--recipe'?"),
        (["train", "--recpe", "debug"], "unknown config key 'recpe'; did you mean '--recipe'?"),
        (["profile", "--recpe", "debug", "--fit-cost"], "unknown config key 'recpe'; did you mean '--recipe'?"),
        (
            ["config", "show", "--recipe", "debug", "--train.task_weights", "click=2", "3"],
            "train.task_weights is 'click=2 3', expected any number of float",
        ),
        (["config", "show", "--recipe", "debug", "--optimizer.lr=abc"], "optimizer.lr is 'abc', expected float"),
        (["ckpt", "export", "runs/a"], "export needs a directory to make: gemline ckpt export runs/a OUT"),
        (["ckpt", "verify", "runs/a", "b"], "gemline ckpt verify takes one directory, came also 'b'"),
        (["config", "show", "--recipe", "debug", "--train.seeed", "1"], "did you mean '--train.seed'"),
        (["data", "prepar"], "unknown command 'data prepar'; did you mean 'prepare'?"),
        (["data", "prepare", "synthetic"], "required: --out"),
        (["data", "inspect", "nowhere"], "nowhere"),
        (["ckpt", "verify"], "required: DIR"),
        (["ckpt", "look", "."], "invalid choice: 'look'"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_end_with_one_message_and_code_1(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []


def test_the_traceback_comes_on_request(capsys):
    assert main(["train", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_the_program_is_not_a_mistake_of_the_user(capsys, monkeypatch):
    monkeypatch.setattr("gem_pipelines.cli.config.find_recipe", lambda name: 1 / 0)
    assert main(["config", "show", "--recipe", "debug"]) == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_run_is_one_process_that_ends_with_its_code():
    done = subprocess.run(
        [sys.executable, "-m", "gem_pipelines", "config", "show", "--recipe", "nothing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "gemline: error: unknown recipe 'nothing'; valid: debug, dynamic_cpu, ml100k_cpu, synthetic_cpu\n"
    )


def change_column(name: str, change, split: str = "train"):
    """Rewrite one column of a split's first file."""

    def apply(directory: Path) -> None:
        path = next(directory.glob(f"{split}-*.parquet"))
        groups = pq.ParquetFile(path).metadata.row_group(0).num_rows
        table = pq.read_table(path)
        index = table.column_names.index(name)
        changed = change(table[name].combine_chunks())
        table = table.remove_column(index) if changed is None else table.set_column(index, name, changed)
        pq.write_table(table, path, row_group_size=groups, write_page_checksum=True)
        refresh_block_hashes(path)

    return apply


def set_value(row: int, value: float):
    def change(column):
        values = column.to_numpy(zero_copy_only=False).copy()
        values[row] = value
        return pa.array(values, column.type)

    return change


def drop_last_event(column):
    lists = column.to_pylist()
    row = next(i for i, events in enumerate(lists) if events)
    lists[row] = lists[row][:-1]
    return pa.array(lists, column.type)


def truncate(directory: Path) -> None:
    path = next(directory.glob("train-*.parquet"))
    path.write_bytes(path.read_bytes()[:-200])


BAD_DATA = {
    "missing column": (change_column("id.item", lambda column: None), ["train-00000.parquet", "id.item"]),
    "wrong type": (
        change_column("id.item", lambda column: column.cast(pa.int32())),
        ["train-00000.parquet", "id.item", "int64", "int32"],
    ),
    "unequal lists": (
        change_column("stream.organic.action", drop_last_event),
        ["train-00000.parquet", "row group 0", "stream.organic.action"],
    ),
    "id outside": (
        change_column("id.item", set_value(7, 61)),
        ["train-00000.parquet", "row group 0", "row 7", "id.item", "61"],
    ),
    "negative id": (change_column("id.item", set_value(7, -1)), ["row 7", "id.item", "-1"]),
    "NaN label": (change_column("label.click", set_value(5, np.nan)), ["row group 0", "row 5", "label.click", "nan"]),
    "label 7": (change_column("label.click", set_value(5, 7.0)), ["row group 0", "row 5", "label.click", "7"]),
    "truncated file": (truncate, ["train-00000.parquet"]),
}


def test_a_failing_evaluation_loses_no_training(debug_data, tmp_path, capsys):
    """The data are too large to survey, and the evaluation, after the last step, meets a bad label."""
    directory, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(debug_data, directory)
    change_column("label.click", set_value(5, 7.0), split="eval")(directory)
    arguments = ["train", "--recipe", "debug", "--data", str(directory), "--run-dir", str(run), *SMALL]
    assert main([*arguments, "--train.survey-rows", "0", "--train.checkpoint-every", "0"]) == 1
    assert "eval-00000.parquet" in capsys.readouterr().err
    shutil.copy(next(debug_data.glob("eval-*.parquet")), directory)
    shutil.copy(debug_data / "schema.json", directory)
    assert main(["train", "--resume", "--run-dir", str(run)]) == 0
    records = read_records(run / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3]
    assert [r["step"] for r in records if r["kind"] == "eval"] == [3]
    assert sum(r["kind"] == "start" and r["resumed_from"] == 3 for r in records) == 1


def test_evaluation_must_be_later_than_training(debug_data, tmp_path, capsys):
    directory, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(debug_data, directory)
    schema = json.loads((directory / "schema.json").read_text())
    for file in schema["files"]:
        file["split"] = {"train": "eval", "eval": "train"}[file["split"]]
    (directory / "schema.json").write_text(json.dumps(schema))
    assert main(["train", "--recipe", "debug", "--data", str(directory), "--run-dir", str(run), *SMALL]) == 1
    assert "evaluation must be strictly later than training" in capsys.readouterr().err
    assert not run.exists()


def test_options_given_for_a_directory_are_refused_and_a_recipes_own_are_not(debug_data):
    config = find_recipe("debug")
    assert config.data.options
    for data, overrides in ((str(debug_data), []), (None, ["--data.source", str(debug_data)])):
        assert with_overrides(config, data, overrides, own_flags=()).data.source == str(debug_data)
    with pytest.raises(ConfigError, match=r"data\.options is rows=5: options make a named data set, .* leave them out"):
        with_overrides(config, str(debug_data), ["--data.options", "rows=5"], own_flags=())


def test_data_without_an_eval_split_are_refused(debug_data, tmp_path, capsys):
    directory = tmp_path / "data"
    shutil.copytree(debug_data, directory)
    schema = json.loads((directory / "schema.json").read_text())
    schema["files"] = [file for file in schema["files"] if file["split"] == "train"]
    (directory / "schema.json").write_text(json.dumps(schema))
    run = tmp_path / "run"
    assert main(["train", "--recipe", "debug", "--data", str(directory), "--run-dir", str(run), *SMALL]) == 1
    expected = "a run needs the splits train and eval, and its files are of train only: no eval. Write the latest rows"
    assert expected in capsys.readouterr().err
    assert not run.exists()


@pytest.mark.parametrize("survey", ["surveyed first", "found in reading"])
@pytest.mark.parametrize("kind", sorted(BAD_DATA))
def test_bad_data_is_named_before_anything_is_trained(kind, survey, debug_data, tmp_path, capsys):
    spoil, names = BAD_DATA[kind]
    directory, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(debug_data, directory)
    spoil(directory)
    arguments = ["train", "--recipe", "debug", "--data", str(directory), "--run-dir", str(run), *SMALL]
    if survey == "found in reading":
        arguments += ["--train.survey-rows", "0"]
    assert main(arguments) == 1
    shown = capsys.readouterr().err
    assert [name for name in names if name.lower() not in shown.lower()] == [], shown
    assert "Traceback" not in shown
    if survey == "surveyed first":
        assert not run.exists()
    else:
        records = read_records(run / "metrics.jsonl") if run.exists() else []
        assert [record["kind"] for record in records] == ["start"] * len(records)
        assert not list(run.glob("checkpoints/*"))
