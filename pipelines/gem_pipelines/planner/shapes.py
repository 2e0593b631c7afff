"""The workload of a model on a schema: shapes of parameters and tables, FLOPs and saved activations of a sample.

Nothing is read: lengths are given. Saved activations come from one forward of a few random rows of these lengths,
counted by storage as autograd saves them, so everything but memory holes and dtype changes is what the job will do.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from gem_data.interface import Schema
from torch import nn

from gem_pipelines.config import ModelConfig
from gem_pipelines.model.build import build_model, table_specs
from gem_pipelines.model.flops import model_flops, training_flops
from gem_pipelines.model.inputs import ModelInput, Requests, StreamInput
from gem_pipelines.model.plan import plan_model
from gem_pipelines.planner.workload import TableLoad, Workload, dense_units

PROBE_ROWS = 8


def on_cpu(config: ModelConfig) -> ModelConfig:
    """The same model by implementations that run without a GPU."""
    hstu = config.hstu if config.hstu == "layers" else "eager"
    return dataclasses.replace(config, attention="eager", hstu=hstu)


def shaped_workload(
    schema: Schema,
    config: ModelConfig,
    *,
    name: str,
    batch: int,
    lengths: dict[str, list[int]],
    stream_means: dict[str, float],
    list_means: dict[str, float],
    source: str,
    impressions: int | None = None,
) -> Workload:
    """Workload of `batch` samples a rank.

    lengths  stream -> events of a few rows that stand for all; stream_means, list_means: mean ids a row, of a list that
             each impression has: an impression
    impressions  of each row, where rows are requests: a "sample" is then a request with all of them

    Sizes are taken on a CPU, whatever the kernels that will train: those of the batched PyTorch implementation.
    """
    config = on_cpu(config)
    number = 2 if config.compute == "bfloat16" else 4
    rows = len(next(iter(lengths.values()), [0] * PROBE_ROWS))
    forward = _per_sample(config, schema, lengths, rows, impressions, backward=False)
    both = _per_sample(config, schema, lengths, rows, impressions, backward=True)
    model = build_model(schema, config, seed=0)
    return Workload(
        name=name,
        units=dense_units(model, in_out=_interaction_sizes(schema, config, impressions or 1)),
        tables=_table_loads(schema, config, stream_means, list_means, impressions or 1),
        batch=batch,
        forward_flops=forward["mean"],
        backward_flops=both["mean"] - forward["mean"],
        flops_spread=both["spread"],
        activation_bytes=saved_bytes(model, schema, config, lengths, impressions) / rows,
        gather_bytes=number,
        root_gather_bytes=4,
        activation_number_bytes=number,
        source=source,
    )


def _per_sample(
    config: ModelConfig,
    schema: Schema,
    lengths: dict[str, list[int]],
    rows: int,
    impressions: int | None,
    *,
    backward: bool,
) -> dict[str, float]:
    """Mean and relative spread of a sample's FLOPs."""
    count = training_flops if backward else model_flops
    shown = None if impressions is None else [impressions]
    one = [{name: [found[row]] for name, found in lengths.items()} for row in range(rows)]
    each = [sum(count(config, schema, own, rows=1, impressions=shown).values()) for own in one]
    mean = sum(each) / rows
    spread = math.sqrt(sum((value - mean) ** 2 for value in each) / rows)
    return {"mean": mean, "spread": spread / mean if mean else 0.0}


def _interaction_sizes(schema: Schema, config: ModelConfig, impressions: int = 1) -> list[tuple[int, int]]:
    """Numbers a sample that go into and come out of each layer's interaction."""
    plan = plan_model(schema, config)
    out = config.interaction.tokens * config.dim * impressions
    tokens = [plan.tokens_in[i] + plan.summary_tokens for i in range(config.layers)]
    return [(count * config.dim * impressions, out) for count in tokens]


def _table_loads(
    schema: Schema, config: ModelConfig, means: dict[str, float], lists: dict[str, float], impressions: int
) -> tuple[TableLoad, ...]:
    loads, once = [], schema.request_keys()
    for spec in table_specs(schema, config):
        times = {feature: 1 if feature in once else impressions for feature in spec.features}
        ids = sum(times[feature] * _ids(feature, lists, means) for feature in spec.features)
        # A pooled feature gives one vector for each row of the tensor of ids, which are impressions.
        vectors = float(len(spec.features) * impressions) if spec.pooling != "none" else ids
        loads.append(
            TableLoad(
                name=spec.name, rows=spec.rows, dim=spec.dim, ids=ids, vectors=vectors, features=len(spec.features)
            )
        )
    return tuple(loads)


def _ids(feature: str, lists: dict[str, float], streams: dict[str, float]) -> float:
    if feature in lists:
        return lists[feature]
    return streams.get(feature.partition(".")[0], 1.0) if "." in feature else 1.0


def saved_bytes(
    model: nn.Module,
    schema: Schema,
    config: ModelConfig,
    lengths: dict[str, list[int]],
    impressions: int | None = None,
) -> int:
    """Bytes that autograd keeps after a forward of random rows with these lengths; parameters are not counted."""
    inputs = _random_inputs(schema, config, lengths, impressions)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs)
    return sum(kept.values())


def _random_inputs(
    schema: Schema, config: ModelConfig, lengths: dict[str, list[int]], impressions: int | None
) -> ModelInput:
    generator = torch.Generator().manual_seed(0)
    rows = len(next(iter(lengths.values()))) if lengths else PROBE_ROWS
    once, count = frozenset(schema.request_keys()), rows * (impressions or 1)

    def vectors(count: int) -> torch.Tensor:
        return torch.randn(count, config.table_dim, generator=generator).requires_grad_()

    names = [feature.name for feature in (*schema.scalars, *schema.lists)]
    embeddings = {name: vectors(rows if name in once else count) for name in names}
    streams = {}
    for stream in schema.streams:
        counts = torch.tensor(lengths[stream.name])
        total = int(counts.sum())
        embeddings |= {f"{stream.name}.{field.name}": vectors(total) for field in stream.fields}
        streams[stream.name] = StreamInput(
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
            actions=torch.zeros(total, dtype=torch.int64),
            times=torch.arange(total),
            max_len=int(counts.max()),
        )
    return ModelInput(
        embeddings=embeddings,
        dense=torch.zeros(count, len(schema.dense)),
        timestamps=torch.full((count,), 10**9),
        streams=streams,
        requests=None
        if impressions is None
        else Requests(
            offsets=impressions * torch.arange(rows + 1),
            owner=torch.arange(rows).repeat_interleave(impressions),
            most=impressions,
            features=once,
        ),
    )
