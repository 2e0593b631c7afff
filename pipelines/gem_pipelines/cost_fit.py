"""Fits the cost of a row to measured training steps: `gemline profile --fit-cost`.

Batches of many sizes and shapes are made (ids at random; step time depends on how many there are, hardly on which),
each is trained a few times by the real trainer in a process group of one, and the model's terms (cost.py) are fitted
to the medians. Every fourth batch is held out, of both kinds below; the error on those is what to trust. Memory is
fitted beside time: the bytes that forward keeps for backward, counted from the graph's saved tensors, so that they are
exact on any device and do not depend on the allocator. Batches are measured whole: cut by a budget, each would be
several of its rows, whose memory is not held at once.

Rows and lengths are drawn over powers of two, half of the batches with one length for all rows and half long-tailed:
with equal lengths alone, tokens and pairs of a batch could not be told apart. The kinds come in turns of four, so that
those held out are of either kind by turns, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from gem_data.api import Observation, batch_from_table, cost_to_dict, fit_cost
from gem_data.cost import FitError
from gem_data.interface import Batch, CostModel, Schema
from gem_data.schema import impression_part, request_part
from torch.multiprocessing.reductions import StorageWeakRef

from gem_pipelines.cost import cost_terms
from gem_pipelines.errors import ConfigError
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.timing import PartClock
from gem_pipelines.trainer import Trainer

HELD_OUT = 4
"""Of so many batches one is held out."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One batch: stream -> events of each row, seconds of each repeat, bytes kept for backward."""

    lengths: dict[str, np.ndarray[Any, np.dtype[np.int64]]]
    rows: int
    seconds: tuple[float, ...]
    saved_bytes: int
    impressions: np.ndarray[Any, np.dtype[np.int64]] | None = None


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A cost model with its errors on the batches of the fit, and on those held out. requests: of rows that are."""

    model: CostModel
    on_fit: FitError
    held_out: FitError
    requests: bool = False


def check_batches(schema: Schema, config: ModelConfig, *, batches: int) -> None:
    """Raise ConfigError where `batches`, less those held out, are fewer than a fit has unknowns."""
    unknowns = len(cost_terms(schema, config)) + (3 if schema.impression else 2)
    kept = batches - batches // HELD_OUT
    if kept < unknowns:
        enough = next(n for n in range(unknowns, 2 * unknowns + HELD_OUT) if n - n // HELD_OUT >= unknowns)
        raise ConfigError(
            f"--batches is {batches}, of which {kept} are fitted (every fourth is held out), expected at least "
            f"{enough} for the {unknowns} unknowns of this model and data; more make the fit better"
        )


def draw_lengths(
    schema: Schema, *, most_rows: int, batches: int, seed: int
) -> list[dict[str, np.ndarray[Any, np.dtype[np.int64]]]]:
    """Lengths by stream of `batches` batches of 1 to `most_rows` rows. ConfigError where the data have no stream."""
    if not schema.streams:
        raise ConfigError(
            f"data {schema.name!r} have no event stream: expected one at least, since rows without events cost all the "
            "same and there is nothing to fit. Leave --fit-cost out; balance.method stays none."
        )
    rng = np.random.default_rng(seed)
    found = []
    for number in range(batches):
        equal = number // HELD_OUT % 2 == 1
        rows = max(1, round(most_rows ** rng.uniform(0.3, 1.0)))
        lengths = {}
        for stream in schema.streams:
            longest = max(1, round(stream.max_length ** rng.uniform(0.3, 1.0)))
            drawn = np.full(rows, longest) if equal else np.round(longest / 4 * np.exp(rng.standard_normal(rows)))
            lengths[stream.name] = np.clip(drawn, 0, stream.max_length).astype(np.int64)
        found.append(lengths)
    return found


def random_batch(schema: Schema, lengths: dict[str, np.ndarray[Any, np.dtype[np.int64]]], *, seed: int) -> Batch:
    """A valid batch with these lengths and random values; of requests, with 1 to 16 impressions each."""
    if schema.impression:
        return _random_requests(schema, lengths, seed=seed)
    return batch_from_table(schema, pa.table(_random_columns(schema, lengths, seed=seed)))


def _random_requests(schema: Schema, lengths: dict[str, np.ndarray[Any, np.dtype[np.int64]]], *, seed: int) -> Batch:
    rng = np.random.default_rng((seed, 1))
    counts = rng.integers(1, 17, len(next(iter(lengths.values()))))
    users = _random_columns(request_part(schema), lengths, seed=seed)
    own = _random_columns(impression_part(schema), {"": np.zeros(int(counts.sum()), np.int64)}, seed=seed)
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    each = {name: pa.ListArray.from_arrays(bounds, pa.array(values)) for name, values in own.items()}
    columns = {**each, **{name: values for name, values in users.items() if name != "sample_id"}}
    return batch_from_table(schema, pa.table(columns))


def _random_columns(
    schema: Schema, lengths: dict[str, np.ndarray[Any, np.dtype[np.int64]]], *, seed: int
) -> dict[str, Any]:
    """Columns of plain rows, as many as there are lengths."""
    rng = np.random.default_rng(seed)
    rows, tables = len(next(iter(lengths.values()))), schema.table_rows()
    data: dict[str, Any] = {
        "sample_id": np.arange(rows),
        "user_id": np.arange(rows),
        "timestamp": np.full(rows, 10),
    }
    for label in schema.labels:
        data[f"label.{label.name}"] = rng.integers(0, 2, rows).astype(np.float32)
        if label.weighted:
            data[f"weight.{label.name}"] = np.ones(rows, np.float32)
    for feature in schema.scalars:
        data[f"id.{feature.name}"] = rng.integers(0, tables[feature.table], rows)
    for feature in schema.lists:
        data[f"ids.{feature.name}"] = _lists(rng.integers(0, tables[feature.table], rows), np.ones(rows, np.int64))
    for name in schema.dense:
        data[f"dense.{name}"] = rng.standard_normal(rows, np.float32)
    for stream in schema.streams:
        count = int(lengths[stream.name].sum())
        columns = {f.name: rng.integers(0, tables[f.table], count) for f in stream.fields}
        columns |= {"action": rng.integers(0, 1 << stream.action_bits, count), "time": np.zeros(count, np.int64)}
        for name, values in columns.items():
            data[f"stream.{stream.name}.{name}"] = _lists(values, lengths[stream.name])
    return data


def _lists(values: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, values.astype(np.int64))


def measure_steps(trainer: Trainer, lengths: Sequence[dict[str, Any]], *, repeats: int, seed: int) -> list[Measured]:
    """Train every batch `repeats` times after one step that counts bytes. Changes the trainer's parameters."""
    found = []
    for number, held in enumerate(lengths):
        batch = random_batch(trainer.schema, held, seed=seed + number)
        saved = _saved_bytes(trainer, batch)
        seconds = tuple(_step_seconds(trainer, batch) for _ in range(repeats))
        counts = None if batch.requests is None else batch.requests.diff().numpy()
        found.append(Measured(lengths=held, rows=batch.rows, seconds=seconds, saved_bytes=saved, impressions=counts))
    return found


