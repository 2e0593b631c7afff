"""What a checkpoint of training holds, and how it is put back: all of it, or nothing.

Tensors, by canonical name (independent of sharding and of the number of processes):

    dense.<parameter or buffer>
    optimizer.<parameter>.exp_avg | exp_avg_sq | step
    tables.<table>.weight | momentum

state.json: step, epoch, samples, tokens; loader position; metric sums; hyper-parameters of both optimizers; random
states of every rank. The manifest also has the imbalance of the steps since the last record, which is a measurement,
and the coefficients of the load of a row, which are compared where they decide what a step is (cost_run.py).
The format itself (hashing, manifest, publishing) is checkpoint_format.py.

Restoring reads and verifies all bytes, then collects every difference between what is stored and what this run
expects, and only then changes anything. A damaged checkpoint is passed over, loudly, for the one before it.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gem_data.interface import Loader
from torch import Tensor

from gem_pipelines.checkpoint_format import Checkpoint, step_directory, write_checkpoint
from gem_pipelines.checkpoint_incremental import read_whole
from gem_pipelines.checkpoint_keep import Keeper, find_latest, set_aside_damaged
from gem_pipelines.config import FREE_ON_RESUME, RunConfig
from gem_pipelines.config_codec import flatten, from_json, to_json
from gem_pipelines.contract import compare_versions, installed_versions
from gem_pipelines.cost_run import cost_mismatches
from gem_pipelines.errors import CheckpointError
from gem_pipelines.rundir import collect_versions
from gem_pipelines.runtime import Runtime
from gem_pipelines.trainer import Position, Trainer

__all__ = ["capture", "find_latest", "find_mismatches", "restore", "save"]


STATE_KEYS = ("position", "loader", "metrics", "optimizer", "tables_optimizer", "random")
ABOUT_KEYS = ("config", "versions", "world_size")


def capture(trainer: Trainer, loader: Loader) -> Checkpoint:
    """The training state now. A collective: every rank calls it, and every rank gets the whole."""
    tensors = {f"dense.{name}": value for name, value in trainer.parallel.dense_state().items()}
    tensors |= {f"optimizer.{name}": value for name, value in trainer.optimizer.state_tensors().items()}
    for table, parts in trainer.parallel.tables.table_state().items():
        tensors |= {f"tables.{table}.{part}": value for part, value in parts.items()}
    for table, parts in trainer.parallel.tables.id_state().items():
        tensors |= {f"ids.{table}.{part}": value for part, value in parts.items()}
    config = trainer.config
    state = {
        "position": dict(vars(trainer.position)),
        "loader": loader.state_dict(),
        "metrics": trainer.metrics.state_dict(),
        "optimizer": trainer.optimizer.hyperparameters(),
        "tables_optimizer": {"kind": "row-wise AdaGrad", "lr": config.tables.lr, "eps": config.tables.eps},
        "random": [
            json.loads(text) for text in trainer.runtime.gather_text(json.dumps(random_state(trainer.runtime.device)))
        ],
    }
    about = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "world_size": trainer.runtime.world_size,
        "config": to_json(config),
        "versions": collect_versions(),
        "imbalance": trainer.imbalance.state_dict(trainer.runtime),
        "costs": trainer.stored_costs,
    }
    return Checkpoint(tensors=tensors, state=state, about=about)


def save(checkpoints: Path, trainer: Trainer, loader: Loader, *, keep: int) -> Path:
    """Write the checkpoint of the current step (rank 0 writes, all ranks wait) and drop the oldest beyond `keep`.

    A job saves through `checkpoint_saver.Saver`, which also writes beside training.
    """
    checkpoint = capture(trainer, loader)
    directory = step_directory(checkpoints, trainer.position.step)

    def write() -> None:
        try:
            set_aside_damaged(directory)
            write_checkpoint(directory, checkpoint)
            Keeper(checkpoints, keep=keep).sweep()
        except (OSError, CheckpointError) as error:
            raise CheckpointError(f"the checkpoint {directory} was not written: {error}") from None

    trainer.runtime.on_main(write)  # no rank goes on before it is durable
    return directory


def restore(directory: Path, trainer: Trainer, loader: Loader) -> list[str]:
    """Put the state of `directory` into a fresh trainer and loader. Raises CheckpointError or DataError; nothing is
    changed then. Returns what differs in interface versions without forbidding it, to be said.
    """
    checkpoint = read_whole(directory)
    problems = find_mismatches(checkpoint, trainer)
    if problems:
        raise CheckpointError(f"{directory} does not fit this run; nothing was loaded:\n  " + "\n  ".join(problems))
    # The loader checks files, seed and batch settings itself, and changes only itself: it goes first.
    loader.load_state_dict(checkpoint.state["loader"])
    _apply(checkpoint, trainer)
    return interface_differences(checkpoint)[1]


def interface_differences(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """See `contract.compare_versions`."""
    versions = checkpoint.about.get("versions")
    stored = versions.get("interfaces") if isinstance(versions, dict) else None
    return compare_versions(stored if isinstance(stored, dict) else {}, installed_versions())


def find_mismatches(checkpoint: Checkpoint, trainer: Trainer) -> list[str]:
    """Every difference that forbids loading, one line each."""
    problems = [f"state {key}: expected, but not stored" for key in STATE_KEYS if key not in checkpoint.state]
    problems += [f"about {key}: expected, but not stored" for key in ABOUT_KEYS if key not in checkpoint.about]
    if problems:
        return problems
    problems = _config_mismatches(checkpoint.about["config"], trainer.config)
    if "costs" in checkpoint.about:  # earlier versions stored none
        models = {"load": trainer.cost, "budget": trainer.budget_cost}
        problems += cost_mismatches(checkpoint.about["costs"], trainer.config.balance, **models)
    problems += _schedule_mismatches(checkpoint.state["optimizer"], trainer)
    problems += interface_differences(checkpoint)[0]
    expected = expected_tensors(trainer)
    for key, tensor in checkpoint.tensors.items():
        if key not in expected:
            problems.append(f"tensor {key}: stored, but this run has none of that name")
        elif not is_as_expected(tensor, expected[key]):
            shape, dtype = expected[key]
            problems.append(f"tensor {key}: stored {tuple(tensor.shape)} {tensor.dtype}, expected {shape} {dtype}")
    updated = {key.rsplit(".", 1)[0] for key in checkpoint.tensors if key.startswith("optimizer.")}
    for key in expected:
        needed = not key.startswith("optimizer.") or key.rsplit(".", 1)[0] in updated
        if needed and key not in checkpoint.tensors:
            problems.append(f"tensor {key}: expected, but not stored")
    tasks = set(checkpoint.state["metrics"]["lifetime"])
    if tasks != set(trainer.tasks):
        problems.append(f"tasks: stored {sorted(tasks)}, expected {sorted(trainer.tasks)}")
    return problems


def _schedule_mismatches(stored: dict[str, Any], trainer: Trainer) -> list[str]:
    """All but the constant schedule know how long they are: another length would change every later step."""
    now = trainer.optimizer.hyperparameters()
    missing = [f"optimizer {key}: expected, but not stored" for key in now if key not in stored]
    stored_schedule = stored.get("schedule", {})
    missing += [f"optimizer.schedule {key}: not stored" for key in now["schedule"] if key not in stored_schedule]
    if missing:
        return missing
    schedule, steps = stored["schedule"], trainer.optimizer.total_steps
    if schedule["kind"] == "constant" or schedule["total_steps"] == steps:
        return []
    return [
        f"optimizer.schedule {schedule['kind']!r} was laid out over {schedule['total_steps']} steps, this run has "
        f"{steps}: leave train.steps and train.epochs as they were (only optimizer.schedule 'constant' can be extended)"
    ]


def _config_mismatches(stored_json: Any, config: RunConfig) -> list[str]:
    stored, now = flatten(from_json(RunConfig, stored_json)), flatten(config)
    # Averaged copies train another model than one copy does, so their number is part of the run.
    free = FREE_ON_RESUME - {"parallel.table_replica"} if config.parallel.table_sync == "average" else FREE_ON_RESUME
    return [
        f"config {key}: stored {stored.get(key)!r}, this run has {now.get(key)!r}"
        for key in sorted(stored.keys() | now.keys())
        if key not in free and stored.get(key) != now.get(key)
    ]


def is_as_expected(tensor: Tensor, expected: tuple[tuple[int, ...], torch.dtype]) -> bool:
    """Shape and dtype; -1 stands for any length."""
    shape, dtype = expected
    lengths = zip(tensor.shape, shape, strict=False)
    return tensor.dtype == dtype and tensor.ndim == len(shape) and all(b in (-1, a) for a, b in lengths)


def expected_tensors(trainer: Trainer) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Canonical key of every tensor that a checkpoint of this run can hold -> shape and dtype."""
    expected = {f"dense.{name}": described for name, described in trainer.parallel.dense_expected.items()}
    for name, shape in trainer.optimizer.expected_shapes().items():
        expected[f"optimizer.{name}"] = (shape, torch.float32)
    for table, shapes in trainer.parallel.tables.state_shapes().items():
        expected |= {f"tables.{table}.{part}": (shape, torch.float32) for part, shape in shapes.items()}
    for table, shapes in trainer.parallel.tables.id_shapes().items():
        expected |= {f"ids.{table}.{part}": (shape, torch.int64) for part, shape in shapes.items()}
    return expected


