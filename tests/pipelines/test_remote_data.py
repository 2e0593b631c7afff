"""A run on data behind a URL is the run on the directory, to the bit."""

from __future__ import annotations

import fsspec
import pytest
import torch
from gem_pipelines.cli import main
from gem_pipelines.config import DataConfig
from gem_pipelines.data_source import data_directory
from gem_pipelines.errors import ConfigError
from gem_pipelines.rundir import read_records
from gem_pipelines.runtime import Runtime

URL = "memory://ads/log"


@pytest.fixture
def remote(debug_data):
    filesystem = fsspec.filesystem("memory")
    for path in debug_data.iterdir():
        filesystem.pipe_file(f"/ads/log/{path.name}", path.read_bytes())
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def test_a_whole_run_with_survey_evaluation_floors_and_ledger(remote, debug_data, tmp_path, capsys):
    found = []
    for name, source in (("there", URL), ("here", str(debug_data))):
        arguments = ["--train.steps", "3", "--train.ledger", "True", "--train.tensorboard", "False"]
        arguments += ["--train.peak-flops-per-s", "1e9", "--data", source, "--run-dir", str(tmp_path / name)]
        assert main(["train", "--recipe", "debug", *arguments]) == 0
        records = read_records(tmp_path / name / "metrics.jsonl")
        steps = [(r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"]
        found.append(
            (steps, records[0]["data"], [r["tasks"] for r in records if r["kind"] == "eval"], records[-1]["floors"])
        )
    assert found[0] == found[1]
    assert found[0][3]
    assert main(["data", "ledger", str(tmp_path / "there")]) == 0
    assert main(["data", "verify", URL]) == 0
    assert "320" in capsys.readouterr().out


def test_a_url_without_data_is_a_config_error(remote):
    alone = Runtime(rank=0, world_size=1, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"'memory://ads/elsewhere': there is no memory://.*schema\.json"):
        data_directory(DataConfig(source="memory://ads/elsewhere"), runtime=alone, say=print)
