"""A job in the order of time: train a window, predict the strictly later one, resume on either side of an edge."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gem_data.api import events_cost, read_schema, write_dataset
from gem_data.blocks import chunks_of
from gem_data.interface import DataError, LoaderConfig
from gem_data.schema import schema_to_dict
from gem_data.streaming import StreamingLoader, time_windows
from gem_pipelines import evaluate
from gem_pipelines.balance import BalancedLoader
from gem_pipelines.errors import ConfigError, RemoteError
from gem_pipelines.job import build
from gem_pipelines.ledger import verify_ledger, verify_run
from gem_pipelines.rundir import RunDirectory, read_records
from gem_pipelines.runtime import Runtime
from gem_pipelines.windows import ends_epoch, evaluates_window, streaming, tell_of_no_prediction

SECONDS = 200_000
FIGURES = ("step", "epoch", "samples", "tokens", "loss", "grad_norm")


@pytest.fixture(scope="module")
def log(debug_data, tmp_path_factory):
    """The small data in row groups of 20 rows, which a log that is written as it comes has."""
    directory, schema = tmp_path_factory.mktemp("log") / "log", read_schema(debug_data)
    tables = {file.split: pq.read_table(debug_data / file.path) for file in schema.files}
    write_dataset(directory, schema, tables, rows_per_group=20)
    return directory


@pytest.fixture
def make_stream(runtime, log, debug_config, tmp_path):
    def make(name, *, create=True, source=log, **sections):
        data = {"stream_seconds": SECONDS, **sections.pop("data", {})}
        config = debug_config(data=data, train={"steps": None, **sections.pop("train", {})}, **sections)
        directory = RunDirectory(tmp_path / name)
        if create:
            directory.create(config, command="test")
        return build(config, data=source, directory=directory, runtime=runtime)

    return make


def records(job, kind):
    return [r for r in read_records(job.directory.metrics_file) if r["kind"] == kind]


def figures(job):
    return [tuple(r[name] for name in FIGURES) for r in records(job, "train")]


def progress(job):
    return [(r["step"], r["time_window"], r["samples"], r["tasks"]) for r in records(job, "progressive")]


@pytest.fixture(scope="module")
def windows(log):
    return time_windows(log, seconds=SECONDS)


def edges(windows, batch=32, accumulate=1):
    """Step at which each window ends."""
    return list(itertools.accumulate(math.ceil(math.ceil(w.rows / batch) / accumulate) for w in windows))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_window_is_trained_and_predicts_the_next(make_stream, windows, log, accumulate):
    """The windows' edges are the evaluations' steps; all rows are trained once, and predictions are of later rows."""
    assert len(windows) >= 3
    job = make_stream("run", data={"accumulate": accumulate, "prefetch": 2}, train={"ledger": True})
    job.train(resumed_from=None, survey=None)
    ends = edges(windows, accumulate=accumulate)
    assert [(step, w["trained"], w["evaluated"], rows) for step, w, rows, _ in progress(job)] == [
        (end, w.index, w.index + 1, after.rows) for end, w, after in zip(ends, windows, windows[1:], strict=False)
    ]
    assert all(
        step["time_window"]["first"] > windows[step["time_window"]["trained"]].last
        for step in records(job, "progressive")
    )
    assert figures(job)[-1][:3] == (ends[-1], 0, 320)
    found = verify_ledger(job.directory.path / "ledger", log)
    assert (found.trained, found.twice, found.lost) == (320, (), ())
    assert records(job, "end")[0]["whole_epochs"] == 1
    assert [r["step"] for r in records(job, "eval")] == [ends[-1]]


def test_rows_that_every_window_drops_are_not_lost(make_stream, windows, log):
    job = make_stream("run", data={"drop_last": True}, train={"ledger": True})
    job.train(resumed_from=None, survey=None)
    dropped = sum(window.rows % 32 for window in windows)
    found = verify_run(job.directory.path, log, job.trainer.config.data)
    assert (found.ok, found.complete, found.pending) == (True, 1, 0)
    assert (found.dropped, found.trained) == (dropped, 320 - dropped)
    assert dropped


@pytest.fixture
def quiet_day(log, tmp_path):
    """Windows of 80, 20 and 80 rows."""
    directory, schema = tmp_path / "quiet", read_schema(log)
    train = read_all(log, "train")
    stamps = train.column("timestamp").to_numpy()
    parts = [train.slice(start, rows) for start, rows in ((0, 80), (80, 20), (100, 80))]
    shifted = [
        part.set_column(
            part.column_names.index("timestamp"),
            "timestamp",
            [[int(t) + number * 10 * SECONDS * 100 for t in part.column("timestamp").to_pylist()]],
        )
        for number, part in enumerate(parts)
    ]
    assert stamps[180] - stamps[0] < 100 * SECONDS
    held = read_all(log, "eval")
    held = held.set_column(
        held.column_names.index("timestamp"),
        "timestamp",
        [[int(t) + 30 * SECONDS * 100 for t in held.column("timestamp").to_pylist()]],
    )
    write_dataset(directory, schema, {"train": pa.concat_tables(shifted), "eval": held}, rows_per_group=20)
    return directory


def test_no_window_is_trained_that_was_not_predicted(make_stream, quiet_day):
    """One of fewer rows than a batch, between two others: it is predicted together with the one after it."""
    seconds = 100 * SECONDS
    job = make_stream("run", source=quiet_day, data={"drop_last": True, "stream_seconds": seconds})
    windows = streaming(job.loader).windows
    assert [w.rows for w in windows] == [80, 20, 80]
    job.train(resumed_from=None, survey=None)
    (record,) = records(job, "progressive")
    assert (record["step"], record["samples"]) == (2, 100)
    assert record["time_window"] == {
        "trained": 0, "evaluated": 2, "passed_over": [1], "first": windows[1].first, "last": windows[2].last
    }  # fmt: skip


def test_a_stream_in_which_nothing_is_predicted_says_so_at_its_start(make_stream, debug_data, quiet_day, log, capsys):
    """One window; several of which the last alone has a batch; and a run that ends inside the first."""

    def said(name, **settings):
        job = make_stream(name, **settings)
        job.loader.close()
        return tell_of_no_prediction(job.loader, job.trainer.config, steps=job.total_steps)

    told = said("one", source=debug_data)
    assert f"{debug_data}: its 1 row group, seconds " in told
    assert "is 1 window of data.stream_seconds 200000" in told
    assert "gemline data prepare, requests or impressions --rows-per-group N" in told
    told = said("all", data={"stream_seconds": 10**9})
    assert ": its 16 row groups, seconds " in told
    assert "Lower data.stream_seconds" in told
    told = said("short", train={"steps": 1})
    assert "train.steps 1 ends before" in told
    assert said("many") is None
    settings = {"source": quiet_day, "data": {"drop_last": True, "stream_seconds": 100 * SECONDS}}
    assert said("quiet", **settings) is None
    settings["data"]["global_batch_size"] = 81
    with pytest.raises(DataError, match="expected a window with rows for at least one batch"):
        said("none", **settings)
    job = make_stream("run", source=debug_data, train={"steps": 1})
    job.train(resumed_from=None, survey=None)
    assert "no window of time is predicted before it is trained" in capsys.readouterr().out


@pytest.mark.parametrize("grows", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_a_grown_log_has_ahead_is_predicted_before_it_is_trained(make_stream, quiet_day, grows):
    """A run ended with the small window predicted alone; resumed, it predicts again if more is ahead now."""
    schema, train = read_schema(quiet_day), read_all(quiet_day, "train")
    held = read_all(quiet_day, "eval")
    write_dataset(quiet_day, schema, {"train": train.slice(0, 100), "eval": held}, rows_per_group=20, overwrite=True)
    settings = {"source": quiet_day, "data": {"drop_last": True, "stream_seconds": 100 * SECONDS}}
    settings["optimizer"] = {"schedule": "constant"}
    job = make_stream("run", **settings)
    job.train(resumed_from=None, survey=None)
    assert [(r["step"], r["samples"]) for r in records(job, "progressive")] == [(2, 20)]
    if grows:
        more = write_dataset(quiet_day / "more", schema, {"train": train.slice(100)}, rows_per_group=20)
        files = [dataclasses.replace(file, path=f"more/{file.path}") for file in more.files]
        grown = dataclasses.replace(schema, files=(*read_schema(quiet_day).files, *files))
        (quiet_day / "schema.json").write_text(json.dumps(schema_to_dict(grown)))
    again = make_stream("run", **settings, create=False)
    assert again.restore_latest() == 2
    again.directory.forget_after(2)
    again.train(resumed_from=2, survey=None)
    assert [(r["step"], r["samples"]) for r in records(again, "progressive")] == [(2, 20), (2, 100)][: 1 + grows]


def test_a_prediction_is_made_by_a_model_that_has_not_seen_the_window(make_stream, windows, log):
    """The figures of the first edge are those of a model that trained exactly the first window."""
    whole, first = make_stream("whole"), make_stream("first", train={"steps": edges(windows)[0]})
    whole.train(resumed_from=None, survey=None)
    first.train(resumed_from=None, survey=None)
    assert records(first, "end")[0]["whole_epochs"] == 0
    config = LoaderConfig(global_batch_size=7, shuffle=False)
    loader = StreamingLoader(log, seconds=SECONDS, config=config).later(config)
    predictions = evaluate.predict(first.trainer.parallel, loader, schema=first.schema, runtime=first.runtime)
    wanted = evaluate.evaluation_record(predictions, tasks=first.trainer.tasks, step=0, started=0.0)["tasks"]
    for task, found in progress(whole)[0][3].items():
        assert found == pytest.approx(wanted[task], rel=1e-5)  # float32 logits of another batch size


@pytest.mark.parametrize(
    "offset", [pytest.param(-1, marks=pytest.mark.slow), 0, pytest.param(1, marks=pytest.mark.slow)]
)
def test_resuming_around_an_edge_is_the_run_that_went_through(make_stream, state_of, windows, offset):
    """Stopped one step before, at, and after the second edge, with the prediction of that step not yet made."""
    straight = make_stream("straight")
    straight.train(resumed_from=None, survey=None)
    stop = edges(windows)[1] + offset
    stopped = make_stream("stopped")
    total, stopped.total_steps = stopped.total_steps, stop
    stopped._evaluate_window = lambda original=stopped._evaluate_window: (
        original() if stopped.trainer.position.step < stop else None
    )
    stopped.train(resumed_from=None, survey=None)
    again = make_stream("stopped", create=False)
    assert again.total_steps == total
    assert again.restore_latest() == stop
    again.directory.forget_after(stop)
    again.train(resumed_from=stop, survey=None)
    assert figures(again) == figures(straight)
    assert progress(again) == progress(straight)
    assert state_of(again) == state_of(straight)


def test_a_balanced_stream_is_a_stream(runtime, log, windows):
    """Its batches per window are those of the window it is in, not of the one that it began with."""
    inner = StreamingLoader(log, seconds=SECONDS, config=LoaderConfig(global_batch_size=9, prefetch=0))
    loader = BalancedLoader(inner, cost=events_cost(inner.schema), runtime=runtime, global_batch_size=9)
    assert streaming(loader) is inner
    ended = []
    for _ in windows:
        for batch in loader.epoch():
            loader.mark_trained(batch)
            if ends_epoch(loader, batch):
                ended.append(batch.step + 1)
            at_edge = ended[-1:] == [batch.step + 1] and batch.step + 1 < edges(windows, batch=9)[-1]
            assert (evaluates_window(loader) is not None) == at_edge
    assert ended == edges(windows, batch=9)
    loader.close()


def test_what_a_stream_cannot_do_is_a_config_error(make_stream, debug_config, windows):
    with pytest.raises(ConfigError, match=r"train\.steps is 999; the \d+ windows .* read once"):
        make_stream("long", train={"steps": 999})
    with pytest.raises(ConfigError, match=r"train\.epochs is 2; with data\.stream_seconds"):
        debug_config(data={"stream_seconds": 5}, train={"epochs": 2})
    with pytest.raises(ConfigError, match=r"data\.stream_seconds is 0, expected at least 1"):
        debug_config(data={"stream_seconds": 0})


@pytest.fixture
def damaged(log, tmp_path, windows):
    """The log with a bit flipped in the first row group of its second window."""
    directory = tmp_path / "damaged"
    shutil.copytree(log, directory)
    spoil(directory, windows[1].groups[:1])
    return directory


def spoil(directory, groups):
    for file, group in groups:
        path = directory / read_schema(directory).files[file].path
        (chunk,) = (c for c in chunks_of(pq.read_metadata(path), group) if c.column == "user_id")
        data = bytearray(path.read_bytes())
        data[chunk.stop - 2] ^= 4
        path.write_bytes(data)


@pytest.mark.parametrize("resumed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_quarantine_holds_where_the_next_window_is_predicted(make_stream, damaged, windows, resumed):
    """The damaged row group is met when the window before it has been trained, and after a stop there once more."""
    first = edges(windows)[0]
    data = {"max_quarantined_rows": 50}
    job = make_stream("run", source=damaged, data=data, train={"ledger": True})
    if resumed:
        job.total_steps, job._evaluate_window = first, lambda: None
        job.train(resumed_from=None, survey=None)
        job = make_stream("run", source=damaged, data=data, train={"ledger": True}, create=False)
        assert job.restore_latest() == first
        job.directory.forget_after(first)
    job.train(resumed_from=first if resumed else None, survey=None)
    found = records(job, "progressive")
    lost = [20, *(0 for _ in windows[2:])]
    assert [r["missing_rows"] for r in found] == lost
    assert [r["samples"] for r in found] == [w.rows - missing for w, missing in zip(windows[1:], lost, strict=True)]
    assert job.trainer.position.quarantined_samples == 20
    assert [len(record["groups"]) for record in records(job, "quarantine")] == [1]
    assert verify_run(job.directory.path, damaged, job.trainer.config.data).ok


@pytest.mark.slow
def test_a_window_that_is_lost_whole_is_predicted_by_nothing(make_stream, damaged, windows):
    spoil(damaged, windows[1].groups[1:])
    job = make_stream("run", source=damaged, data={"max_quarantined_rows": 200})
    job.train(resumed_from=None, survey=None)
    found = records(job, "progressive")
    assert [r["missing_rows"] for r in found] == [windows[1].rows, *(0 for _ in windows[2:])]
    assert found[0]["samples"] == 0
    assert {r["ne"] for r in found[0]["tasks"].values()} == {None}
    assert job.trainer.position.quarantined_samples == windows[1].rows


def test_without_quarantine_the_run_stops_there(make_stream, damaged, windows):
    job = make_stream("run", source=damaged, train={"checkpoint_every": 1})
    with pytest.raises(DataError, match="column user_id: expected bytes"):
        job.train(resumed_from=None, survey=None)
    assert job.trainer.position.step == edges(windows)[0]


class OfTwo(Runtime):
    """Rank 0 of two, the other of which cannot read its second batch."""

    def sum(self, values):
        OfTwo.asked += 1
        return values + (OfTwo.asked == 2)

    def gather_text(self, text):
        return [text, "rows that cannot be read"]


def test_an_evaluation_stops_with_the_rank_that_cannot_read(make_job):
    """Before the lookup in which the others would wait for it."""
    job, OfTwo.asked, looked_up = make_job("run"), 0, []
    job.trainer.parallel.module.register_forward_hook(lambda *_: looked_up.append(True))
    alone = OfTwo(rank=0, world_size=2, device=torch.device("cpu"))
    with pytest.raises(RemoteError, match=r"evaluation: rank 1 reported: rows that cannot be read"):
        evaluate.predict(job.trainer.parallel, job.loader, schema=job.schema, runtime=alone)
    assert len(looked_up) == 1
    assert job.trainer.parallel.module.training


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_run_goes_on_where_its_log_has_grown(make_stream, log, windows, tmp_path, drop_last):
    """A finished run of the first rows, and then of all. The ledger holds each end against the data of its time."""
    directory, schema = tmp_path / "grown", read_schema(log)
    tables = {split: read_all(log, split) for split in ("train", "eval")}
    cut = sum(window.rows for window in windows[:2])
    write_dataset(directory, schema, {**tables, "train": tables["train"].slice(0, cut)}, rows_per_group=20)
    settings = {"source": directory, "train": {"ledger": True}, "optimizer": {"schedule": "constant"}}
    settings["data"] = {"drop_last": drop_last}
    job = make_stream("run", **settings)
    job.train(resumed_from=None, survey=None)
    done = job.trainer.position.step
    assert done == job.total_steps
    dropped = sum(window.rows % 32 for window in windows[:2]) if drop_last else 0
    assert dropped or not drop_last

    def ledger(of):
        found = verify_run(of.directory.path, directory, of.trainer.config.data)
        return found.trained, found.twice, found.lost, found.complete, found.pending, found.dropped

    assert ledger(job) == (cut - dropped, (), (), 1, 0, dropped)

    more = write_dataset(directory / "more", schema, {"train": tables["train"].slice(cut)}, rows_per_group=20)
    files = [dataclasses.replace(file, path=f"more/{file.path}") for file in more.files]
    grown = dataclasses.replace(schema, files=(*read_schema(directory).files, *files))
    (directory / "schema.json").write_text(json.dumps(schema_to_dict(grown)))
    assert ledger(job) == (cut - dropped, (), (), 0, 320 - cut + dropped, 0)
    again = make_stream("run", **settings, create=False)
    assert again.restore_latest() == done
    assert again.total_steps > done
    again.ledger.forget_after(done)
    again.directory.forget_after(done)
    again.train(resumed_from=done, survey=None)
    assert again.trainer.position.step == again.total_steps
    assert [w["trained"] for _, w, _, _ in progress(again)] == list(range(len(streaming(again.loader).windows) - 1))
    dropped = sum(window.rows % 32 for window in streaming(again.loader).windows) if drop_last else 0
    assert ledger(again) == (320 - dropped, (), (), 1, 0, dropped)


def read_all(directory, split):
    return pa.concat_tables(
        [pq.read_table(directory / f.path) for f in read_schema(directory).files if f.split == split]
    )
