"""Training on requests is training on their impressions as plain samples; what is counted are impressions."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gem_data.api import build_loader, expand_batch, expand_requests, read_schema
from gem_data.interface import Batch, LoaderConfig
from gem_pipelines import checkpoint
from gem_pipelines.batches import BatchError, check_batch, pad_empty
from gem_pipelines.checkpoint_format import step_directory
from gem_pipelines.cli import main
from gem_pipelines.evaluate import predict
from gem_pipelines.ledger import _sample_ids, verify_ledger
from gem_pipelines.outcome import _read_split
from gem_pipelines.rundir import read_records
from gem_pipelines.timing import PartClock

OPTIONS = {"rows": 500, "users": 40, "items": 60, "streams": 2, "max_length": 12, "impressions": 4, "requests": True}


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import gem_datasets
    from gem_data.api import write_dataset

    directory = tmp_path_factory.mktemp("requests") / "data"
    made = gem_datasets.load("synthetic", **OPTIONS)
    write_dataset(directory, made.schema, {"train": made.train, "eval": made.eval}, rows_per_group=12)
    return directory


@pytest.fixture(scope="module")
def samples(requests: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("samples") / "data"
    expand_requests(requests, directory)
    return directory


@pytest.fixture
def job_on(runtime: Any, debug_config: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """job_on(data, "name", section={...}) -> Job in batches of 16 rows."""
    from gem_pipelines.job import build
    from gem_pipelines.rundir import RunDirectory

    def make(source: Path, name: str, **sections: dict[str, Any]) -> Any:
        own = {"source": str(source), "global_batch_size": 16, **sections.pop("data", {})}
        config = debug_config(data=own, **sections)
        directory = RunDirectory(tmp_path / name)
        directory.create(config, command="test")
        return build(config, data=source, directory=directory, runtime=runtime)

    return make


def states(job: Any) -> dict[str, torch.Tensor]:
    found = {f"dense.{name}": value.clone() for name, value in job.trainer.parallel.dense_state().items()}
    for table, parts in job.trainer.parallel.tables.table_state().items():
        found |= {f"{table}.{name}": value for name, value in parts.items()}
    return found


@pytest.mark.parametrize("budget", [None, 3e6], ids=["whole", "cut"])
def test_several_steps_train_what_plain_samples_train(job_on, requests, samples, budget) -> None:
    one, other = job_on(requests, "requests", balance={"budget": budget}), job_on(samples, "samples")
    steps, cuts = one._steps(), []
    for _ in range(4):
        (batch,) = one._read(steps)
        plain = expand_batch(one.schema, batch)
        first = one.trainer.step([batch], clock=PartClock(device=torch.device("cpu")))
        second = other.trainer.step([plain], clock=PartClock(device=torch.device("cpu")))
        cuts.append(len(one.trainer.cut([batch])))
        assert batch.rows < first["rows"] == second["rows"] == batch.sample_ids.numel()
        assert first["samples"] == second["samples"]
        assert first["events"] < second["events"]
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)
        assert sum(first["flops_by_part"].values()) < sum(second["flops_by_part"].values())
    assert (max(cuts) > 1) == (budget is not None)
    left, right = states(one), states(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-5, atol=1e-5, msg=name)


def test_predictions_are_of_impressions(job_on, requests, samples) -> None:
    found = []
    for data in (requests, samples):
        job = job_on(data, data.parent.name)
        loader = build_loader(data, split="eval", config=LoaderConfig(global_batch_size=7, shuffle=False))
        found.append(predict(job.trainer.parallel, loader, schema=job.schema, runtime=job.runtime))
    assert torch.equal(found[0]["sample_id"], found[1]["sample_id"])
    assert torch.equal(found[0]["user_id"], found[1]["user_id"])
    torch.testing.assert_close(found[0]["prediction"], found[1]["prediction"], rtol=1e-5, atol=1e-6)


def test_a_resumed_run_of_requests_is_the_same_to_the_bit(job_on, requests, take_steps, state_of, tmp_path) -> None:
    whole = job_on(requests, "whole", data={"logical_shards": 2})
    take_steps(whole, 2)
    (tmp_path / "saved").mkdir()
    checkpoint.save(tmp_path / "saved", whole.trainer, whole.loader, keep=1)
    take_steps(whole, 3)
    again = job_on(requests, "again", data={"logical_shards": 2})
    checkpoint.restore(step_directory(tmp_path / "saved", 2), again.trainer, again.loader)
    take_steps(again, 3)
    assert state_of(again) == state_of(whole)


def test_a_damaged_row_group_of_requests_is_left_out_and_counted(job_on, requests, take_steps, tmp_path) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(requests, spoilt)
    path = spoilt / read_schema(spoilt).files[0].path
    metadata = pq.ParquetFile(path).metadata
    names = [metadata.row_group(1).column(n).path_in_schema for n in range(metadata.num_columns)]
    chunk = metadata.row_group(1).column(names.index("id.item.list.element"))
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    lost = pq.ParquetFile(path).read_row_group(1, columns=["timestamp"]).num_rows
    job = job_on(spoilt, "run", data={"max_quarantined_rows": 50, "shuffle": False})
    records = take_steps(job, 3)
    assert sum(record["missing_rows"] for record in records) == job.trainer.position.quarantined_samples == lost == 12
    sound = [pq.ParquetFile(requests / path.name).read_row_group(n, columns=["sample_id"]) for n in (0, 2, 3)]
    impressions = [ids for table in sound for ids in table["sample_id"].to_pylist()]
    assert records[-1]["samples"] == sum(len(ids) for ids in impressions)


def test_a_step_of_requests_that_is_left_out_lacks_no_rows(job_on, requests, take_steps, monkeypatch) -> None:
    """Planned are requests, left out are impressions: neither count is subtracted from the other."""
    from gem_pipelines import trainer

    job = job_on(requests, "run", train={"max_skipped_steps": 1})
    with monkeypatch.context() as patched:
        whole = trainer.bce_by_task
        patched.setattr(trainer, "bce_by_task", lambda *given: whole(*given) * torch.nan)
        (record,) = take_steps(job, 1)
    assert (record["kind"], record["error"], record["missing_rows"]) == ("skip", "LossError", 0)
    assert job.trainer.position.skipped_samples == len(record["sample_ids"]) > 16
    take_steps(job, 1)
    assert job.trainer.position.quarantined_samples == 0


def test_lists_with_long_offsets_are_counted_as_lists(requests, tmp_path) -> None:
    """Readers take large_list; so do the ledger's check and the floors."""
    schema, found = read_schema(requests), []
    for name in ("list", "large"):
        data = tmp_path / name
        shutil.copytree(requests, data)
        for file in schema.files:
            table = pq.read_table(data / file.path)
            kinds = [
                pa.field(f.name, pa.large_list(f.type.value_type) if pa.types.is_list(f.type) else f.type)
                for f in table.schema
            ]
            pq.write_table(table.cast(pa.schema(kinds)) if name == "large" else table, data / file.path)
        ids, _ = _sample_ids(data)
        floor = _read_split(data, schema, "train", "click")
        found.append((ids.tolist(), floor.num_rows, floor.column("label.click").to_pylist()))
    assert pa.types.is_large_list(pq.read_schema(data / schema.files[0].path).field("sample_id").type)
    assert found[0] == found[1]
    assert len(found[0][0]) == found[0][1]


