"""Impressions of a request share its history: logits and gradients as of plain samples, FLOPs fall as counted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from gem_data.api import expand_batch, expanded_schema
from gem_data.interface import Batch, IdFeature, Schema, TableInfo
from gem_pipelines.cost import cost_terms, flops_cost
from gem_pipelines.cost_fit import random_batch
from gem_pipelines.features import to_model_input
from gem_pipelines.imbalance import batch_loads
from gem_pipelines.model import build_model, model_flops, table_specs, training_flops
from gem_pipelines.model.plan import plan_model
from gem_pipelines.model.repeat import repeat
from gem_pipelines.model.testing import KINDS, make_config, make_schema, stream_config
from torch.utils.flop_counter import FlopCounterMode

LENGTHS = {"clicks": [4, 0, 12, 1, 7], "views": [0, 3, 2, 0, 8]}


def request_schema(*impression: str) -> Schema:
    """make_schema with requests as rows, and a bag at either level, of a pooled table and of one that events use."""
    plain = make_schema()
    return dataclasses.replace(
        plain,
        tables=(*plain.tables, TableInfo(name="word", rows=9)),
        lists=(*plain.lists, IdFeature(name="query", table="word"), IdFeature(name="title", table="word")),
        impression=impression or ("id.item", "ids.title", "dense.price"),
    )


SHARED = {
    "hstu": make_config(),
    "hsp": make_config(stream=stream_config(summary="hsp")),
    "window": make_config(stream=stream_config(window=3)),
    "target_read": make_config(stream=stream_config(target_read=True), dense_hidden=(5, 4), hstu="eager"),
    "one_block": make_config(stream=stream_config(blocks=("hstu",), recent_tokens=0, rotary=False)),
    "no_candidate": make_config(
        stream=stream_config(candidate=False, window=2, blocks=("window", "hstu")), norm="rms", norm_affine=True
    ),
}
SINGLE = {
    f"single_{name}": dataclasses.replace(
        config,
        stream=dataclasses.replace(config.stream, per_request=False),
        streams={name: dataclasses.replace(own, per_request=False) for name, own in config.streams.items()},
    )
    for name, config in KINDS.items()
}
MIXED = {"mixed": make_config(streams={"views": stream_config(blocks=("pffn",), cls_tokens=1, per_request=False)})}
CONFIGS = SHARED | SINGLE | MIXED


def request_batch(schema: Schema, seed: int = 3) -> Batch:
    return random_batch(schema, {name: np.array(found) for name, found in LENGTHS.items()}, seed=seed)


def look_up(schema: Schema, config, batch: Batch, tables: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the tables give, in plain indexing."""
    found = {}
    for spec in table_specs(schema, config):
        for feature in spec.features:
            vectors = tables[spec.name][batch.ids[feature].values()]
            if spec.pooling == "mean":
                parts = vectors.split(batch.ids[feature].lengths().tolist())
                vectors = torch.stack([part.sum(0) / max(len(part), 1) for part in parts])
            found[feature] = vectors
    return found


