"""Damaged row groups in a run: stop by default; left out, counted and capped on request. Nothing is lost silently."""

from __future__ import annotations

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from gem_data.api import read_schema, write_dataset
from gem_data.interface import DataError
from gem_pipelines.agreement import MissingRowsError
from gem_pipelines.cli import main
from gem_pipelines.errors import RunError
from gem_pipelines.job import build
from gem_pipelines.ledger import Ledger, read_ledger, verify_ledger
from gem_pipelines.quarantine import TooMuchDamageError
from gem_pipelines.rundir import RunDirectory, read_records
from gem_pipelines.trainer import LossError


@pytest.fixture
def damaged(debug_data, tmp_path):
    """The small data in row groups of 40, one bit of the third flipped; (directory, ids of that group)."""
    import pyarrow as pa

    schema = read_schema(debug_data)
    tables: dict[str, pa.Table] = {}
    for file in schema.files:
        tables[file.split] = pq.read_table(debug_data / file.path)
    directory = tmp_path / "damaged"
    written = write_dataset(directory, schema, tables, rows_per_group=40)
    path = directory / written.files[0].path
    metadata = pq.read_metadata(path)
    lost = pq.ParquetFile(path).read_row_group(2, columns=["sample_id"]).column(0).to_pylist()
    data = bytearray(path.read_bytes())
    data[metadata.row_group(2).column(1).data_page_offset + 40] ^= 2
    path.write_bytes(data)
    return directory, lost


def job_on(directory, tmp_path, runtime, debug_config, train=None, balance=None, **data):
    config = debug_config(
        balance=balance or {},
        data={"source": str(directory), "window_groups": 2, **data},
        train={"steps": 10, "epochs": 1, "ledger": True, "report": False, **(train or {})},
    )
    run = RunDirectory(tmp_path / "run")
    run.create(config, command="test")
    return build(config, data=directory, directory=run, runtime=runtime)


def test_by_default_the_run_stops_and_names_the_place(damaged, tmp_path, runtime, debug_config):
    job = job_on(damaged[0], tmp_path, runtime, debug_config)
    with pytest.raises(
        DataError, match=r"train-00000\.parquet, row group 2, column user_id: expected bytes .* with xxh3"
    ):
        job.train(resumed_from=None, survey=None)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_quarantined_rows_are_counted_and_listed(damaged, tmp_path, runtime, debug_config, capsys, prefetch):
    directory, lost = damaged
    job = job_on(directory, tmp_path, runtime, debug_config, max_quarantined_rows=50, prefetch=prefetch)
    job.train(resumed_from=None, survey=None)
    assert job.trainer.position.quarantined_samples == len(lost) == 40
    assert job.trainer.position.samples == 280
    records = read_records(job.directory.metrics_file)
    (noted,) = [record for record in records if record["kind"] == "quarantine"]
    (group,) = noted["groups"]
    assert (group["file"], group["row_group"], group["rows"], group["rank"]) == ("train-00000.parquet", 2, 40, 0)
    assert noted["step"] <= 10
    report = verify_ledger(tmp_path / "run" / "ledger", directory, quarantined=frozenset(lost))
    assert (report.trained, report.complete, report.twice, report.lost) == (280, 1, (), ())
    assert main(["data", "ledger", str(tmp_path / "run")]) == 0
    assert "1 whole epochs, 280 samples trained, 0 left out, 0 lost, 0 twice" in capsys.readouterr().out


def test_with_base_batches_the_window_of_a_damaged_group_is_counted_and_listed(
    damaged, tmp_path, runtime, debug_config, capsys
):
    """Windows are of two groups: the sound neighbour is left out, too, and the ledger agrees."""
    directory, lost = damaged
    balance = {"method": "base", "base_batch": 4, "cost": "events"}
    job = job_on(directory, tmp_path, runtime, debug_config, balance=balance, max_quarantined_rows=100)
    job.train(resumed_from=None, survey=None)
    assert job.trainer.position.quarantined_samples == 80
    assert job.trainer.position.samples == 240
    records = read_records(job.directory.metrics_file)
    groups = [group for record in records if record["kind"] == "quarantine" for group in record["groups"]]
    assert [group["rows"] for group in groups] == [40, 40]
    assert [group["row_group"] == 2 for group in groups].count(True) == 1
    assert main(["data", "ledger", str(tmp_path / "run")]) == 0
    assert "1 whole epochs, 240 samples trained, 0 left out, 0 lost, 0 twice" in capsys.readouterr().out
    trained = read_ledger(tmp_path / "run" / "ledger")["sample_id"]
    assert not set(lost) & set(trained.tolist())


def test_above_the_cap_the_run_stops(damaged, tmp_path, runtime, debug_config):
    job = job_on(damaged[0], tmp_path, runtime, debug_config, max_quarantined_rows=3)
    with pytest.raises(
        TooMuchDamageError, match=r"rows are lost to damaged row groups, data.max_quarantined_rows allows 3: tr"
    ):
        job.train(resumed_from=None, survey=None)
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_a_loader_that_loses_rows_without_saying_so_is_caught(make_job, take_steps, state_of):
    job = make_job()
    take_steps(job, 1)
    before = state_of(job)
    with pytest.raises(MissingRowsError, match="step 2: the ranks hold 32 rows, the loaders planned 33"):
        take_steps(job, 1, change=lambda batch: dataclasses.replace(batch, global_rows=33))
    assert state_of(job) == before