def one_batch(data: Path) -> Batch:
    loader = build_loader(data, split="train", config=LoaderConfig(global_batch_size=9, shuffle=False))
    return next(loader.epoch())


def test_wrong_requests_are_refused_before_anything_is_computed(requests, samples) -> None:
    schema, batch = read_schema(requests), one_batch(requests)
    check_batch(batch, schema)
    offsets = batch.requests
    assert offsets is not None
    for bad in (offsets + 1, offsets[:-1], torch.cat([offsets[:2], offsets[1:]]), offsets.double()):
        with pytest.raises(BatchError, match="requests"):
            check_batch(dataclasses.replace(batch, requests=bad), schema)
    moved = torch.cat([offsets[:1], offsets[1:2] - 1, offsets[2:]])
    assert offsets[1] > 1
    with pytest.raises(BatchError, match="stands once in a request"):
        check_batch(dataclasses.replace(batch, requests=moved), schema)
    with pytest.raises(BatchError, match="the data have requests"):
        check_batch(expand_batch(schema, batch), schema)
    with pytest.raises(BatchError, match="are plain samples"):
        check_batch(batch, read_schema(samples))


def test_a_rank_without_requests_gets_one_that_weighs_nothing(requests) -> None:
    schema = read_schema(requests)
    loader = build_loader(
        requests, split="train", config=LoaderConfig(global_batch_size=1, shuffle=False), rank=0, world_size=2
    )
    padded = pad_empty(next(b for b in loader.epoch() if not b.rows), schema)
    check_batch(padded, schema)
    assert (padded.rows, padded.sample_ids.numel(), float(padded.weights.sum())) == (1, 1, 0.0)