def train(schema: Schema, config, batch: Batch, *, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and the gradients of a fixed sum of them, of the dense model and of the tables."""
    model = build_model(schema, config, seed=1).to(dtype)
    draw = torch.Generator().manual_seed(5)
    tables = {
        spec.name: torch.randn(spec.rows, spec.dim, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for spec in table_specs(schema, config)
    }
    inputs = to_model_input(batch, look_up(schema, config, batch, tables), schema=schema)
    inputs = dataclasses.replace(inputs, dense=inputs.dense.to(dtype))
    logits = model(inputs)
    weight = torch.randn(logits.shape, generator=draw, dtype=torch.float64).to(dtype)
    (logits * weight).sum().backward()
    grads = {name: parameter.grad for name, parameter in [*model.named_parameters(), *tables.items()]}
    return logits.detach(), {name: grad for name, grad in grads.items() if grad is not None}


ROUNDED = [pytest.param(name, marks=() if name in SHARED else pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize("name", ROUNDED)
def test_float32_differs_by_its_rounding(name: str) -> None:
    compare_with_plain_samples(name, torch.float32, limit=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_plain_samples(name: str) -> None:
    compare_with_plain_samples(name, torch.float64, limit=1e-6)


def compare_with_plain_samples(name: str, dtype: torch.dtype, *, limit: float) -> None:
    config, schema = CONFIGS[name], request_schema()
    batch = request_batch(schema)
    assert batch.requests is not None
    assert batch.requests.diff().max() > 3
    logits, grads = train(schema, config, batch, dtype=dtype)
    plain_logits, plain_grads = train(expanded_schema(schema), config, expand_batch(schema, batch), dtype=dtype)
    torch.testing.assert_close(logits, plain_logits, rtol=limit, atol=limit)
    assert grads.keys() == plain_grads.keys()
    for key, grad in grads.items():
        scale = max(float(plain_grads[key].abs().max()), 1.0)
        torch.testing.assert_close(grad / scale, plain_grads[key] / scale, rtol=limit, atol=limit, msg=key)


def test_candidates_of_a_request_do_not_see_one_another() -> None:
    schema, config = request_schema(), SHARED["target_read"]
    batch = request_batch(schema)
    logits, _ = train(schema, config, batch, dtype=torch.float64)
    assert batch.requests is not None
    first, stop = batch.requests[2:4].tolist()
    key = list(batch.ids.keys()).index("item")
    place = batch.ids.offset_per_key()[key] + first  # one id an impression
    batch.ids.values()[place] = (batch.ids.values()[place] + 1) % 11
    changed, _ = train(schema, config, batch, dtype=torch.float64)
    moved = (changed - logits).abs().sum(1) > 1e-12
    assert stop - first > 1
    assert moved.nonzero().flatten().tolist() == [first]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cls_tokens": 1}, "cls_tokens is 1"),
        ({"blocks": ("hstu", "pffn")}, 'blocks has "pffn"'),
        ({"blocks": ("interformer",)}, 'blocks has "interformer"'),
        ({"blocks": ("window",), "window": 2}, 'blocks has "window"'),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(changes: dict, says: str) -> None:
    config = make_config(stream=stream_config(**changes))
    with pytest.raises(ValueError, match=f"stream 'clicks': {says}.*Set per_request False"):
        plan_model(request_schema(), config)
    plan_model(expanded_schema(request_schema()), config)
    plan_model(
        request_schema(), dataclasses.replace(config, stream=dataclasses.replace(config.stream, per_request=False))
    )


def test_repeated_rows_add_their_gradients() -> None:
    schema = request_schema()
    inputs = to_model_input(
        request_batch(schema), look_up(schema, make_config(), request_batch(schema), tables_of(schema)), schema=schema
    )
    requests = inputs.requests
    assert requests is not None
    x = torch.randn(5, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: repeat(x, requests), x)
    assert torch.equal(repeat(x, requests), x[requests.owner])


def tables_of(schema: Schema) -> dict[str, torch.Tensor]:
    return {spec.name: torch.zeros(spec.rows, spec.dim) for spec in table_specs(schema, make_config())}


# ------------------------------------------------------------------------------------------------ work


def test_flops_by_hand() -> None:
    """A request of 3 clicks and 2 impressions: 5 tokens, pairs 1 + 2 + 3 and twice 4, where samples have 8 and 20."""
    schema = request_schema()
    one = make_config(layers=1, stream=stream_config(blocks=("hstu",)))
    came = model_flops(one, schema, {"clicks": [3], "views": [0]}, impressions=[2])
    block = 2 * 5 * 5 * 64 + 2 * 2 * 8 * 14
    tokens = 2 * 5 * (2 * 4) * 8 + 2 * 3 * (3 + 2) * 8
    assert came["sequence"] == block + tokens
    plain = model_flops(one, expanded_schema(schema), {"clicks": [3, 3], "views": [0, 0]})
    block = 2 * 8 * 5 * 64 + 2 * 2 * 8 * 20
    tokens = 2 * 8 * (2 * 4) * 8 + 2 * 6 * (3 + 2) * 8
    assert plain["sequence"] == block + tokens


FULL_PAIRS = {
    "no_candidate": make_config(stream=stream_config(candidate=False, blocks=("window",), window=50)),
    "read": make_config(layers=1, stream=stream_config(blocks=("hstu",), target_read=True)),
    "hsp": make_config(layers=1, stream=stream_config(blocks=("hstu",), summary="hsp", recent_tokens=0)),
    "single": SINGLE["single_target_read"],
}


@pytest.mark.parametrize("name", FULL_PAIRS)
def test_flops_are_those_of_torchs_counter(name: str) -> None:
    """Rows of one length; the eager attention multiplies what masks hide, which is added to what the formulas count."""
    config, schema = FULL_PAIRS[name], request_schema()
    events = {"clicks": np.array([6] * 2), "views": np.array([3] * 2)}
    batch = next(b for b in (random_batch(schema, events, seed=s) for s in range(999)) if alike(b))
    assert batch.requests is not None
    counts = batch.requests.diff().tolist()
    model = build_model(schema, config, seed=0)
    inputs = to_model_input(batch, look_up(schema, config, batch, tables_of(schema)), schema=schema)
    with FlopCounterMode(display=False) as counter:
        model(inputs)
    came = model_flops(config, schema, {name: found.tolist() for name, found in events.items()}, impressions=counts)
    hidden, width = 0, config.stream.dim
    for stream in plan_model(schema, config).streams:
        length, m = int(events[stream.name][0]), stream.targets
        for kind in stream.config.blocks:
            if kind == "hstu":
                rows = counts if stream.shared else [1] * sum(counts)
                for count in rows:
                    tokens = length + m * count
                    seen = length * (length + 1) // 2 + m * count * (length + 1)
                    hidden += 4 * width * (tokens * tokens - seen)
    assert sum(came.values()) + hidden == counter.get_total_flops()


def alike(batch: Batch) -> bool:
    """As many impressions in every request, so that the eager attention pads nothing."""
    assert batch.requests is not None
    counts = batch.requests.diff()
    return bool((counts == counts[0]).all()) and int(counts[0]) > 1


def test_work_falls_with_impressions_and_long_histories() -> None:
    schema, config = request_schema(), SHARED["hstu"]
    lengths, counts = {"clicks": [12] * 8, "views": [8] * 8}, [8] * 8
    came = training_flops(config, schema, lengths, impressions=counts)
    plain = training_flops(config, expanded_schema(schema), {name: found * 8 for name, found in lengths.items()})
    assert came["heads"] == plain["heads"]
    assert plain["sequence"] / came["sequence"] > 4
    single = training_flops(
        dataclasses.replace(config, stream=stream_config(per_request=False)), schema, lengths, impressions=counts
    )
    assert single["sequence"] == plain["sequence"]


@pytest.mark.parametrize("name", ["hstu", "target_read", "hsp", "single_hstu", "mixed"])
def test_the_cost_model_of_requests_is_what_is_counted(name: str) -> None:
    config, schema = CONFIGS[name], request_schema()
    batch = request_batch(schema, seed=8)
    assert batch.requests is not None
    cost = flops_cost(schema, config)
    assert {term.stream for term in cost.terms} == {term.stream for term in cost_terms(schema, config)}
    lengths = {key: stream.offsets.diff().tolist() for key, stream in batch.streams.items()}
    counted = sum(training_flops(config, schema, lengths, impressions=batch.requests.diff()).values())
    assert float(batch_loads(cost, batch).sum()) + cost.per_step == pytest.approx(counted, rel=0.02)


@pytest.mark.slow
def test_features_of_requests_compile_as_one_graph() -> None:
    schema, config = request_schema(), make_config()
    batch, tables = request_batch(schema), tables_of(schema)
    draw = torch.Generator().manual_seed(2)
    tables = {name: torch.randn(table.shape, generator=draw).requires_grad_() for name, table in tables.items()}
    features = build_model(schema, config, seed=1).features
    compiled = torch.compile(features.forward, fullgraph=True, backend="aot_eager")
    found = []
    for call in (features.forward, compiled):
        inputs = to_model_input(batch, look_up(schema, config, batch, tables), schema=schema)
        tokens = call(inputs)
        tokens.square().sum().backward()
        found.append((tokens.detach(), {name: table.grad for name, table in tables.items()}))
        for table in tables.values():
            table.grad = None
    torch.testing.assert_close(found[0][0], found[1][0])
    for name, grad in found[0][1].items():
        if grad is not None:
            torch.testing.assert_close(grad, found[1][1][name], msg=name)
