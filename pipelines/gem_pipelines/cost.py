"""The load of a row for this model: which terms its cost has, and where their coefficients come from.

Terms follow from the model's plan: tokens of every stream (its projections, feed-forward layers, pooling and weights
made from features all grow with them), and attended pairs for every mask that its attention has. Coefficients are
counted (floating-point operations, "flops"), fitted to measured steps (cost_fit.py, `gemline profile --fit-cost`), or
written by hand into the same JSON:

    {"time": {"unit": "seconds", "per_step": 0.004, "per_sample": 1e-5,
              "terms": [{"stream": "views", "coefficient": 2e-7, "extra": 2},
                        {"stream": "views", "coefficient": 3e-10, "pairs": true, "causal": true, "window": 0}]},
     "memory": {"unit": "bytes", ...}}               "memory" and anything else beside "time" may be absent

Counted operations are exact for the polynomial they are (a test compares them with the counter on other lengths), but
a device does not spend equal time on each: prefer a fitted file where balance matters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gem_data.api import Observation, cost_from_dict, events_cost, fit_cost, row_costs
from gem_data.cost import check_cost
from gem_data.interface import Batch, CostModel, CostTerm, Schema
from torch import Tensor

from gem_pipelines.batches import event_lengths, impressions_of
from gem_pipelines.config import BalanceConfig
from gem_pipelines.errors import ConfigError
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.flops import training_flops
from gem_pipelines.model.plan import StreamPlan, plan_model


def cost_terms(schema: Schema, config: ModelConfig) -> tuple[CostTerm, ...]:
    """The terms of this model's cost, coefficients 1.

    Example: an HSTU stream with one context and one candidate token gives tokens (extra 2) and causal pairs (extra 2).
    Where rows are requests, each further impression adds a candidate to a stream that they share, and the whole stream
    to one that they do not.
    """
    found: list[CostTerm] = []
    for stream in plan_model(schema, config).streams:
        terms = _stream_terms(stream)
        if stream.shared:
            terms = [replace(term, targets=stream.targets) for term in terms]
            if stream.read_tokens:  # each candidate reads all events
                terms.append(CostTerm(stream=stream.name, repeated=True))
        elif schema.impression:
            terms = [replace(term, repeated=True) for term in terms]
        found += terms
    return tuple(found)


def _stream_terms(stream: StreamPlan) -> list[CostTerm]:
    terms = [CostTerm(stream=stream.name, extra=stream.extra)]
    window = stream.config.window
    for kind in stream.config.blocks:
        if kind == "hstu":
            terms.append(CostTerm(stream=stream.name, pairs=True, causal=True, window=window, extra=stream.extra))
        if kind in ("window", "interformer"):
            terms.append(CostTerm(stream=stream.name, pairs=True, causal=False, window=window, extra=stream.extra))
    return list(dict.fromkeys(terms))


def flops_cost(schema: Schema, config: ModelConfig) -> CostModel:
    """Training FLOPs of a row as a cost model: the terms fitted to counted operations of many lengths.

    Coefficients are whole numbers, the same on every host (cost.py of gem_data). Window attention is counted with its
    context and candidate, whose masks are no plain windows: there it is close, elsewhere exact. per_step is what a
    batch costs whatever its rows, as the products of learned summary tokens with their weights.
    """
    terms = cost_terms(schema, config)
    rng = np.random.default_rng(0)
    observations = []
    for number in range(8 * (len(terms) + 2)):
        longest = 1 << int(rng.integers(0, 12))
        lengths = {
            stream.name: rng.integers(0, min(longest, stream.max_length) + 1, 1 + number % 3)
            for stream in schema.streams
        }
        rows = 1 + number % 3
        counts = rng.integers(1, 17, rows) if schema.impression else None
        plain = {name: value.tolist() for name, value in lengths.items()}
        counted = training_flops(
            config, schema, plain, rows=rows, impressions=None if counts is None else counts.tolist()
        )
        observations.append(
            Observation(lengths=lengths, rows=rows, value=float(sum(counted.values())), impressions=counts)
        )
    model, _, _ = fit_cost(terms, observations, unit="flops", held_out=0)
    return replace(
        model,
        per_step=float(round(model.per_step)),
        per_sample=float(round(model.per_sample)),
        per_impression=float(round(model.per_impression)),
        terms=tuple(replace(term, coefficient=float(round(term.coefficient))) for term in model.terms),
    )


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Cost models of a run, by the value of balance.cost. time: load of a row; memory: bytes kept for backward, where a
    file has them.
    """

    name: str
    time: CostModel
    memory: CostModel | None = None


