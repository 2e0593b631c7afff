"""A training job from config to end: processes, data, model, and the loop.

run(request)      everything; what `gemline train` calls
build(...)        the parts of a job, for tests and for other programs
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from gem_data.api import build_loader, inspect_dataset, read_schema
from gem_data.interface import CostModel, Loader, LoaderConfig, Schema
from gem_data.remote import DataPath
from gem_data.streaming import StreamingLoader

from gem_pipelines.balance import BalancedLoader
from gem_pipelines.checkpoint_start import start_from
from gem_pipelines.config import RunConfig
from gem_pipelines.contract import check_versions, installed_versions
from gem_pipelines.cost import Costs, budget_model
from gem_pipelines.cost_run import common_costs, to_json
from gem_pipelines.data_source import data_directory, trained_schema
from gem_pipelines.errors import ConfigError, RunError, did_you_mean
from gem_pipelines.launcher_watch import LauncherWatch
from gem_pipelines.loop import Job, Outcome
from gem_pipelines.model.build import build_model, table_specs
from gem_pipelines.parallel_graphs import check_graphs
from gem_pipelines.parallelize import parallelize, seed_everything
from gem_pipelines.quarantine import Quarantine
from gem_pipelines.refusals import refusals_noted
from gem_pipelines.rundir import RunDirectory
from gem_pipelines.runlock import RunLock
from gem_pipelines.runtime import Runtime, start_runtime
from gem_pipelines.supervision import supervise
from gem_pipelines.trainer import Trainer
from gem_pipelines.watchdog import record_collectives
from gem_pipelines.windows import total_steps


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run and where. run_dir None: runs/<name>-<time>. command: the line that repeats the run.

    resume     go on with the run in run_dir
    automatic  nobody decided on this start (a restart): resume where run_dir holds a run, else begin
    launcher   process that started this one, without which it ends (see launcher_watch.py)
    cost_given balance.cost was given for this start, and not taken from the run that goes on
    """

    config: RunConfig
    run_dir: Path | None
    resume: bool
    command: str
    automatic: bool = False
    launcher: int | None = None
    cost_given: bool = False


def run(request: Request) -> Outcome | None:
    """Run the job in this process (one of many under torchrun). Returns the outcome on rank 0, None elsewhere."""
    with LauncherWatch(request.launcher):
        with refusals_noted():
            check_versions(installed_versions())
            train = request.config.train
            record_collectives()
            runtime = start_runtime(
                device=train.device,
                threads=train.threads,
                deterministic=train.deterministic,
                timeout=timedelta(seconds=train.timeout_s),
            )
        default = Path("runs") / f"{request.config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        lock: RunLock | None = None
        try:
            directory = RunDirectory(Path(runtime.from_main(str(request.run_dir or default))))
            lock = _lock(directory, runtime)
            if request.automatic:
                exists = runtime.from_main(str(int(directory.config_file.exists()))) == "1"
                request = dataclasses.replace(request, resume=request.resume or exists)
            return _run(request, directory, lock, runtime)
        finally:
            if lock is not None:
                directory.give_up_lock(lock)
            runtime.close()


def _lock(directory: RunDirectory, runtime: Runtime) -> RunLock | None:
    """The run's lock on rank 0; every rank raises where another job holds it."""
    held: list[RunLock] = []

    def acquire() -> None:
        held.append(directory.acquire_lock())

    runtime.on_main(acquire)
    return held[0] if held else None


