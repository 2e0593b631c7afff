"""Eager and reference against the shipped suite, and the suite against implementations that are wrong."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from gem_attention import api, eager
from gem_attention.interface import MaskSpec
from gem_attention.testing import Quirks, cases, check_against_float64, check_isolation, check_repeatable, conformance

EAGER = Quirks(dtypes=(torch.float32, torch.bfloat16))
EAGER_MORE = Quirks(dtypes=(torch.float64, torch.float16), deterministic=False, isolates_nan=False)
REFERENCE = Quirks(dtypes=(torch.bfloat16,), isolates_nan=False)
BY_NAME = {case.name: case for case in cases()}


def promised(quirks):
    return [check for check in conformance(quirks) if check.skipped is None]


@pytest.mark.parametrize("check", conformance(EAGER), ids=str)
def test_eager_conforms(check):
    assert check.skipped is None
    check(partial(api.attention, impl="eager"))


@pytest.mark.slow
@pytest.mark.parametrize("check", promised(EAGER_MORE), ids=str)
def test_eager_conforms_in_the_other_dtypes(check):
    check(partial(api.attention, impl="eager"))


@pytest.mark.slow
@pytest.mark.parametrize("check", promised(REFERENCE), ids=str)
def test_reference_conforms(check):
    check(partial(api.attention, impl="reference"))


def _spec_changed(**changes):
    def wrong(q, k, v, *, spec, **more):
        return eager.attention(q, k, v, spec=replace(spec, **changes), **more)

    return wrong


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        ("silu-causal", _spec_changed(mask=MaskSpec())),
        ("silu-uniform", _spec_changed(divisor=13.0 * 1.0001)),
        ("silu-window-targets-meta", _spec_changed(mask=BY_NAME["silu-window-targets-nvidia"].spec.mask)),
        ("gelu-uniform", _spec_changed(activation="gelu_tanh")),
        ("silu-bias-inside_scale", _spec_changed(bias=BY_NAME["silu-bias-outside_scale"].spec.bias)),
    ],
)  # fmt: skip
def test_the_suite_notices_another_meaning(case, wrong):
    with pytest.raises(AssertionError, match="against float64"):
        check_against_float64(wrong, BY_NAME[case], torch.float32, Quirks())


def test_the_suite_notices_a_wrong_gradient():
    def wrong(q, k, v, **more):
        out = eager.attention(q, k, v, **more)
        return out + 0.01 * (k.sum() - k.sum().detach())

    with pytest.raises(AssertionError, match="against float64: k: error"):
        check_against_float64(wrong, BY_NAME["silu-causal"], torch.float32, Quirks())


def test_the_suite_notices_leaking_neighbours():
    def wrong(q, k, v, **more):
        return eager.attention(q, k, v, **more) + 0.0 * k.sum()

    with pytest.raises(AssertionError, match="NaN in one sample"):
        check_isolation(wrong, BY_NAME["silu-causal"], torch.float32, Quirks())


def test_the_suite_notices_unstable_bits():
    calls = iter([1.0, 1.0 + 2**-20])

    def wrong(q, k, v, **more):
        return eager.attention(q * next(calls), k, v, **more)

    with pytest.raises(AssertionError, match="two runs"):
        check_repeatable(wrong, BY_NAME["silu-causal"], torch.float32, Quirks())
