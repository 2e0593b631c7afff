"""Rotary embedding and norms: by hand, by property, and their gradients."""

import math

import pytest
import torch
from gem_attention.interface import RotarySpec
from gem_attention.norms import gated_norm, normalize
from gem_attention.rotary import apply_rotary, packed_ages, packed_positions, packed_samples, rotary_angles

OFFSETS = torch.tensor([0, 2, 2, 5])


def test_packed_helpers_by_hand():
    assert packed_positions(OFFSETS, 5).tolist() == [0, 1, 0, 1, 2]
    assert packed_samples(OFFSETS, 5).tolist() == [0, 0, 2, 2, 2]
    assert packed_ages(torch.tensor([10, 40, 7]), torch.tensor([0, 2, 3])).tolist() == [30, 0, 0]
    reference = torch.tensor([50, 99, 100])
    assert packed_ages(torch.tensor([10, 40, 7, 100, 101]), OFFSETS, reference).tolist() == [40, 10, 93, 0, 0]
    assert packed_ages(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0])).shape == (0,)


def test_a_quarter_turn_by_hand():
    angles = torch.tensor([[math.pi / 2, math.pi]])
    x = torch.tensor([[[1.0, 0.0, 2.0, 3.0]]])
    interleaved = apply_rotary(x, angles, RotarySpec(pairing="interleaved"))
    halves = apply_rotary(x, angles, RotarySpec(pairing="halves"))
    # interleaved pairs (1, 0) and (2, 3); halves pairs (1, 2) and (0, 3)
    torch.testing.assert_close(interleaved, torch.tensor([[[0.0, 1.0, -2.0, -3.0]]]))
    torch.testing.assert_close(halves, torch.tensor([[[-2.0, 0.0, 1.0, -3.0]]]))


def test_angles_by_hand():
    spec = RotarySpec(pairing="halves", base=100.0, time_scale_s=60.0, time_base=16.0)
    angles = rotary_angles(spec, torch.tensor([3]), torch.tensor([180]), dim=4, dtype=torch.float64)
    tau = math.log(4.0)
    torch.testing.assert_close(angles, torch.tensor([[3 + tau, 3 / 10 + tau / 4]], dtype=torch.float64))


@pytest.mark.parametrize("pairing", ["interleaved", "halves"])
def test_scores_depend_on_differences_only(pairing):
    spec = RotarySpec(pairing=pairing, time_scale_s=30.0)
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(i, j, age_i, age_j):
        def turn(x, position, age):
            angles = rotary_angles(spec, torch.tensor([position]), torch.tensor([age]), dim=16, dtype=torch.float64)
            return apply_rotary(x, angles, spec)

        return (turn(q, i, age_i) * turn(k, j, age_j)).sum()

    # the same distance 4, and ages whose (1 + age / 30) have the same ratio 2
    torch.testing.assert_close(score(7, 3, 30, 90), score(11, 7, 90, 210), rtol=1e-12, atol=1e-12)
    assert abs(score(7, 3, 30, 90) - score(7, 3, 30, 30)) > 1e-3
    assert abs(score(7, 3, 30, 90) - score(8, 3, 30, 90)) > 1e-3


@pytest.mark.parametrize("pairing", ["interleaved", "halves"])
def test_turning_keeps_lengths_and_gradients_turn_back(pairing):
    spec = RotarySpec(pairing=pairing)
    x = torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(1))
    angles = rotary_angles(spec, packed_positions(OFFSETS, 5), None, dim=8, dtype=torch.float64)
    turned = apply_rotary(x, angles, spec)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    upstream = torch.randn(5, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (grad,) = torch.autograd.grad(turned, x, upstream)
    torch.testing.assert_close(grad, apply_rotary(upstream, -angles, spec))


def test_half_precision_is_rounded_once():
    spec = RotarySpec(pairing="halves")
    angles = rotary_angles(spec, torch.arange(4), None, dim=8)
    x = torch.randn(4, 1, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = apply_rotary(x, angles, spec)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply_rotary(x.float(), angles, spec).bfloat16())


def test_rotary_refuses():
    timed = RotarySpec(pairing="halves", time_scale_s=60.0)
    with pytest.raises(ValueError, match=r"time_scale_s is 60\.0, ages_s missing"):
        rotary_angles(timed, torch.arange(3), None, dim=8)
    with pytest.raises(ValueError, match="dim=7"):
        rotary_angles(RotarySpec(pairing="halves"), torch.arange(3), None, dim=7)
    with pytest.raises(ValueError, match=r"needs angles \(T, D/2\); got \(3, 1, 8\) and \(3, 3\)"):
        apply_rotary(torch.ones(3, 1, 8), torch.ones(3, 3), timed)


def test_norms_by_hand():
    x = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(normalize(x, norm="rms", eps=0.0), x / 12.5**0.5)
    torch.testing.assert_close(normalize(x, norm="layer", eps=0.0), torch.tensor([[-1.0, 1.0]]))
    with pytest.raises(ValueError, match="norm='batch'"):
        normalize(x, norm="batch")


def test_gated_norm_over_all_heads_or_each():
    attention = torch.tensor([[[3.0, 5.0], [10.0, 20.0]]], dtype=torch.float64)
    u = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    each = gated_norm(attention, u, per_head=True, eps=0.0)
    torch.testing.assert_close(each, torch.tensor([[-1.0, 2.0, -3.0, 4.0]], dtype=torch.float64))
    flat = attention.flatten()
    expected = u * (flat - 9.5) / (((flat - 9.5) ** 2).mean()) ** 0.5
    torch.testing.assert_close(gated_norm(attention, u, eps=0.0), expected)
    with pytest.raises(ValueError, match=r"u: expected \(1, 4\)"):
        gated_norm(attention, u[:, :3])


def test_gradients_of_the_norm():
    generator = torch.Generator().manual_seed(4)
    attention = torch.randn(3, 2, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    u = torch.randn(3, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    for norm in ("layer", "rms"):
        assert torch.autograd.gradcheck(lambda a, u, norm=norm: gated_norm(a, u, norm=norm), (attention, u))