def _run(request: Request, directory: RunDirectory, lock: RunLock | None, runtime: Runtime) -> Outcome | None:
    with refusals_noted():
        config = request.config
        if not request.resume:
            runtime.on_main(directory.check_unused)
        say = print if runtime.is_main else lambda *_, **__: None
        say(f"run: {directory.path}")
        check_balance(config)
        data = data_directory(config.data, runtime=runtime, say=say)
        schema = trained_schema(data, config.data)
        check_splits(data, schema)
        check_policies(config, schema)
        costs = common_costs(
            config.balance,
            within(schema, config.data.max_length),
            config.model,
            runtime,
            saved=directory.cost_file if request.resume else None,
            anew=request.cost_given,
        )
        row_limit = 0 if config.data.max_quarantined_rows else config.train.survey_rows
        survey = survey_data(data, row_limit=row_limit, runtime=runtime, open_ids=config.tables.open_ids())
        job = build(config, data=data, directory=directory, runtime=runtime, lock=lock, costs=costs)
        first = job.restore_latest() if request.resume else 0
        if config.train.init_from is not None and first == 0:
            start_from(Path(config.train.init_from), job.trainer, partial=config.train.init_partial, say=say)

        def prepare_directory() -> None:
            if request.resume:
                job.ledger.forget_after(first)
                directory.go_on(config, command=request.command, step=first, costs=to_json(costs))
            else:
                directory.create(config, command=request.command, costs=to_json(costs))

        runtime.on_main(prepare_directory)
        job.supervision = supervise(
            directory,
            config=config.train,
            runtime=runtime,
            first_step=first,
            automatic=request.automatic,
            files=[file.path for file in job.schema.files],
        )
    return job.train(resumed_from=first if request.resume else None, survey=survey)


def check_splits(data: DataPath, schema: Schema) -> None:
    """Raise ConfigError where there is nothing to train or to evaluate on."""
    splits = {file.split for file in schema.files}
    if missing := {"train", "eval"} - splits:
        raise ConfigError(
            f"{data}: a run needs the splits train and eval, and its files are of {' and '.join(sorted(splits))} only: "
            f"no {' and no '.join(sorted(missing))}. Write the latest rows as eval, strictly later than all of train: "
            'write_dataset(path, schema, {"train": ..., "eval": ...})'
        )


def check_balance(config: RunConfig) -> None:
    """Raise ConfigError for a balance that would train another model."""
    copies = config.parallel.table_replica
    if config.balance.method == "global" and config.parallel.table_sync == "average" and copies > 1:
        raise ConfigError(
            f"balance.method is 'global' and parallel.table_sync 'average' over {copies} copies of the tables: the "
            "balancer moves rows between copies, each of which applies the gradients of its own rows before they are "
            "averaged, so another model would be trained than without. Use parallel.table_sync 'gradients', or "
            "balance.method 'base' or 'none'"
        )


def check_policies(config: RunConfig, schema: Schema) -> None:
    """Raise ConfigError for a policy of a feature that the data do not have."""
    known = [key for key, _ in schema.id_features()]
    for feature in config.tables.policy_of():
        if feature not in known:
            raise ConfigError(f"tables.policies names feature {feature!r}; {did_you_mean(feature, known)}")


def survey_data(
    data: DataPath, *, row_limit: int, runtime: Runtime, open_ids: tuple[str, ...] = ()
) -> dict[str, Any] | None:
    """What is in the data, with every value checked, on rank 0; None elsewhere, and for more than `row_limit` rows.

    A bad value stops all ranks before the run begins. Larger data are checked as they are read.
    """
    if sum(file.rows for file in read_schema(data).files) > row_limit:
        return None
    found: list[dict[str, Any]] = []

    def survey() -> None:
        found.append(inspect_dataset(data, check=True, open_ids=open_ids))
        check_split_times(data, found[0])

    runtime.on_main(survey)
    return found[0] if found else None


def check_split_times(data: DataPath, survey: dict[str, Any]) -> None:
    """Evaluation must lie strictly later than training, or its figures mean nothing."""
    train, evaluation = (survey["splits"][split]["time"] for split in ("train", "eval"))
    if evaluation["first"] <= train["last"]:
        raise RunError(
            f"{data}: evaluation must be strictly later than training; its first row is of {evaluation['first']}, the "
            f"last training row of {train['last']} (seconds). Split the data by time; gemline data verify says more."
        )