def load_costs(config: BalanceConfig, schema: Schema, model: ModelConfig) -> Costs:
    """The cost models that `balance.cost` names, as this process reads them (a run: cost_run.py). Raises ConfigError
    for a file that cannot be used.
    """
    if config.cost == "flops":
        return Costs(name=config.cost, time=flops_cost(schema, model))
    if config.cost == "events":
        return Costs(name=config.cost, time=events_cost(schema))
    found = read_cost(Path(config.cost), schema)
    return Costs(name=config.cost, time=found["time"], memory=found.get("memory"))


def load_model(config: BalanceConfig, schema: Schema, model: ModelConfig) -> CostModel:
    """The load of a row that `balance.cost` names; see `load_costs`."""
    return load_costs(config, schema, model).time


def budget_model(config: BalanceConfig, costs: Costs) -> CostModel:
    """What `balance.budget` limits: the load, or the memory model of its file. ConfigError where there is none, or
    where the budget is of bytes and no more than a micro-batch of no rows needs.
    """
    found = costs.time
    if config.budget is not None and config.budget_of == "memory":
        if config.cost in ("flops", "events"):
            raise ConfigError(
                f"balance.budget_of is 'memory', balance.cost {config.cost!r}: expected a file with a model of memory. "
                "Make one with 'gemline profile --fit-cost --out FILE'."
            )
        if costs.memory is None or costs.memory.unit != "bytes":
            raise ConfigError(
                f"{config.cost}: balance.budget_of is 'memory', expected the key 'memory' with unit 'bytes'"
            )
        found = costs.memory
    if config.budget is not None and found.unit == "bytes" and config.budget <= found.per_step:
        raise ConfigError(
            f"balance.budget is {config.budget}, expected above the {found.per_step:.0f} bytes that "
            f"{config.cost} says a micro-batch needs whatever its rows"
        )
    return found


def read_cost(path: Path, schema: Schema) -> dict[str, CostModel]:
    """ "time" and, where the file has it, "memory"."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"balance.cost is {str(path)!r}, expected 'flops', 'events' or a file of cost coefficients: {error}. "
            "Make one with 'gemline profile --fit-cost --out FILE'."
        ) from None
    return _models(content, schema, source=str(path))


def costs_from_json(content: Any, schema: Schema, *, name: str, source: str) -> Costs:
    """Costs of a file's content. Raises ConfigError that names `source`."""
    found = _models(content, schema, source=source)
    return Costs(name=name, time=found["time"], memory=found.get("memory"))


def _models(content: Any, schema: Schema, *, source: str) -> dict[str, CostModel]:
    if not isinstance(content, dict) or "time" not in content:
        raise ConfigError(f"{source}: expected an object with the key 'time'")
    found = {}
    for name in ("time", "memory"):
        if name in content:
            try:
                found[name] = cost_from_dict(content[name], source=source)
                check_cost(found[name], schema)
            except ValueError as error:
                raise ConfigError(f"{source}: {name}: {error}") from None
    return found


def batch_loads(model: CostModel, batch: Batch) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(R,) load of every row of a batch on the CPU: of a request, with all its impressions."""
    lengths: Mapping[str, Tensor] = event_lengths(batch)
    counts = impressions_of(batch)
    return row_costs(
        model,
        {name: value.numpy() for name, value in lengths.items()},
        batch.rows,
        None if counts is None else counts.numpy(),
    )
