"""D1: every sample exactly once an epoch, whatever is killed when, at any number of processes and any reading ahead.

Loaders and ledger alone, many schedules: ranks live in this process, and a kill is to let go of all but the files.
Whole jobs, fewer: real processes, real SIGKILL. In both the ledger of sample ids says what was trained; it must be the
data set, each id once an epoch; and for the loaders in the order of a run that nothing happened to.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from gem_data.api import build_loader, write_dataset
from gem_data.interface import LoaderConfig
from gem_data.testing import tiny_schema, tiny_table
from gem_pipelines.checkpoint_format import list_steps
from gem_pipelines.config import DataConfig
from gem_pipelines.flight import read_flights
from gem_pipelines.ledger import Ledger, read_ledger, verify_ledger, verify_run
from super_jobs import Zygote

EPOCHS = 2
WORLDS = (1, 1, 2, 2, 3, 4)
JOB_STEPS = EPOCHS * 8  # of whole jobs: 320 rows, 40 a step


class Rank:
    """What a Ledger needs of a runtime, for ranks that live in one process: rank 0 is asked last."""

    def __init__(self, rank: int, held: list[torch.Tensor]) -> None:
        self.rank, self._held = rank, held

    def gather_rows(self, rows: torch.Tensor) -> torch.Tensor:
        self._held.insert(0, rows)
        if self.rank:
            return rows
        whole = torch.cat(self._held)
        self._held.clear()
        return whole

    def on_main(self, action: Any) -> None:
        if self.rank == 0:
            action()


class KilledError(Exception):
    """The job is gone."""


class Job:
    """The loop of a training job without a model: read, train, mark, note, commit the ledger, write the checkpoint."""

    def __init__(self, directory: Path, data: Path, config: LoaderConfig, world: int) -> None:
        held: list[torch.Tensor] = []
        self.checkpoint = directory / "checkpoint.json"
        self.loaders = [
            build_loader(data, split="train", config=config, rank=rank, world_size=world) for rank in range(world)
        ]
        self.ledgers = [Ledger(directory / "ledger", runtime=Rank(r, held), enabled=True) for r in range(world)]
        self.step = 0
        if self.checkpoint.exists():
            saved = json.loads(self.checkpoint.read_text())
            self.step = saved["step"]
            for loader in self.loaders:
                loader.load_state_dict(saved["loader"])
        self.ledgers[0].forget_after(self.step)

    def run(self, *, total: int, save_every: int, kill_at: tuple[int, str] | None) -> None:
        """Train to step `total`. kill_at: (step, place) where everything is lost."""
        per_epoch = self.loaders[0].batches_per_epoch

        def reach(place: str) -> None:
            if kill_at is not None and self.step + 1 >= kill_at[0] and place == kill_at[1]:
                raise KilledError

        iterators = [loader.epoch() for loader in self.loaders]
        try:
            while self.step < total:
                batches = [next(iterator, None) for iterator in iterators]
                if batches[0] is None:
                    iterators = [loader.epoch() for loader in self.loaders]
                    batches = [next(iterator) for iterator in iterators]
                epoch = batches[0].step // per_epoch
                reach("read")
                for loader, ledger, batch in zip(self.loaders, self.ledgers, batches, strict=True):
                    loader.mark_trained(batch)
                    ledger.note([batch], step=self.step + 1, epoch=epoch, trained=True)
                reach("trained")
                self.step += 1
                if self.step % save_every == 0 or self.step == total:
                    self._save(reach)
        finally:
            for loader in self.loaders:
                loader.close()

    def _save(self, reach: Any) -> None:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        for ledger in reversed(self.ledgers):
            ledger.commit(self.step)
        self.step -= 1
        reach("committed")
        self.step += 1
        temporary = self.checkpoint.with_suffix(".tmp")
        temporary.write_text(json.dumps({"step": self.step, "loader": states[0]}))
        os.replace(temporary, self.checkpoint)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """150 rows in row groups of 20, three files."""
    directory = tmp_path_factory.mktemp("data") / "d"
    tables = {"train": tiny_table(rows=150, seed=1), "eval": tiny_table(rows=5, seed=2, first_sample=900)}
    write_dataset(directory, tiny_schema(), tables, rows_per_file=60, rows_per_group=20)
    return directory


def layout(rng: random.Random) -> tuple[int, int]:
    """(processes, batches read ahead)."""
    return rng.randint(1, 4), rng.randint(0, 3)


def test_d1_schedules_of_kills_and_layouts(data, tmp_path, rng, count, counted):
    schedules = count(fast=5, full_count=200)
    kills = resumes = 0
    for number in range(schedules):
        directory = tmp_path / str(number)
        directory.mkdir()
        settings = {
            "global_batch_size": rng.choice([7, 12, 16]),
            "seed": rng.randrange(1000),
            "shuffle": rng.random() < 0.7,
            "window_groups": rng.randint(1, 4),
            "logical_shards": rng.randint(1, 3),
        }
        save_every = rng.randint(1, 5)
        straight = Job(tmp_path / f"{number}-straight", data, LoaderConfig(**settings), 1)
        per_epoch = straight.loaders[0].batches_per_epoch
        total = EPOCHS * per_epoch
        straight.checkpoint.parent.mkdir()
        straight.run(total=total, save_every=per_epoch, kill_at=None)
        # At least two in the first epoch; the first and the last batch are as likely as any.
        places = [rng.randint(1, per_epoch) for _ in range(2)] + [
            rng.randint(1, total) for _ in range(rng.randint(0, 4))
        ]
        for place in sorted(places):
            world, prefetch = layout(rng)
            job = Job(directory, data, LoaderConfig(**settings, prefetch=prefetch), world)
            resumes += job.step > 0
            where = rng.choice(["read", "trained", "committed"])
            try:
                job.run(total=total, save_every=save_every, kill_at=(place, where))
            except KilledError:
                kills += 1
            del job
        world, prefetch = layout(rng)
        Job(directory, data, LoaderConfig(**settings, prefetch=prefetch), world).run(
            total=total, save_every=save_every, kill_at=None
        )
        report = verify_ledger(directory / "ledger", data)
        assert (report.lost, report.twice, report.complete) == ((), (), EPOCHS), (number, settings, report)
        assert report.trained == EPOCHS * 150
        mine, expected = read_ledger(directory / "ledger"), read_ledger(tmp_path / f"{number}-straight" / "ledger")
        for column in ("step", "sample_id"):
            assert np.array_equal(mine[column], expected[column]), (number, settings, column)
    counted("schedules with 0 lost, 0 twice", f"{schedules} of {schedules}, {kills} kills, {resumes} resumes")
    assert kills > schedules


def test_the_procedure_sees_a_loader_that_forgets(data, tmp_path, monkeypatch):
    """The same check, with a state that is of what was read ahead instead of what was trained: it must fail."""
    config = LoaderConfig(global_batch_size=12, prefetch=0)
    job = Job(tmp_path, data, config, 2)
    for loader in job.loaders:
        monkeypatch.setattr(loader, "state_dict", lambda inner=loader: ahead(inner))
    with pytest.raises(KilledError):
        job.run(total=20, save_every=2, kill_at=(7, "read"))
    Job(tmp_path, data, config, 1).run(total=25, save_every=2, kill_at=None)
    assert verify_ledger(tmp_path / "ledger", data).lost


def test_rows_that_drop_last_leaves_out_are_not_lost_but_any_more_are(data, tmp_path):
    """150 rows in batches of 16: 6 are left out of each epoch; a ledger of two epochs is sound, with 7 it is not."""
    job = Job(tmp_path, data, LoaderConfig(global_batch_size=16, prefetch=0, drop_last=True), 1)
    job.run(total=18, save_every=9, kill_at=None)
    config = DataConfig(source=str(data), global_batch_size=16, drop_last=True)
    report = verify_run(tmp_path, data, config)
    assert (report.ok, report.complete, report.pending, report.dropped) == (True, 2, 0, 12)
    assert len(verify_run(tmp_path, data, dataclasses.replace(config, drop_last=False)).lost) == 6
    segment = tmp_path / "ledger" / "step-00000009.parquet"
    table = pq.read_table(segment)
    pq.write_table(table.slice(0, 100), segment)
    report = verify_run(tmp_path, data, config)
    assert (len(report.lost), report.complete, report.dropped) == (50, 2, 6)


def ahead(loader: Any) -> dict[str, Any]:
    """The state one batch further than trained."""
    loader._trained, kept = loader._plan.advance(loader._trained), loader._trained
    try:
        return type(loader).state_dict(loader)
    finally:
        loader._trained = kept


def arguments(run: Path, data: Path, balance: str, rng: random.Random) -> list[str]:
    return [
        *("train", "--recipe", "debug", "--data", str(data), "--run-dir", str(run), "--auto-resume"),
        *("--data.global-batch-size", "40", "--train.steps", str(JOB_STEPS), "--train.eval-batch-size", "80"),
        *("--train.peak-flops-per-s", "1e9", "--train.survey-rows", "0", "--train.profile-every", "0"),
        *("--train.tensorboard", "False", "--train.print-every", "1000", "--train.restart-limit", "50"),
        *("--train.ledger", "True", "--train.report", "False", "--train.predictions", "False"),
        *("--model.layers", "1", "--model.stream.blocks", "hstu", "--optimizer.schedule", "constant"),
        *("--balance.method", balance),
        # What may change from start to start:
        *("--data.prefetch", str(rng.randint(0, 3)), "--train.checkpoint-every", str(rng.choice([1, 2, 3, 5]))),
        *("--train.checkpoint-async", str(rng.random() < 0.7), "--parallel.overlap", str(rng.random() < 0.5)),
        *("--train.keep-checkpoints", str(rng.randint(1, 3))),
    ]


def die(zygote: Zygote, run: Path, pids: list[int], rng: random.Random) -> bool:
    """SIGKILL for one rank at a random moment: of a start, or of a step that is drawn from all. Was it alive?"""
    target, deadline = rng.randint(1, JOB_STEPS), time.monotonic() + 60
    if rng.random() < 0.2:
        time.sleep(rng.uniform(0.0, 1.0))
    else:
        while all(flight.step < target for flight in read_flights(run / "supervision") if flight.pid in pids):
            if time.monotonic() > deadline or zygote.wait(pids[:1], seconds=0) != [None]:
                break
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.05))
    victim = rng.choice(pids)
    alive = zygote.wait([victim], seconds=0) == [None]
    if alive:
        os.kill(victim, signal.SIGKILL)
    zygote.wait(pids, seconds=0.5)
    zygote.kill(pids)
    assert None not in zygote.wait(pids, seconds=20)
    return alive


@pytest.mark.slow
@pytest.mark.distributed
def test_d1_whole_jobs_killed_and_resumed_at_other_sizes(debug_data, tmp_path, rng, count, counted):
    schedules, kills, resumes, worlds, balanced = count(fast=3, full_count=100), 0, 0, set(), 0
    zygote = Zygote()
    try:
        for number in range(schedules):
            parent = tmp_path / str(number)
            parent.mkdir()
            run, output, balance = parent / "run", parent / "out", rng.choice(["none", "none", "global"])
            balanced += balance == "global"
            for _ in range(rng.randint(2, 3)):
                worlds.add(world := rng.choice(WORLDS))
                resumes += bool(list_steps(run / "checkpoints"))
                pids = zygote.start(arguments(run, debug_data, balance, rng), world=world, output=output)
                kills += die(zygote, run, pids, rng)
            worlds.add(world := rng.choice(WORLDS))
            last = zygote.start(arguments(run, debug_data, balance, rng), world=world, output=output)
            codes = zygote.wait(last, seconds=200)
            assert codes == [0] * world, output.read_text()[-3000:]
            report = verify_ledger(run / "ledger", debug_data)
            assert (report.lost, report.twice, report.complete) == ((), (), EPOCHS), (number, report)
            assert (report.steps, report.trained) == (JOB_STEPS, EPOCHS * 320)
    finally:
        zygote.close()
    more = f"{kills} kills, {resumes} resumes, sizes {sorted(worlds)}, {balanced} balanced over the ranks"
    counted("jobs with 0 lost, 0 twice", f"{schedules} of {schedules}, {more}")
    assert resumes > schedules // 2