def within(schema: Schema, max_length: int | None) -> Schema:
    """`schema` with the streams' longest lengths as this run cuts them: the model divides sums by those."""
    if max_length is None:
        return schema
    streams = tuple(
        dataclasses.replace(stream, max_length=min(stream.max_length, max_length)) for stream in schema.streams
    )
    return dataclasses.replace(schema, streams=streams)


def loader_config(config: RunConfig, cost: CostModel | None = None) -> LoaderConfig:
    """Settings of the training loader. `cost`: the load of a row, where base batches are moved by it."""
    data, base = config.data, config.balance.method == "base"
    return LoaderConfig(
        global_batch_size=data.global_batch_size,
        seed=config.train.seed,
        shuffle=data.shuffle,
        window_groups=data.window_groups,
        logical_shards=data.logical_shards,
        max_length=data.max_length,
        drop_last=data.drop_last,
        prefetch=data.prefetch,
        readers=data.readers,
        open_ids=config.tables.open_ids(),
        features=data.features,
        labels=data.labels,
        stochastic_length=data.stochastic_length,
        base_batch=config.balance.base_batch if base else None,
        base_pool=config.balance.base_pool if base else LoaderConfig.base_pool,
        cost=cost if base else None,
    )


def training_loader(
    config: RunConfig, *, data: DataPath, cost: CostModel, runtime: Runtime, quarantine: Quarantine
) -> Loader:
    """The loader of a run, with its balance. A collective: every rank calls it at the same time."""
    settings = {
        "split": "train",
        "config": loader_config(config, cost),
        "rank": runtime.rank,
        "world_size": runtime.world_size,
        "on_damage": quarantine.hear if config.data.max_quarantined_rows else None,
    }
    seconds = config.data.stream_seconds
    loader: Loader
    if seconds is None:
        loader = build_loader(data, **settings)
    else:
        loader = StreamingLoader(data, seconds=seconds, **settings)
    balance = config.balance
    if balance.method != "global" or runtime.world_size == 1:
        return loader
    return BalancedLoader(
        loader,
        cost=cost,
        runtime=runtime,
        global_batch_size=config.data.global_batch_size,
        method=balance.partition,
        counts=balance.counts,
        timeout=timedelta(seconds=config.train.timeout_s),
    )


def build(
    config: RunConfig,
    *,
    data: DataPath,
    directory: RunDirectory,
    runtime: Runtime,
    lock: RunLock | None = None,
    costs: Costs | None = None,
) -> Job:
    """Loader, model, tables and trainer of one job, at step 0. costs: the run's; None: what balance.cost names."""
    check_balance(config)
    seed_everything(config.train.seed, rank=runtime.rank)
    schema = within(trained_schema(data, config.data), config.data.max_length)
    check_graphs(config, runtime.device, schema, world_size=runtime.world_size)
    costs = costs or common_costs(config.balance, schema, config.model, runtime)
    cost, limited = costs.time, budget_model(config.balance, costs)
    quarantine = Quarantine()
    loader = training_loader(config, data=data, cost=cost, runtime=runtime, quarantine=quarantine)
    steps = total_steps(loader, config)
    parallel = parallelize(
        build_model(schema, config.model, seed=config.train.seed),
        table_specs(schema, config.model),
        config=config.tables,
        parallel=config.parallel,
        seed=config.train.seed,
        runtime=runtime,
        rows_per_rank=-(-config.data.global_batch_size // runtime.world_size),
        compiled=config.model.compile,
        graphs=config.model.graphs,
    )
    trainer = Trainer(
        parallel, schema=schema, config=config, runtime=runtime, total_steps=steps, cost=cost, budget_cost=limited
    )
    return Job(
        trainer=trainer,
        loader=loader,
        data=data,
        directory=directory,
        total_steps=steps,
        lock=lock,
        quarantine=quarantine,
    )
