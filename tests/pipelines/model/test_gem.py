"""The whole model: what a row's logit may depend on, every kind of module, edge batches, seeds, parts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gem_data.interface import Schema
from gem_pipelines.model import build_model, presets, table_specs
from gem_pipelines.model.config import HeadsConfig, InteractionConfig, ModelConfig, StreamConfig
from gem_pipelines.model.inputs import ModelInput
from gem_pipelines.model.plan import plan_model
from gem_pipelines.model.testing import KINDS, make_config, make_inputs, make_schema, stream_config

CLICKS, VIEWS = [4, 0, 12, 1], [0, 3, 2, 0]


@pytest.fixture(params=KINDS)
def model(request):
    return build_model(make_schema(), KINDS[request.param], seed=1).double()


def rows_of(inputs: ModelInput, keep: list[int]) -> ModelInput:
    """Some rows of a batch, in the given order."""
    streams, embeddings, events = {}, {}, {}
    for name, stream in inputs.streams.items():
        at = [torch.arange(int(stream.offsets[row]), int(stream.offsets[row + 1])) for row in keep]
        lengths = torch.tensor([len(part) for part in at])
        events[name] = torch.cat(at)
        streams[name] = dataclasses.replace(
            stream,
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            actions=stream.actions[events[name]],
            times=stream.times[events[name]],
            max_len=int(lengths.max()),
        )
    for key, vectors in inputs.embeddings.items():
        embeddings[key] = vectors[events[key.split(".")[0]] if "." in key else keep]
    return ModelInput(
        embeddings=embeddings, dense=inputs.dense[keep], timestamps=inputs.timestamps[keep], streams=streams
    )


def test_a_logit_does_not_depend_on_the_other_rows(model):
    inputs = make_inputs(CLICKS, VIEWS)
    together = model(inputs)
    for keep in ([0], [1], [2], [3], [2, 0], [3, 2, 1, 0]):
        torch.testing.assert_close(model(rows_of(inputs, keep)), together[keep], rtol=1e-9, atol=1e-11)


def test_gradients_do_not_cross_rows(model):
    inputs = make_inputs(CLICKS, VIEWS)
    model(inputs)[2].sum().backward()
    offsets = inputs.streams["clicks"].offsets
    grad = inputs.embeddings["clicks.item"].grad
    own = slice(int(offsets[2]), int(offsets[3]))
    assert grad[own].abs().sum() > 0
    grad[own] = 0
    assert not grad.any()
    assert not inputs.embeddings["item"].grad[[0, 1, 3]].any()


def test_gradients_of_everything(model):
    """Along a random direction of all parameters and inputs, the gradient is the slope."""
    inputs = make_inputs([3, 0], [1, 0])
    torch.manual_seed(0)
    values = [*inputs.embeddings.values(), *model.parameters()]
    direction = [torch.randn_like(value) for value in values]
    coefficients = torch.randn(2, 2, dtype=torch.float64)
    (model(inputs) * coefficients).sum().backward()
    slope = sum((value.grad * way).sum() for value, way in zip(values, direction, strict=True))
    step, ends = 1e-5, []
    with torch.no_grad():
        for sign in (1, -2):
            for value, way in zip(values, direction, strict=True):
                value.add_(way, alpha=sign * step)
            ends.append((model(inputs) * coefficients).sum())
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)


def test_every_parameter_and_input_takes_part(model):
    inputs = make_inputs(CLICKS, VIEWS)
    model(inputs).square().sum().backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []
    assert [key for key, vectors in inputs.embeddings.items() if not vectors.grad.any()] == []


def test_zero_rows_have_zero_logits_and_a_backward(model):
    logits = model(make_inputs([]))
    assert logits.shape == (0, 2)
    logits.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_rows_without_any_event(model):
    logits = model(make_inputs([0, 0], [0, 0]))
    assert logits.isfinite().all()
    assert not torch.allclose(logits[0], logits[1])


def test_parts_cover_every_parameter_once(model):
    parts = model.parts()
    assert list(parts) == ["sequence", "cross", "interaction", "heads"]
    held = [id(p) for modules in parts.values() for module in modules for p in module.parameters()]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


def test_seed_alone_decides_the_parameters():
    schema, config = make_schema(), KINDS["kunlun"]
    torch.manual_seed(5)
    first = build_model(schema, config, seed=3)
    after_first = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after_first, torch.rand(1)), "building a model moved the global generator"
    second = build_model(schema, config, seed=3)
    other = build_model(schema, config, seed=4)
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert a.dtype == torch.float32, name
        assert torch.equal(a, b), name
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_attention_implementations_agree():
    inputs = make_inputs(CLICKS, VIEWS)
    for config in KINDS.values():
        eager = build_model(make_schema(), config, seed=1).double()
        plain = build_model(make_schema(), dataclasses.replace(config, attention="reference"), seed=1).double()
        torch.testing.assert_close(eager(inputs), plain(inputs), rtol=1e-9, atol=1e-11)


def test_candidate_attends_to_the_history():
    """The derivative of a logit with respect to (candidate, event) is not additive: they meet before the heads."""
    config = make_config(layers=1, stream=stream_config(blocks=("hstu",), summary="interformer"))
    model = build_model(make_schema(), config, seed=0).double()
    base = make_inputs([3], [0])

    def tokens(item: float, event: float) -> torch.Tensor:
        embeddings = dict(base.embeddings)
        embeddings["item"] = base.embeddings["item"] + item
        embeddings["clicks.item"] = base.embeddings["clicks.item"] + event
        caught = []
        handle = model.last_summaries["clicks"].register_forward_pre_hook(lambda _, args: caught.append(args[0]))
        model(dataclasses.replace(base, embeddings=embeddings))
        handle.remove()
        return caught[0][-1]  # the candidate's token after the block

    mixed = tokens(1.0, 1.0) - tokens(1.0, 0.0) - tokens(0.0, 1.0) + tokens(0.0, 0.0)
    assert mixed.abs().max() > 1e-3


def test_comp_skip_pools_only_where_it_should():
    config = make_config(
        layers=4, stream=stream_config(blocks=("pffn", "window", "pffn", "window"), summary="hsp", window=2)
    )
    model = build_model(make_schema(), config, seed=0)
    assert ["clicks" in layer.summaries for layer in model.layers] == [True, False, True, False]
    assert "clicks" in model.last_summaries
    short = build_model(make_schema(), make_config(layers=3, stream=stream_config(blocks=("hstu",))), seed=0)
    assert ["clicks" in layer.summaries for layer in short.layers] == [True, True, False]
    assert len(short.last_summaries) == 0


@pytest.mark.parametrize("preset", [presets.debug, presets.ml100k_cpu, presets.synthetic_cpu])
def test_presets_train(preset):
    """A model of each size lowers its loss on a batch it sees again."""
    config = preset()
    model = build_model(make_schema(), config, seed=0)
    inputs = make_inputs([3, 0, 5], [1, 2, 0], dtype=torch.float32, table_dim=config.table_dim)
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_table_specs_follow_the_schema():
    specs = {spec.name: spec for spec in table_specs(make_schema(), make_config())}
    assert specs["item"].features == ("item", "clicks.item")
    assert specs["tag"].features == ("tags", "clicks.tag", "views.tag")
    assert specs["tag"].pooling == "none", "its vectors are also events"
    assert all(spec.dim == 4 for spec in specs.values())
    without = dataclasses.replace(make_schema(), streams=())
    assert {spec.name: spec.pooling for spec in table_specs(without, make_config())}["tag"] == "mean"


def test_a_schema_without_streams_has_a_model():
    schema = dataclasses.replace(make_schema(), streams=())
    model = build_model(schema, make_config(), seed=0).double()
    inputs = dataclasses.replace(make_inputs([1, 2]), streams={})
    assert model(inputs).shape == (2, 2)
    assert model.parts()["sequence"] == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StreamConfig(dim=10, heads=4), "multiple of 2"),
        (lambda: StreamConfig(blocks=("window",)), "window > 0"),
        (lambda: StreamConfig(summary="hsp", seeds=2, summary_tokens=2), "compresses"),
        (lambda: StreamConfig(score_divisor=0.0), "score_divisor"),
        (lambda: InteractionConfig(kind="experts", fm_tokens=3), "multiple of experts"),
        (lambda: InteractionConfig(members=("fm", "fm")), "repeat"),
        (lambda: HeadsConfig(kind="mmoe", shared=()), "shared layers"),
        (lambda: ModelConfig(table_dim=6), "multiple of 4"),
        (lambda: ModelConfig(layers=1), "2 blocks, expected 1 to layers=1"),
        (lambda: plan_model(make_schema(), make_config(streams={"likes": StreamConfig()})), "likes"),
        (lambda: plan_model(Schema(name="x", created_by="x", tables=(), labels=()), make_config()), "nothing to learn"),
    ],
)
def test_bad_configs_say_what_is_wrong(make, words):
    with pytest.raises(ValueError, match=words):
        make()