def _step_seconds(trainer: Trainer, batch: Batch) -> float:
    device = trainer.runtime.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    trainer.step([batch], clock=PartClock(device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _saved_bytes(trainer: Trainer, batch: Batch) -> int:
    """Bytes that the step's forward pass keeps for backward; what several operations keep counts once."""
    own = {StorageWeakRef(parameter.untyped_storage()) for parameter in trainer.parallel.module.parameters()}
    # By the storage itself: what backward has freed leaves its address to the next tensor, which is another one.
    held: dict[StorageWeakRef, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = StorageWeakRef(storage)
        if key not in own:
            held[key] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.step([batch], clock=PartClock(device=trainer.runtime.device))
    return sum(held.values())


def fit(trainer: Trainer, measured: Sequence[Measured]) -> dict[str, Fitted]:
    """ "time" (seconds, medians over the repeats) and "memory" (bytes kept for backward)."""
    terms = cost_terms(trainer.schema, trainer.config.model)
    found = {}
    for name, unit in (("time", "seconds"), ("memory", "bytes")):
        observations = [
            Observation(
                lengths=m.lengths,
                rows=m.rows,
                value=statistics.median(m.seconds) if name == "time" else float(m.saved_bytes),
                impressions=m.impressions,
            )
            for m in measured
        ]
        model, on_fit, held_out = fit_cost(terms, observations, unit=unit, held_out=HELD_OUT)
        requests = any(m.impressions is not None for m in measured)
        found[name] = Fitted(model=model, on_fit=on_fit, held_out=held_out, requests=requests)
    return found


def to_file(fitted: dict[str, Fitted], *, recipe: str, device: torch.device) -> dict[str, Any]:
    """The JSON that balance.cost reads."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        **{key: cost_to_dict(value.model) for key, value in fitted.items()},
        "measured": {
            "recipe": recipe,
            "device": name,
            "torch": torch.__version__,
            "errors": {
                key: {"on_fit": asdict(value.on_fit), "held_out": asdict(value.held_out)}
                for key, value in fitted.items()
            },
        },
    }