def test_the_command_line_trains_evaluates_and_counts_impressions(requests, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    arguments = ["--recipe", "debug", "--data", str(requests), "--run-dir", str(run), "--data.global-batch-size", "20"]
    arguments += ["--train.steps", "6", "--train.ledger", "True", "--train.peak-flops-per-s", "1e9"]
    assert main(["train", *arguments, "--train.report", "False", "--train.tensorboard", "False"]) == 0
    rows = sum(len(pq.read_table(path)) for path in requests.glob("train-*.parquet"))
    ids = [id for path in requests.glob("train-*.parquet") for row in pq.read_table(path)["sample_id"] for id in row]
    records = read_records(run / "metrics.jsonl")
    first_epoch = [r for r in records if r["kind"] == "train" and r["epoch"] == 0]
    assert len(first_epoch) == -(-rows // 20)
    assert first_epoch[-1]["samples"] == len(ids) > 2 * rows
    (evaluated,) = [r for r in records if r["kind"] == "eval"]
    predicted = pq.read_table(run / "predictions-6.parquet")
    assert evaluated["samples"] == len(predicted) == evaluated["tasks"]["click"]["count"]
    assert np.all(np.diff(predicted["sample_id"].to_numpy()) > 0)
    assert records[-1]["floors"]["logistic"]["auc"] is not None
    report = verify_ledger(run / "ledger", requests)
    assert report.ok
    assert report.complete >= 1


@pytest.mark.slow
def test_the_report_of_a_run_on_requests(requests, tmp_path) -> None:
    run = tmp_path / "run"
    arguments = ["--recipe", "debug", "--data", str(requests), "--run-dir", str(run), "--train.steps", "3"]
    assert main(["train", *arguments, "--train.report", "True"]) == 0
    assert (run / "report.html").stat().st_size > 1000


def test_data_commands_convert(requests, samples, tmp_path, capsys) -> None:
    schema = read_schema(requests)
    out = tmp_path / "grouped"
    assert main(["data", "requests", str(samples), "--out", str(out), "--impression", *schema.impression]) == 0
    assert "requests in" in capsys.readouterr().out
    assert read_schema(out).impression == schema.impression
    assert main(["data", "impressions", str(out), "--out", str(tmp_path / "back")]) == 0
    tables = [
        pq.read_table(directory / file.path).to_pylist()
        for directory in (samples, tmp_path / "back")
        for file in read_schema(directory).files
    ]
    assert tables[:2] == tables[2:]


def test_settings_that_cannot_share_say_so_on_the_command_line(requests, tmp_path, capsys) -> None:
    arguments = ["--recipe", "debug", "--data", str(requests), "--run-dir", str(tmp_path / "run")]
    assert main(["train", *arguments, "--model.stream.cls-tokens", "1"]) == 1
    assert "cls_tokens is 1" in capsys.readouterr().err


@pytest.mark.slow
def test_plans_and_fitted_costs_count_a_request_with_its_impressions(job_on, requests, samples) -> None:
    from gem_pipelines.cost_fit import draw_lengths, fit, measure_steps
    from gem_pipelines.planner.recipe import recipe_workload

    job = job_on(requests, "run")
    found = [
        recipe_workload(dataclasses.replace(job.config, data=dataclasses.replace(job.config.data)), data, world_size=2)
        for data in (requests, samples)
    ]
    rows = [sum(file.rows for file in read_schema(data).files if file.split == "train") for data in (requests, samples)]
    each = round(rows[1] / rows[0])
    assert found[1].forward_flops < found[0].forward_flops < each * found[1].forward_flops
    assert found[1].activation_bytes < found[0].activation_bytes < each * found[1].activation_bytes
    loads = [{table.name: table.ids for table in work.tables} for work in found]
    assert loads[0]["campaign"] == each * loads[1]["campaign"]
    assert loads[0]["profile"] == loads[1]["profile"] == 1
    lengths = draw_lengths(job.schema, most_rows=8, batches=16, seed=0)
    measured = measure_steps(job.trainer, lengths, repeats=1, seed=0)
    memory = fit(job.trainer, measured)["memory"]
    assert memory.model.per_impression > 0
    assert memory.held_out.mean < 0.2
