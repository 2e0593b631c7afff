"""Ids outside their tables through a whole job: refused, dropped or hashed as the config says, counted by feature.

Table "item" of the data is declared with 30 rows while its ids go to 60.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from gem_pipelines.cli import main
from gem_pipelines.config import TablesConfig
from gem_pipelines.errors import ConfigError
from gem_pipelines.features import mean_of_rows
from gem_pipelines.rundir import read_records

STEPS = 10  # one epoch of 320 rows
ARGUMENTS = ["--recipe", "debug", "--data.global-batch-size", "32", "--train.steps", str(STEPS)]
ARGUMENTS += ["--train.tensorboard", "False", "--train.profile-every", "0", "--train.peak-flops-per-s", "1e9"]


@pytest.fixture(scope="module")
def data(debug_data, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("strange") / "data"
    shutil.copytree(debug_data, directory)
    schema = json.loads((directory / "schema.json").read_text())
    next(table for table in schema["tables"] if table["name"] == "item")["rows"] = 30
    (directory / "schema.json").write_text(json.dumps(schema))
    return directory


def train(data: Path, run: Path, *policies: str) -> int:
    given = ["--tables.policies", *policies] if policies else []
    return main(["train", *ARGUMENTS, "--data", str(data), "--run-dir", str(run), *given])


def test_ids_outside_stop_the_run_where_no_policy_says_otherwise(data, tmp_path, capsys):
    assert train(data, tmp_path / "run", "item=hash") == 1
    assert "column stream.ads.item: expected an id with 0 <= id < 30" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["drop", "hash"])
def test_counted_by_feature_in_metrics_and_report(data, tmp_path, policy):
    run = tmp_path / "run"
    assert train(data, run, f"item={policy}", "ads.item=hash") == 0
    table = pq.read_table(data / "train-00000.parquet")
    item = table["id.item"].to_numpy()
    ads = np.concatenate([row.as_py() or [0] for row in table["stream.ads.item"]])
    last = [record for record in read_records(run / "metrics.jsonl") if record["kind"] == "train"][-1]
    assert last["step"] == STEPS
    assert last["ids_seen"]["item"] == 320
    assert last["ids_outside"] == {"item": int((item >= 30).sum()), "ads.item": int((ads >= 30).sum())}
    assert last["ids_outside"]["item"] > 50
    assert main(["report", str(run)]) == 0
    report = (run / "report.md").read_text()
    row = next(line for line in report.splitlines() if "| item |" in line.replace("  ", " ") and policy in line)
    assert f"{last['ids_outside']['item']}" in row


def test_a_policy_needs_a_feature_and_a_known_name(data, tmp_path, capsys):
    assert train(data, tmp_path / "run", "itm=drop") == 1
    assert "tables.policies names feature 'itm'; did you mean 'item'?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"tables\.policies: item=dropp; did you mean 'drop'"):
        TablesConfig(policies=("item=dropp",))
    for twice in (("item",), ("item=drop", "item=hash")):
        with pytest.raises(ConfigError, match="expected feature=policy, each feature once"):
            TablesConfig(policies=twice)
    with pytest.raises(ConfigError, match=r"tables\.sharding: item=rowwise; did you mean 'row_wise'"):
        TablesConfig(sharding=("item=rowwise",))
    assert TablesConfig(sharding=("item=row_wise",)).sharding_of() == {"item": "row_wise"}
    assert TablesConfig(policies=("a=error", "b=drop")).open_ids() == ("b",)


def test_the_planner_and_what_it_did_are_named(debug_data, tmp_path):
    run = tmp_path / "run"
    given = ["--tables.planner", "laptop", "--tables.sharding", "item=row_wise", "--train.steps", "1"]
    assert main(["train", *ARGUMENTS, "--data", str(debug_data), "--run-dir", str(run), *given]) == 0
    start = read_records(run / "metrics.jsonl")[0]
    assert start["table_placement"]["item"] == "rows over 1 ranks"
    assert set(start["table_placement"]) > {"item", "profile", "topic"}
    assert main(["report", str(run)]) == 0
    assert "Where the tables lie" in (run / "report.md").read_text()


def test_dropped_ids_do_not_count_in_a_mean():
    """Lengths [3, 1], the second id of row 0 and the only one of row 1 dropped: (e0 + e2) / 2, and 0."""
    vectors = torch.tensor([[2.0, 4.0], [0.0, 0.0], [4.0, 6.0], [0.0, 0.0]])
    found = mean_of_rows(vectors, torch.tensor([3, 1]), torch.tensor([True, False, True, False]))
    assert found.tolist() == [[3.0, 5.0], [0.0, 0.0]]