def test_a_ledger_tells_what_is_lost_and_what_came_twice(make_job, tmp_path, debug_data, capsys):
    """Against ledgers of which one row was removed, doubled, or belongs to other data."""
    job = make_job(train={"steps": 10, "ledger": True, "report": False, "checkpoint_every": 4})
    job.train(resumed_from=None, survey=None)
    ledger = job.directory.path / "ledger"
    assert sorted(path.name for path in ledger.iterdir()) == [f"step-{n:08d}.parquet" for n in (4, 8, 10)]
    assert verify_ledger(ledger, debug_data).ok
    assert main(["data", "ledger", str(job.directory.path)]) == 0
    assert "1 whole epochs, 320 samples trained, 0 left out, 0 lost, 0 twice" in capsys.readouterr().out
    shutil.copytree(ledger, tmp_path / "late")
    (tmp_path / "late" / "step-00000004.parquet").unlink()
    with pytest.raises(RunError, match=r"begins at step 5: --train\.ledger True came later"):
        verify_ledger(tmp_path / "late", debug_data)
    table = pq.read_table(ledger / "step-00000008.parquet")
    first = table.column("sample_id")[0].as_py()
    for change, expected in (("lost", ((), (first,))), ("twice", ((first,), ()))):
        copy = tmp_path / change
        shutil.copytree(ledger, copy)
        import pyarrow as pa

        spoilt = table.slice(1) if change == "lost" else pa.concat_tables([table, table.slice(0, 1)])
        pq.write_table(spoilt, copy / "step-00000008.parquet")
        more = pq.read_table(copy / "step-00000010.parquet")
        later = more.set_column(1, "epoch", pa.array([1] * len(more)))
        pq.write_table(pa.concat_tables([more, later.slice(0, 1)]), copy / "step-00000010.parquet")
        report = verify_ledger(copy, debug_data)
        assert (report.twice, report.lost) == expected
        assert not report.ok
    assert json.loads((debug_data / "schema.json").read_text())["files"][0]["rows"] == 320


def test_a_loss_in_the_last_epoch_is_told(make_job, capsys):
    """Where the run finished it; of an unfinished one, how many are to come."""
    for steps, said in ((9, "32 of the unfinished epoch not yet trained"), (10, "1 whole epochs")):
        job = make_job(str(steps), train={"steps": steps, "ledger": True, "report": False, "checkpoint_every": 8})
        job.train(resumed_from=None, survey=None)
        assert main(["data", "ledger", str(job.directory.path)]) == 0
        told = capsys.readouterr().out
        assert said in told
        assert "0 lost, 0 twice" in told
    last = job.directory.path / "ledger" / "step-00000010.parquet"
    table = pq.read_table(last)
    gone = table.column("sample_id")[:10].to_pylist()
    pq.write_table(table.slice(10), last)
    assert main(["data", "ledger", str(job.directory.path)]) == 1
    told = capsys.readouterr().out
    assert "1 whole epochs, 310 samples trained, 0 left out, 10 lost, 0 twice" in told
    assert f"lost: {', '.join(map(str, sorted(gone)))}" in told
    last.unlink()
    assert main(["data", "ledger", str(job.directory.path)]) == 1
    assert "ends at step 8, the run at step 10" in capsys.readouterr().err


def test_a_ledger_may_begin_with_a_step_that_had_no_rows(debug_data, runtime, tmp_path):
    """All of its first batch was quarantined."""
    ids = torch.tensor(all_ids(debug_data))
    for first in (1, 2):
        ledger = Ledger(tmp_path / str(first), runtime=runtime, enabled=True)
        for step, held in ((1, ids[:0]), (2, ids)):
            if step >= first:
                ledger.note([SimpleNamespace(sample_ids=held)], step=step, epoch=0, trained=True)
        ledger.commit(2)
    report = verify_ledger(tmp_path / "1", debug_data)
    assert (report.complete, report.trained, report.ok) == (1, 320, True)
    with pytest.raises(RunError, match="begins at step 2"):
        verify_ledger(tmp_path / "2", debug_data)


def all_ids(directory):
    files = [file.path for file in read_schema(directory).files if file.split == "train"]
    return [i for path in files for i in pq.read_table(directory / path).column("sample_id").to_pylist()]


def test_rows_that_a_skipped_step_lacks_are_counted(damaged, tmp_path, runtime, debug_config, monkeypatch):
    """A step that lacks rows and is left out for another reason: both are told, and the counts add up."""
    directory, lost = damaged
    job = job_on(directory, tmp_path, runtime, debug_config, {"max_skipped_steps": 20}, max_quarantined_rows=50)
    compute, short = job.trainer._compute, []

    def fail_where_short(ready, **options):
        short.append(ready.totals.missing)
        if short[-1]:
            raise LossError("the loss is not finite")
        return compute(ready, **options)

    monkeypatch.setattr(job.trainer, "_compute", fail_where_short)
    job.train(resumed_from=None, survey=None)
    position = job.trainer.position
    assert sum(short) == position.quarantined_samples == len(lost)
    assert position.skipped_steps == sum(missing > 0 for missing in short)
    assert position.samples + position.skipped_samples + position.quarantined_samples == 320
    records = read_records(job.directory.metrics_file)
    (noted,) = [record for record in records if record["kind"] == "quarantine"]
    assert noted["step"] == next(record["step"] for record in records if record["kind"] == "skip")
