"""The conformance suite that any implementation can run, here or in another repository; needs torch only.

    from gem_attention.testing import Quirks, conformance, summary
    CHECKS = conformance(Quirks(dtypes=(torch.float32,)))
    @pytest.mark.parametrize("check", CHECKS, ids=str)
    def test_conforms(check):
        check(my_attention)              # a callable as interface.Attention describes
    def test_what_is_left_out():
        assert summary(CHECKS).skipped == 0

What an implementation leaves out is listed, shows as skipped with the reason, and is counted by `summary`; the check
"core" fails for one that refuses every core case, whatever it answers.

The rule for errors has no magic number: against float64, an implementation may be at most 2 times (forward) or 3 times
(backward) as wrong as plain PyTorch in the same dtype. How wrong a tensor is: the root mean square error of its worst
row (one token and head; single entries are a matter of luck, means over the tensor hide a wrong row). Plain PyTorch is
the reference's formula with every step in that dtype; so that a lucky yardstick fails nobody, its error is the largest
of three draws of the inputs, and at least the rounding of the tensor's largest entry to the dtype. For float64 itself
there is no better truth: the yardstick is the error of float32 plain PyTorch, scaled by the ratio of the two
roundings, 2^-29.
"""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from gem_attention.interface import Attention
from gem_attention.testing_cases import (
    ACTIVATIONS,
    EDGES,
    RAGGED,
    UNIFORM,
    Case,
    Inputs,
    cases,
    hard_cases,
    layout_of,
    make_inputs,
    offsets_of,
    usual_cases,
)
from gem_attention.testing_checks import (
    BACKWARD_FACTOR,
    FORWARD_FACTOR,
    Quirks,
    Result,
    check_against_float64,
    check_alike,
    check_frozen,
    check_isolation,
    check_layers,
    check_repeatable,
    has_other_queries,
    is_ragged_self,
    left_out,
    plain_attention,
    plain_errors,
    row_error,
    run_case,
    sized,
    true_result,
)

__all__ = [
    "ACTIVATIONS", "BACKWARD_FACTOR", "EDGES", "FORWARD_FACTOR", "RAGGED", "UNIFORM", "Case", "Check", "Inputs",
    "Quirks", "Result", "Summary", "cases", "check_against_float64", "check_alike", "check_frozen", "check_isolation",
    "check_layers", "check_repeatable", "conformance", "hard_cases", "layout_of", "make_inputs", "offsets_of",
    "plain_attention", "plain_errors", "row_error", "run_case", "summary", "true_result", "usual_cases",
]  # fmt: skip

_ALIKE = ("silu-causal", "softmax-all-meta", "silu-bias-outside_scale", "softmax-cross", "silu-broadcast")
_FROZEN = ("silu-causal", "softmax-table-a-head", "silu-bias-inside_scale", "softmax-cross", "silu-broadcast")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One named check; call it with the implementation. AssertionError says what went wrong.

    skipped  why the quirks leave it out: calling it raises unittest.SkipTest, which pytest too shows as skipped. None:
             it runs
    """

    name: str
    run: Callable[[Attention], None]
    skipped: str | None = None

    def __call__(self, attention: Attention) -> None:
        if self.skipped is not None:
            raise unittest.SkipTest(self.skipped)
        self.run(attention)

    def __str__(self) -> str:
        return self.name


class Listed(Protocol):
    """What `summary` counts: the checks of either suite of this package."""

    @property
    def skipped(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How many checks a list holds that run and that do not; reasons: of these, by reason."""

    run: int
    skipped: int
    reasons: dict[str, int]

    def __str__(self) -> str:
        listing = "; ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        return f"{self.run} checks run, {self.skipped} skipped{': ' if listing else ''}{listing}"


def summary(checks: Iterable[Listed]) -> Summary:
    """What is run of these checks and what is left out, for a report or a test.

    Example: three checks, of which two are refused: str -> "1 checks run, 2 skipped: 2 no window".
    """
    counted = Counter(check.skipped for check in checks)
    run = counted.pop(None, 0)
    reasons = {str(reason): count for reason, count in counted.items()}
    return Summary(run=run, skipped=counted.total(), reasons=reasons)


def conformance(quirks: Quirks) -> list[Check]:
    """All checks for an implementation; those that the quirks leave out say so in `skipped`."""
    usual, hard = sized(usual_cases(), quirks), sized(hard_cases(), quirks)
    listed = [*usual, *hard]
    checks = [Check(name="core", run=lambda attention: _check_core(listed, quirks))]

    def add(kind: str, case: Case, dtype: torch.dtype, check: Callable[..., None], quirk: str | None = None) -> None:
        name = f"{kind}-{case.name}-{str(dtype).removeprefix('torch.')}"
        skipped = left_out(case, quirks) or quirk
        run = lambda attention: check(attention, case, dtype, quirks)  # noqa: E731
        checks.append(Check(name=name, run=run, skipped=skipped))

    repeats = None if quirks.deterministic else "quirk: not repeatable bit for bit"
    isolates = None if quirks.isolates_nan else "quirk: NaN reaches other samples"
    backward = None if quirks.backward else "quirk: no backward"
    first = quirks.dtypes[0]
    for case in listed:
        for dtype in quirks.dtypes:
            add("float64", case, dtype, check_against_float64)
    for case in usual:
        others = has_other_queries(case)
        if is_ragged_self(case) or others:
            add("isolation", case, first, check_isolation, isolates)
        if case.q_lengths in (EDGES, RAGGED) or others:
            add("repeatable", case, first, check_repeatable, repeats)
    for kind, names, check, quirk in (
        ("alike", _ALIKE, check_alike, None),
        ("frozen", _FROZEN, check_frozen, backward),
        ("layers", ("silu-layers",), check_layers, None),
    ):
        for case in sized((case for case in cases() if case.name in names), quirks):
            add(kind, case, first, check, quirk)
    return checks


def _check_core(listed: list[Case], quirks: Quirks) -> None:
    reasons = [left_out(case, quirks) for case in listed if case.core]
    assert None in reasons, f"every core case is refused ({reasons[0]}): such a run proves nothing"
