"""The dtype that a model computes in, and torch.compile of its parts: the same model as in float32, uncompiled."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from gem_data.testing import tiny_request_schema, tiny_schema
from gem_pipelines.errors import ConfigError
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.gem import GemModel
from gem_pipelines.model.plan import plan_model
from gem_pipelines.model.testing import KINDS, make_inputs, make_schema
from gem_pipelines.parallel_compile import compile_parts, compiled_modules
from gem_pipelines.parallel_graphs import check_graphs, graph_parts
from gem_pipelines.recipes import find_recipe
from torch import Tensor, nn

CLICKS, VIEWS = [3, 1, 0, 7], [2, 0, 1, 3]
PARTS = ("features", "interaction", "heads")


def build(config: ModelConfig, state: dict[str, Tensor] | None = None) -> GemModel:
    torch.manual_seed(0)
    model = GemModel(plan_model(make_schema(), config), config)
    if state is not None:
        model.load_state_dict(state)
    return model


def run(model: GemModel, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(logits, all gradients in one row)."""
    model.zero_grad()
    logits = model(make_inputs(CLICKS, VIEWS, seed=seed, dtype=dtype))
    (logits * torch.tensor([1.0, -0.5])).sum().backward()
    return logits.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).double().norm() / b.double().norm())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_bfloat16_is_the_same_model_up_to_its_rounding(kind):
    """At most 4 times what rounding every parameter to bfloat16 once, and computing in float32, changes."""
    config = KINDS[kind]
    wide = build(config)
    logits, gradients = run(wide)
    narrow = build(dataclasses.replace(config, compute="bfloat16"), wide.state_dict())
    found, found_gradients = run(narrow)
    rounded, rounded_gradients = run(build(config, {k: v.bfloat16().float() for k, v in wide.state_dict().items()}))
    assert found.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in narrow.parameters()} == {torch.float32}

    assert 0 < distance(found, logits) <= 4 * distance(rounded, logits)
    assert 0 < distance(found_gradients, gradients) <= 4 * distance(rounded_gradients, gradients)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_nothing_of_a_bfloat16_model_is_silently_float32(kind):
    """Every module but the dense features' MLP and the heads' last layers gives bfloat16."""
    model = build(dataclasses.replace(KINDS[kind], compute="bfloat16"))
    wide = []

    def hook(name: str):
        def look(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor) and output.dtype != torch.bfloat16:
                wide.append(name)

        return look

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))
    model(make_inputs(CLICKS, VIEWS, dtype=torch.float32))
    last = {f"heads.tasks.{t}.layers.{len(task.layers) - 1}" for t, task in enumerate(model.heads.tasks)}
    allowed = {"", "heads", *(f"heads.tasks.{t}" for t in range(len(model.heads.tasks))), *last}
    assert {name for name in wide if not name.startswith("features.dense")} == allowed


@pytest.mark.parametrize("kind", ["hstu", pytest.param("interformer", marks=pytest.mark.slow)])
def test_compiled_parts_are_the_same_model_under_the_same_names(kind):
    """Traced and differentiated ahead of time, without a compiler: the same bits forward; another batch size too."""
    plain = build(KINDS[kind])
    compiled = build(KINDS[kind], plain.state_dict())
    compile_parts(compiled, PARTS, backend="aot_eager")
    assert len(compiled_modules(compiled, PARTS)) == 2 + len(compiled.layers)
    for seed in range(2):
        (logits, gradients), (found, found_gradients) = run(plain, seed), run(compiled, seed)
        assert torch.equal(found, logits)
        assert distance(found_gradients, gradients) < 1e-6
    with torch.no_grad():
        inputs = make_inputs([2, 5], [1, 1], dtype=torch.float32)
        torch.testing.assert_close(compiled(inputs), plain(inputs))
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]


class Mixer(nn.Module):
    """Mixes the tokens of a batch (B, T, D); of all its objects dynamo counts the compilations together."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.mix = nn.Linear(tokens, tokens)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.mix(x_BTD.transpose(1, 2)).transpose(1, 2)


def test_modules_of_one_class_and_many_sizes_are_all_compiled(monkeypatch):
    """Each of 4 in training and evaluation at 3 batch sizes: more often than dynamo's 8 times for a class."""
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        monkeypatch.setattr(torch._dynamo.config, name, 8)
    mixers = [Mixer(tokens) for tokens in (3, 5, 6, 9)]
    model = nn.Module()
    model.layers = nn.ModuleList()
    for mixer in mixers:
        layer = nn.Module()
        layer.interaction = mixer
        model.layers.append(layer)
    compile_parts(model, ("interaction",), backend="eager")
    for training in (True, False):
        for rows in (4, 7, 5):
            for mixer in mixers:
                x_BTD = torch.randn(rows, mixer.mix.in_features, 2)
                with torch.set_grad_enabled(training):
                    assert torch.equal(mixer(x_BTD), Mixer.forward(mixer, x_BTD))


