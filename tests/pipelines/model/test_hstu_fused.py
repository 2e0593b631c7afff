"""The HSTU block by gem_attention against the one of PyTorch layers: outputs, gradients, what is kept."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from gem_attention.block_recompute import SavedBytes
from gem_pipelines.model.build import build_model
from gem_pipelines.model.config import ModelConfig
from gem_pipelines.model.hstu import HstuBlock
from gem_pipelines.model.testing import NOW, clicks_plan, make_config, make_inputs, make_schema, stream_config
from gem_pipelines.model.tokens import pack, with_table

CLICKS = [3, 0, 5]
STREAMS = {"plain": {}, "no_rotary": {"rotary": False}, "context": {"cls_tokens": 1, "window": 2}}


def outcome(stream=None, dtype=torch.float64, **changes):
    """Output and gradients of x and of the parameters, of a block with seeded parameters; and the bytes kept."""
    plan = clicks_plan(make_config(stream=stream_config(**(stream or {}))))
    config = make_config(stream=plan.config, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        block = HstuBlock(plan, config).to(dtype)
        packed = with_table(
            pack(plan, make_inputs(CLICKS).streams["clicks"], torch.full((3,), NOW), dtype=dtype),
            fused=config.hstu != "layers",
        )
        # drawn in one dtype, so that every dtype sees the same numbers
        drawn = torch.randn(2, packed.plain.total_q, plan.config.dim, dtype=torch.float64).to(dtype)
        x_TD, above_TD = drawn[0].requires_grad_(), drawn[1]
    with SavedBytes(exclude=block.parameters()) as saved:
        y_TD = block(x_TD, packed)
    parameters = dict(block.named_parameters())
    grads = torch.autograd.grad(y_TD, [x_TD, *parameters.values()], above_TD)
    return {"y": y_TD.detach()} | dict(zip(["x", *parameters], grads, strict=True)), saved.total()


def assert_same(actual, expected, rtol):
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        gap = float((actual[name] - want).norm() / want.norm())
        assert gap <= rtol, f"{name}: off by {gap:.2e}, allowed {rtol:.2e}"


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_the_fused_block_is_the_block_of_layers(impl, stream, norm):
    layers, _ = outcome(stream, norm=norm)
    fused, _ = outcome(stream, norm=norm, hstu=impl)
    assert layers["uvqk.weight"].abs().min() > 0
    assert_same(fused, layers, 1e-13)


@pytest.mark.parametrize("name", ["normed_x", "gated", "projected"])
def test_recomputing_keeps_less_and_changes_no_bit(name):
    whole, kept = outcome(hstu="eager")
    less, kept_less = outcome(hstu="eager", hstu_recompute=(name,))
    assert kept_less < kept
    for key, want in whole.items():
        assert torch.equal(less[key], want), key


def test_the_flags_reach_every_block_and_the_whole_model_agrees():
    config = make_config()
    layers = build_model(make_schema(), config, seed=0).double()
    changed = dataclasses.replace(config, hstu="eager", hstu_recompute=("gated", "projected"))
    fused = build_model(make_schema(), changed, seed=0).double()
    blocks = [m for m in fused.modules() if isinstance(m, HstuBlock)]
    assert len(blocks) == 4
    assert all(b.block == "eager" and b.recompute.gated and b.recompute.projected for b in blocks)
    assert not any(b.recompute.normed_x for b in blocks)
    fused.load_state_dict(layers.state_dict())
    inputs = make_inputs(CLICKS)
    expected, actual = layers(inputs), fused(inputs)
    assert float((actual - expected).norm() / expected.norm()) < 1e-12
    for (name, p), (_, q) in zip(layers.named_parameters(), fused.named_parameters(), strict=True):
        want, got = (torch.autograd.grad(y.sum(), w, retain_graph=True)[0] for y, w in ((expected, p), (actual, q)))
        assert float((got - want).norm()) <= 1e-11 * float(want.norm()) + 1e-14, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hstu": "triton", "norm_affine": True}, 'hstu="triton" has no place for norm_affine=True'),
        ({"hstu": "eager", "bias": True}, 'hstu="eager" has no place for bias=True'),
        ({"hstu_recompute": ("gated",)}, 'needs another hstu than "layers"'),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


@pytest.mark.slow
def test_the_kernels_agree_in_the_interpreter():
    """In a process of its own: the interpreter is chosen before the kernels are imported."""
    child = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    gaps = json.loads(child.stdout.splitlines()[-1])
    assert sorted(gaps) == ["out.weight", "uvqk.weight", "x", "y"]
    assert max(gaps.values()) < 2e-5, gaps


if __name__ == "__main__":
    truth, _ = outcome(dtype=torch.float64)
    got, _ = outcome(dtype=torch.float32, hstu="triton", attention="triton", hstu_recompute=("gated",))
    print(json.dumps({k: float((got[k].double() - w).norm() / w.norm()) for k, w in truth.items()}))
