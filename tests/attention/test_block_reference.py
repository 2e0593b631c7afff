"""The block's definitions by hand and by finite differences; what is refused; what recomputation keeps and changes."""

import itertools
import math

import pytest
import torch
from gem_attention import block_api
from gem_attention.block_counting import gate_bytes, projection_cost, saved_bytes_per_token
from gem_attention.block_recompute import Rebuilt, SavedBytes
from gem_attention.block_reference import turn
from gem_attention.interface import GateSpec, HstuSpec, ProjectionSpec, RecomputeSpec, RotarySpec
from gem_attention.norms import gated_norm
from gem_attention.rotary import apply_rotary
from torch.autograd import gradcheck

HSTU = HstuSpec(dim=12, heads=2, qk_dim=4, v_dim=6, rotary=RotarySpec(pairing="halves"), activated="all")


def doubles(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]


def plain_attention(q, k, v):
    """Not attention at all, but differentiable in q, k and v."""
    return (q * k).sum(-1, keepdim=True).sigmoid() * v


def test_the_projection_by_hand():
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    (y,) = block_api.norm_linear(x, weight, spec=ProjectionSpec(widths=(2,), norm="rms", eps=0.0))
    torch.testing.assert_close(y, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)
    first, second = block_api.norm_linear(x, weight, spec=ProjectionSpec(widths=(1, 1), silu=(1,), eps=0.0))
    torch.testing.assert_close(first, torch.tensor([[-1.0]]))
    torch.testing.assert_close(second, torch.tensor([[2.0 / (1.0 + math.exp(-2.0))]]))


def test_the_turn_by_hand_and_after_silu():
    quarter = block_api.rotary_table(torch.tensor([[math.pi / 2]]))
    torch.testing.assert_close(quarter, torch.tensor([[0.0, 1.0]]))
    x = torch.tensor([[1.0, 0.0, 5.0, 6.0]])
    torch.testing.assert_close(turn(x, quarter, "halves"), torch.tensor([[0.0, 1.0, -6.0, 5.0]]))
    spec = ProjectionSpec(
        widths=(2,), silu=(0,), turned=(0,), rotary=RotarySpec(pairing="halves"), head_dim=2, norm="rms", eps=0.0
    )
    (y,) = block_api.norm_linear(torch.ones(1, 2), torch.eye(2) * 3, spec=spec, table=quarter)
    active = 3.0 / (1.0 + math.exp(-3.0))
    torch.testing.assert_close(y, torch.tensor([[-active, active]]))


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_the_turn_is_rotary(pairing):
    x, angles = doubles((5, 3, 8), (5, 4))
    expected = apply_rotary(x, angles, RotarySpec(pairing=pairing)).flatten(1)
    assert torch.equal(turn(x.flatten(1), block_api.rotary_table(angles), pairing), expected)


def test_the_gate_by_hand_and_as_the_norms_define_it():
    a, u = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[1.0, 10.0]])
    y = block_api.gated(a, u, spec=GateSpec(norm="rms", eps=0.0))
    torch.testing.assert_close(y, torch.tensor([[3.0, 40.0]]) / 12.5**0.5)
    out = block_api.gated_linear(
        a, u, torch.ones(1, 2), torch.ones(1, 1), spec=GateSpec(norm="rms", eps=0.0, activation="sigmoid")
    )
    sigmoid = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-10))]
    torch.testing.assert_close(out, torch.tensor([[1 + (sigmoid[0] * 3 + sigmoid[1] * 4) / 12.5**0.5]]))
    a, u = doubles((5, 2, 4), (5, 8))
    for per_head in (False, True):
        same = gated_norm(a, u, per_head=per_head)
        torch.testing.assert_close(block_api.gated(a, u, spec=GateSpec(per_head=per_head)), same)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_gradients_by_finite_differences(norm):
    x, weight, angles = doubles((3, 5), (12, 5), (3, 2))
    table = block_api.rotary_table(angles.detach())
    spec = ProjectionSpec(
        widths=(4, 4, 4), silu=(0, 1), turned=(1, 2), rotary=RotarySpec(pairing="halves"), head_dim=4, norm=norm
    )
    assert gradcheck(lambda x, w: block_api.norm_linear(x, w, spec=spec, table=table, impl="reference"), (x, weight))
    inputs = doubles((3, 2, 3), (3, 6), (4, 6), (3, 4), seed=1)
    for activation, per_head in (("silu", False), ("sigmoid", True)):
        gate = GateSpec(activation=activation, norm=norm, per_head=per_head)
        assert gradcheck(lambda *t, gate=gate: block_api.gated_linear(*t, spec=gate, impl="reference"), inputs)


def test_half_precision_reference_rounds_once():
    x, weight = (t.detach().bfloat16() for t in doubles((7, 16), (8, 16)))
    spec = ProjectionSpec(widths=(8,), silu=(0,))
    (y,) = block_api.norm_linear(x, weight, spec=spec, impl="reference")
    (wide,) = block_api.norm_linear(x.float(), weight.float(), spec=spec, impl="reference")
    assert torch.equal(y, wide.bfloat16())


def block_of(recompute, given, table):
    with SavedBytes(exclude=[given[1], given[2], table]) as saved:
        out = block_api.hstu_block(*given, attention=plain_attention, spec=HSTU, table=table, recompute=recompute)
    return out, saved.total()