def _apply(checkpoint: Checkpoint, trainer: Trainer) -> None:
    """Write a checkpoint that was found to fit into the trainer."""
    groups: dict[str, dict[str, Tensor]] = {"dense": {}, "optimizer": {}, "tables": {}, "ids": {}}
    for key, tensor in checkpoint.tensors.items():
        group, name = key.split(".", 1)
        groups[group][name] = tensor
    trainer.parallel.tables.load_table_state(by_table(groups["tables"]))
    trainer.parallel.tables.load_id_state(by_table(groups["ids"]))
    trainer.parallel.load_dense_state(groups["dense"])
    trainer.optimizer.load_state_tensors(groups["optimizer"])
    trainer.metrics.load_state_dict(checkpoint.state["metrics"])
    trainer.position = Position(**checkpoint.state["position"])
    if "imbalance" in checkpoint.about:  # a measurement, of no part in training: earlier versions stored none
        trainer.imbalance.load_state_dict(checkpoint.about["imbalance"])
    states = checkpoint.state["random"]
    if len(states) == trainer.runtime.world_size:  # else: the streams stay as seeded; only dropout draws from them
        set_random_state(states[trainer.runtime.rank], trainer.runtime)


def by_table(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """{"item.weight": w} as {"item": {"weight": w}}."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        table, part = name.rsplit(".", 1)
        found.setdefault(table, {})[part] = tensor
    return found


def random_state(device: torch.device) -> dict[str, Any]:
    """States of the generators of this process, JSON-able."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "cuda": bytes(torch.cuda.get_rng_state(device).tolist()).hex() if device.type == "cuda" else None,
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "python": [version, list(internal), gauss],
    }


def set_random_state(state: dict[str, Any], runtime: Runtime) -> None:
    """Inverse of `random_state`."""

    def tensor(text: str) -> Tensor:
        return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)

    torch.set_rng_state(tensor(state["torch"]))
    if runtime.device.type == "cuda" and state["cuda"]:
        torch.cuda.set_rng_state(tensor(state["cuda"]), runtime.device)
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