@pytest.mark.slow
def test_compiled_by_inductor():
    plain = build(KINDS["hstu"])
    compiled = build(KINDS["hstu"], plain.state_dict())
    compile_parts(compiled, PARTS)
    (logits, gradients), (found, found_gradients) = run(plain), run(compiled)
    assert distance(found, logits) < 1e-5
    assert distance(found_gradients, gradients) < 1e-5


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_graphs_are_recorded_for_what_the_model_computes(kind):
    """Without CUDA nothing is recorded; the recorder here runs each part on the inputs it is given, in order, and
    stands in for it. Rows as recorded go through all of them, in that order, with the same bits; others
    through none.
    """
    plain = build(KINDS[kind])
    model = build(KINDS[kind], plain.state_dict())
    calls, made = [], []

    def record(modules, inputs):
        for number, (module, given) in enumerate(zip(modules, inputs, strict=True)):
            own = module.forward
            out = own(*given)
            wanted = [*given, *module.parameters()]
            gradients = torch.autograd.grad(out.sum(), wanted, allow_unused=True)
            assert all(gradient is not None for gradient in gradients)  # every parameter of a part belongs to it
            made.append(module)
            module.forward = lambda *x, own=own, number=number: (calls.append(number), own(*x))[1]

    graph_parts(
        model,
        ("summaries", "interaction", "heads"),
        rows=len(CLICKS),
        device=torch.device("cpu"),
        record=record,
    )
    (logits, gradients), (found, found_gradients) = run(plain), run(model)
    assert calls == list(range(len(made)))
    assert len(made) > len(model.layers) + 2
    assert torch.equal(found, logits)
    assert torch.equal(found_gradients, gradients)
    model(make_inputs([2, 5], [1, 1], dtype=torch.float32))
    with torch.no_grad():
        model(make_inputs(CLICKS, VIEWS, dtype=torch.float32))
    assert len(calls) == len(made)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"parallel": {"shard": 2}}, "parallel.shard 1, got 2: FSDP2 moves"),
        ({"parallel": {"expert": 2}}, "parallel.expert 1, got 2"),
        ({"data": {"accumulate": 2}}, "data.accumulate 1, got 2"),
        ({"balance": {"budget": 5.0}}, "no balance.budget"),
        ({"balance": {"method": "global", "counts": "free"}}, "balance.counts 'equal', got 'free'"),
        ({"data": {"global_batch_size": 33}}, "data.global_batch_size that 2 processes share evenly, got 33"),
    ],
)
def test_graphs_are_refused_where_they_would_be_wrong(section, words):
    base = find_recipe("debug")
    config = dataclasses.replace(base, model=dataclasses.replace(base.model, graphs=("heads",)))
    changed = {key: dataclasses.replace(getattr(config, key), **values) for key, values in section.items()}
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_graphs(dataclasses.replace(config, **changed), torch.device("cuda"), tiny_schema(), world_size=2)
    check_graphs(config, torch.device("cuda"), tiny_schema())
    with pytest.raises(ConfigError, match=r"need train\.device 'cuda'"):
        check_graphs(config, torch.device("cpu"), tiny_schema())


def test_graphs_are_refused_on_requests():
    """Their batches have another number of impressions at every step, which no recorded graph fits."""
    schema = tiny_request_schema()
    base = find_recipe("debug")
    config = dataclasses.replace(base, model=dataclasses.replace(base.model, graphs=("heads",)))
    words = r"model\.graphs is \('heads',\).*rows of 'tiny-requests' are requests.*id\.item.*Set model\.graphs to \(\)"
    with pytest.raises(ConfigError, match=words):
        check_graphs(config, torch.device("cuda"), schema)
    check_graphs(config, torch.device("cuda"), dataclasses.replace(schema, impression=()))
    check_graphs(base, torch.device("cuda"), schema)


def test_parts_that_repeat_are_refused():
    with pytest.raises(ValueError, match="parts repeat"):
        ModelConfig(compile=("heads", "heads"))
