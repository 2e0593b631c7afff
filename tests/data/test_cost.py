"""The cost model: counted pairs, strict JSON, and a fit that finds planted coefficients."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction

import numpy as np
import pytest
from gem_data.cost import (
    Observation,
    batch_cost,
    check_cost,
    cost_from_dict,
    cost_to_dict,
    events_cost,
    fit_cost,
    fit_error,
    row_costs,
    term_counts,
)
from gem_data.interface import CostModel, CostTerm
from gem_data.least_squares import nnls
from gem_data.reference_balance import reference_pairs
from gem_data.testing import tiny_schema
from hypothesis import given, settings
from hypothesis import strategies as st

TERMS = (
    CostTerm(stream="views"),
    CostTerm(stream="views", pairs=True, extra=2),
    CostTerm(stream="buys", pairs=True, causal=False, window=3),
)


@settings(max_examples=100, deadline=None)
@given(st.booleans(), st.booleans(), st.integers(0, 6), st.integers(0, 3), st.lists(st.integers(0, 14), max_size=5))
def test_pairs_are_those_that_the_mask_lets_meet(pairs, causal, window, extra, lengths) -> None:
    term = CostTerm(stream="s", pairs=pairs, causal=causal, window=window, extra=extra)
    assert term_counts(term, np.array(lengths, np.int64)).tolist() == [reference_pairs(term, n) for n in lengths]


def test_the_worked_example() -> None:
    terms = (CostTerm(stream="s", coefficient=2.0), CostTerm(stream="s", pairs=True))
    model = CostModel(unit="events", per_step=100.0, per_sample=5.0, terms=terms)
    assert row_costs(model, {"s": np.array([3, 1])}, 2).tolist() == [17.0, 8.0]
    assert batch_cost(model, {"s": np.array([3, 1])}, 2) == 125.0


def observe(model: CostModel, *, count: int, noise: float, seed: int = 0) -> list[Observation]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        rows = int(rng.integers(2, 40))
        lengths = {name: rng.integers(0, int(rng.integers(2, 300)), rows) for name in ("views", "buys")}
        value = batch_cost(model, lengths, rows) * (1 + noise * rng.standard_normal())
        found.append(Observation(lengths=lengths, rows=rows, value=value))
    return found


def test_the_fit_finds_planted_coefficients() -> None:
    planted = CostModel(
        unit="seconds",
        per_step=3e-3,
        per_sample=1e-4,
        terms=tuple(
            CostTerm(**{**cost_to_dict(CostModel(unit="events", terms=(t,)))["terms"][0], "coefficient": c})
            for t, c in zip(TERMS, (2e-6, 5e-9, 0.0), strict=True)
        ),
    )
    exact, on_fit, held_out = fit_cost(TERMS, observe(planted, count=40, noise=0.0), unit="seconds")
    assert (on_fit.count, held_out.count) == (30, 10)
    assert held_out.worst < 1e-8
    assert exact.per_sample == pytest.approx(planted.per_sample, rel=1e-6)
    for came, wanted in zip(exact.terms, planted.terms, strict=True):
        assert came.coefficient == pytest.approx(wanted.coefficient, rel=1e-6, abs=1e-15)
    noisy, _, error = fit_cost(TERMS, observe(planted, count=80, noise=0.05), unit="seconds")
    assert 0.01 < error.mean < 0.08
    assert fit_error(noisy, observe(planted, count=40, noise=0.0, seed=9)).mean < 0.02


def test_nnls_is_that_of_scipy() -> None:
    scipy = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(1)
    for _ in range(100):
        a, b = rng.standard_normal((12, 5)), rng.standard_normal(12)
        wanted, residual = scipy.nnls(a, b)
        exact = nnls([[Fraction(v) for v in row] for row in a.tolist()], [Fraction(v) for v in b.tolist()])
        found = np.array([float(value) for value in exact])
        assert (found >= 0).all()
        assert float(np.linalg.norm(a @ found - b)) == pytest.approx(residual, rel=1e-8)
        np.testing.assert_allclose(found, wanted, atol=1e-8)


def test_a_fit_does_not_depend_on_the_last_bits_of_linear_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ between kinds of processors. Two terms that no observation tells apart: the first one has it all."""
    planted = CostModel(
        unit="seconds", per_step=3e-3, per_sample=1e-4, terms=(CostTerm(stream="views", coefficient=2e-6),)
    )
    observed = observe(planted, count=40, noise=0.05)
    terms = (*TERMS, CostTerm(stream="views", extra=1))
    first, _, _ = fit_cost(terms, observed, unit="seconds")
    solve, norm = np.linalg.lstsq, np.linalg.norm
    monkeypatch.setattr(np.linalg, "lstsq", lambda *a, **k: (solve(*a, **k)[0] * (1 + 2**-50), None, None, None))
    monkeypatch.setattr(np.linalg, "norm", lambda *a, **k: norm(*a, **k) * (1 + 2**-51))
    second, _, _ = fit_cost(terms, observed, unit="seconds")
    assert second == first


def test_a_cost_of_whole_numbers_is_found_as_such() -> None:
    """Also where two columns are multiples of one another, and one unknown is 0."""
    terms = (
        CostTerm(stream="views"),
        CostTerm(stream="buys", pairs=True),
        CostTerm(stream="buys", pairs=True, window=999),
    )
    planted = CostModel(
        unit="flops",
        per_step=4608.0,
        per_sample=64641.0,
        terms=tuple(dataclasses.replace(t, coefficient=c) for t, c in zip(terms, (7744.0, 224.0, 0.0), strict=True)),
    )
    found, on_fit, held_out = fit_cost(terms, observe(planted, count=40, noise=0.0), unit="flops")
    assert found == planted
    assert (on_fit.worst, held_out.worst) == (0.0, 0.0)


def test_too_few_or_impossible_measurements_are_refused() -> None:
    model = CostModel(unit="seconds", per_step=1.0)
    with pytest.raises(ValueError, match="at least 5 for the fit, came 3"):
        fit_cost(TERMS, observe(model, count=4, noise=0.0), unit="seconds")
    bad = [*observe(model, count=9, noise=0.0), Observation(lengths={}, rows=1, value=0.0)]
    with pytest.raises(ValueError, match="above 0"):
        fit_cost((), bad, unit="seconds")


def test_json_round_trip_and_what_is_refused() -> None:
    model = CostModel(unit="flops", per_sample=2.0, terms=TERMS)
    plain = json.loads(json.dumps(cost_to_dict(model)))
    assert cost_from_dict(plain, source="x.json") == model
    for change, message in (
        ({"unitt": 1}, "unknown key 'unitt'"),
        ({"per_step": "3"}, "per_step: expected float"),
        ({"terms": [{"stream": "views", "pair": True}]}, r"terms\[0\]: unknown key 'pair'"),
        ({"terms": [{}]}, "the key 'stream' is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            cost_from_dict({**plain, **change}, source="x.json")
    schema = tiny_schema()
    check_cost(events_cost(schema), schema)
    with pytest.raises(ValueError, match=r"expected a stream of \['views', 'buys'\], came 'clicks'"):
        check_cost(CostModel(unit="flops", terms=(CostTerm(stream="clicks"),)), schema)
    with pytest.raises(ValueError, match="coefficient: expected a finite number"):
        check_cost(CostModel(unit="flops", terms=(CostTerm(stream="views", coefficient=-1.0),)), schema)
    with pytest.raises(ValueError, match="expected 2 lengths of stream 'views'"):
        row_costs(model, {"views": np.array([1]), "buys": np.array([1, 2])}, 2)