def test_eager_recomputation_changes_no_bit_and_keeps_less():
    table = block_api.rotary_table(doubles((6, 2))[0].detach())
    flags = ("normed_x", "preactivations", "gated", "projected")
    results = {}
    for choice in itertools.product((False, True), repeat=4):
        given = doubles((6, 12), (40, 12), (12, 12), seed=2)
        out, saved = block_of(RecomputeSpec(**dict(zip(flags, choice, strict=True))), given, table)
        grads = torch.autograd.grad(out.square().sum(), given, retain_graph=True)
        again = torch.autograd.grad(out.square().sum(), given)
        results[choice] = saved, [out.detach(), *grads]
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    nothing, expected = results[(False,) * 4]
    for choice, (saved, found) in results.items():
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), choice
        for place in range(4):  # each flag saves something, whatever the others
            if not choice[place]:
                assert results[(*choice[:place], True, *choice[place + 1 :])][0] < saved, (choice, flags[place])
    assert nothing > results[(True,) * 4][0]


def test_saved_bytes_counts_storages_once_and_not_the_excluded():
    x = torch.ones(10, requires_grad=True)
    with SavedBytes() as saved:
        y = x.sigmoid()  # keeps its output
    assert saved.total() == 40
    with SavedBytes() as saved:
        z = y[:3] * y[3:6]  # two views of one storage
    assert saved.total() == 40
    with SavedBytes(exclude=[y]) as saved:
        (z * 2.0).exp()  # keeps its output, 3 values
        y.square()
    assert saved.total() == 12


def test_a_recipe_runs_once_for_all_uses_and_what_it_needs_is_counted():
    x = torch.linspace(0, 1, 8, requires_grad=True)
    calls = []

    def recipe():
        calls.append(1)
        return [x.sin()]

    y = x.sin()
    with SavedBytes() as saved, Rebuilt([y], recipe, needs=[x]):
        a, b = y.exp() * y, y.square()
        assert saved.total() == 32 + 32  # x, and exp's output
    (grad,) = torch.autograd.grad((a + b).sum(), x)
    assert len(calls) == 1
    y = x.detach().requires_grad_().sin()
    sin, cos = x.detach().sin(), x.detach().cos()
    torch.testing.assert_close(grad, cos * (sin.exp() * (1 + sin) + 2 * sin))


def test_counts_by_hand():
    spec = ProjectionSpec(widths=(1024,) * 4, silu=(0, 1, 2, 3))
    cost = projection_cost(131072, 1024, spec)
    assert cost.forward_flops == 2 * 131072 * 1024 * 4096 == 1_099_511_627_776
    assert cost.forward_min_bytes == 2 * (131072 * 1024 + 1024 * 4096 + 2 * 131072 * 4096)
    assert gate_bytes(100, 64) == (3 * 12800, 5 * 12800)
    assert gate_bytes(100, 64, rebuild=True)[1] == 6 * 12800
    hstu = HstuSpec(dim=512, heads=4, qk_dim=128, v_dim=128)
    assert sum(saved_bytes_per_token(hstu).values()) == 7184
    everything = RecomputeSpec(normed_x=True, preactivations=True, gated=True, projected=True)
    assert sum(saved_bytes_per_token(hstu, everything).values()) == 2064


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (ProjectionSpec, {"widths": ()}, "projection.widths="),
        (ProjectionSpec, {"widths": (4, 0)}, r"widths\[1\]=0"),
        (ProjectionSpec, {"widths": (4,), "silu": (1,)}, r"silu=\(1,\).*among 0\.\.0"),
        (ProjectionSpec, {"widths": (4,), "silu": (0, 0)}, "different outputs"),
        (ProjectionSpec, {"widths": (4,), "turned": (0,)}, "name both"),
        (ProjectionSpec, {"widths": (4,), "norm": "batch"}, "'layer', 'rms'"),
        (
            ProjectionSpec,
            {"widths": (6,), "turned": (0,), "rotary": RotarySpec(pairing="halves"), "head_dim": 4},
            "multiple of head_dim",
        ),
        (GateSpec, {"activation": "gelu"}, "gate.activation='gelu'"),
        (GateSpec, {"eps": -1.0}, "gate.eps=-1.0"),
        (HstuSpec, {"dim": 8, "heads": 0, "qk_dim": 4, "v_dim": 4}, "hstu.heads=0"),
    ],
)
def test_specs_refuse(kind, arguments, words):
    with pytest.raises(ValueError, match=words):
        kind(**arguments)


def test_calls_refuse():
    x, weight, spec = torch.ones(3, 4), torch.ones(6, 4), ProjectionSpec(widths=(4, 2))
    with pytest.raises(ValueError, match=r"weight: expected shape \(6, 4\), got \(6, 5\)"):
        block_api.norm_linear(x, torch.ones(6, 5), spec=spec)
    with pytest.raises(ValueError, match=r"weight: torch\.float64 on cpu, expected torch\.float32"):
        block_api.norm_linear(x, weight.double(), spec=spec)
    with pytest.raises(ValueError, match="rotary table is given"):
        block_api.norm_linear(x, weight, spec=spec, table=torch.ones(3, 4))
    with pytest.raises(ValueError, match="impl='cuda': expected one of"):
        block_api.norm_linear(x, weight, spec=spec, impl="cuda")
    with pytest.raises(ValueError, match=r"u: expected shape \(3, 4\)"):
        block_api.gated(torch.ones(3, 2, 2), torch.ones(3, 5), spec=GateSpec())
    with pytest.raises(ValueError, match=r"residual: expected shape \(3, 6\)"):
        block_api.gated_linear(torch.ones(3, 2, 2), x, weight, torch.ones(3, 5), spec=GateSpec())
    with pytest.raises(ValueError, match=r"x: expected \(tokens, 12\)"):
        block_api.hstu_block(x, weight, weight, attention=plain_attention, spec=HSTU)
