"""The coefficients of a run stay those of its start: a resume takes them from the run, and refuses others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gem_data.api import read_schema
from gem_pipelines.checkpoint import capture, find_mismatches
from gem_pipelines.checkpoint_format import step_directory
from gem_pipelines.checkpoint_manifest import read_manifest, state_digest
from gem_pipelines.config import BalanceConfig
from gem_pipelines.cost_run import common_costs, to_json
from gem_pipelines.errors import ConfigError
from gem_pipelines.job import Request, _run, check_balance
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.rundir import RunDirectory


def write_cost(path: Path, stream: str, coefficient: float, **more: Any) -> None:
    time = {"unit": "seconds", "per_sample": 1.0, "terms": [{"stream": stream, "coefficient": coefficient}]}
    path.write_text(json.dumps({"time": {**time, **more}}))


def digest(run: Path, step: int) -> str:
    return state_digest(read_manifest(step_directory(run / "checkpoints", step)))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [{"method": "global"}, {"budget": 40.0}])
def test_a_resume_takes_the_coefficients_of_the_run(
    debug_config, debug_data, runtime, tmp_path, monkeypatch, budget
) -> None:
    """From another directory, where the relative path is of no file, or of another one."""
    name = read_schema(debug_data).streams[0].name
    (tmp_path / "elsewhere").mkdir()
    write_cost(tmp_path / "cost.json", name, 2.0)
    monkeypatch.chdir(tmp_path)
    balance = {"cost": "cost.json", **budget}
    train = {"steps": 4, "checkpoint_every": 2, "report": False, "predictions": False, "checkpoint_async": False}
    config = debug_config(train=train, balance=balance)
    run = RunDirectory(tmp_path / "run")

    def start(of: Any, **more: Any) -> None:
        _run(Request(config=of, run_dir=run.path, command="test", **more), run, None, runtime)

    start(config, resume=False)
    whole = digest(run.path, 4)
    shutil.rmtree(step_directory(run.checkpoints, 4))
    monkeypatch.chdir(tmp_path / "elsewhere")
    start(config, resume=True)
    assert digest(run.path, 4) == whole
    shutil.rmtree(step_directory(run.checkpoints, 4))
    write_cost(Path("cost.json"), name, 6.0, per_step=3.0)
    start(config, resume=True)
    assert digest(run.path, 4) == whole
    words = rf"(?s)not those that this run began with.*{name}\).coefficient: 2.0 before, 6.0 now"
    with pytest.raises(ConfigError, match=words):
        start(config, resume=True, cost_given=True)
    shutil.copy("cost.json", "other.json")
    other = debug_config(train=train, balance={**balance, "cost": "other.json"})
    with pytest.raises(ConfigError, match=r"per_step: 0\.0 before, 3\.0 now"):
        start(other, resume=True, automatic=True)
    shutil.rmtree(step_directory(run.checkpoints, 4))
    write_cost(Path("other.json"), name, 2.0)
    start(other, resume=True)
    assert digest(run.path, 4) == whole
    assert run.read_config().balance.cost == json.loads(run.cost_file.read_text())["balance.cost"] == "other.json"


def test_a_checkpoint_of_other_coefficients_says_what_differs(make_job, tmp_path) -> None:
    """Where they decide what a step is; where they only measure, they may be others."""
    name = make_job("schema").schema.streams[0].name
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, coefficient in zip(paths, (2.0, 3.0), strict=True):
        write_cost(path, name, coefficient)
    expected = {"budget": f"what balance.budget limits: terms[0] (stream {name}).coefficient: 2.0 before, 3.0 now"}
    expected["global"] = f"load of a row: terms[0] (stream {name}).coefficient: 2.0 before, 3.0 now"
    for number, (key, balance) in enumerate({"budget": {"budget": 40.0}, "global": {"method": "global"}}.items()):
        first, second = (make_job(f"{number}-{p.name}", balance={"cost": str(p), **balance}) for p in paths)
        stored = capture(first.trainer, first.loader)
        assert find_mismatches(stored, first.trainer) == []
        assert find_mismatches(stored, second.trainer) == [f"balance.cost: {expected[key]}"]
        stored.about["costs"] = {"load": 5}
        assert "about costs: expected a cost model" in find_mismatches(stored, second.trainer)[0]
    first, second = (make_job(f"plain-{p.name}", balance={"cost": str(p)}) for p in paths)
    assert find_mismatches(capture(first.trainer, first.loader), second.trainer) == []


def test_only_the_first_rank_reads_the_file(debug_data, tmp_path) -> None:
    schema = read_schema(debug_data)
    said: list[str] = []

    class First:
        def on_main(self, action: Any) -> None:
            action()

        def from_main(self, text: str) -> str:
            said.append(text)
            return text

    class Second:
        def on_main(self, action: Any) -> None: ...

        def from_main(self, text: str) -> str:
            assert text == ""
            return said[0]

    write_cost(tmp_path / "cost.json", schema.streams[0].name, 0.1 + 0.2)
    config = BalanceConfig(cost=str(tmp_path / "cost.json"))
    first = common_costs(config, schema, ModelConfig(), First())
    (tmp_path / "cost.json").unlink()
    assert common_costs(config, schema, ModelConfig(), Second()) == first
    assert first.time.terms[0].coefficient == 0.1 + 0.2


class Alone:
    """A runtime of one process."""

    def on_main(self, action: Any) -> None:
        action()

    def from_main(self, text: str) -> str:
        return text


def test_what_the_run_has_is_taken_and_others_are_refused(debug_data, tmp_path) -> None:
    schema = read_schema(debug_data)
    name, saved, given = schema.streams[0].name, tmp_path / "run.json", tmp_path / "cost.json"
    config = BalanceConfig(cost=str(given))

    def find(config: BalanceConfig = config, **more: Any) -> Any:
        return common_costs(config, schema, ModelConfig(), Alone(), **more)

    write_cost(given, name, 2.0)
    costs = find(saved=saved)  # of a run from before this file was written
    saved.write_text(json.dumps(to_json(costs)))
    given.unlink()
    assert find(saved=saved) == costs
    with pytest.raises(ConfigError, match="No such file"):
        find(saved=saved, anew=True)
    write_cost(given, name, 6.0, per_step=3.0)
    assert find(saved=saved) == costs
    words = rf"(?s)not those that this run began with.*per_step.*{name}\).coefficient: 2.0 before, 6.0 now"
    with pytest.raises(ConfigError, match=words):
        find(saved=saved, anew=True)
    for other in ("flops", "events"):
        with pytest.raises(ConfigError, match="unit: seconds before"):
            find(BalanceConfig(cost=other), saved=saved)
    write_cost(tmp_path / "same.json", name, 2.0)
    found = find(BalanceConfig(cost=str(tmp_path / "same.json")), saved=saved)
    assert (found.time, found.name) == (costs.time, str(tmp_path / "same.json"))
    memory = {"unit": "bytes", "per_sample": 5.0}
    saved.write_text(json.dumps({**to_json(costs), "memory": memory}))
    assert find(BalanceConfig(cost=str(tmp_path / "same.json")), saved=saved).time == costs.time
    with pytest.raises(ConfigError, match=r"memory: per_sample: 5\.0 before, none now"):
        find(BalanceConfig(cost=str(tmp_path / "same.json"), budget=9.0, budget_of="memory"), saved=saved)


@pytest.mark.parametrize("unit", ["time", "memory"])
def test_a_budget_of_fewer_bytes_than_no_row_needs_is_refused_at_the_start(make_job, tmp_path, unit) -> None:
    cost = {"unit": "bytes", "per_step": 1000.0, "terms": []}
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"time": cost, "memory": cost}))
    balance = {"cost": str(path), "budget": 1000.0, "budget_of": "cost" if unit == "time" else "memory"}
    with pytest.raises(
        ConfigError, match=r"balance\.budget is 1000\.0, expected above the 1000 bytes that .*cost\.json"
    ):
        make_job("low", balance=balance)
    make_job("enough", balance={**balance, "budget": 1000.5})


def test_global_balance_is_refused_with_copies_that_are_averaged(debug_config) -> None:
    """Rows would move between copies, which apply the gradients of their own rows: another model than without."""
    parallel = {"table_sync": "average", "table_replica": 2}
    with pytest.raises(ConfigError, match=r"balance\.method is 'global' and parallel\.table_sync 'average' over 2"):
        check_balance(debug_config(parallel=parallel, balance={"method": "global"}))
    check_balance(debug_config(parallel={**parallel, "table_sync": "gradients"}, balance={"method": "global"}))
    check_balance(debug_config(parallel={**parallel, "table_replica": 1}, balance={"method": "global"}))
    check_balance(debug_config(parallel=parallel, balance={"method": "base"}))
