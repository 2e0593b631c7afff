"""The load of rows: evaluating a `CostModel`, and fitting one to measurements.

Step time of a sequence model is a sum of parts that grow with rows, with tokens and with the pairs that attention lets
meet, so it is linear in its coefficients, and least squares finds them. They are kept non-negative (a negative price of
a token is noise, and would make long rows look cheap), and each measurement counts by its relative error, so that small
batches matter as much as large ones. Fitted numbers hold for one model on one device; `CostModel` is data, so that they
can as well be written by hand or derived from counted FLOPs.

    lengths [3, 1], terms 2.0 per token and 1.0 per causal pair, 5.0 a sample: loads 5 + 6 + 6 = 17 and 5 + 2 + 1 = 8

A row that is a request is loaded with all its impressions: what each adds (its candidate's tokens and pairs, the part
of the model that it alone computes) stands beside what its history costs once.

The squares are minimized without rounding (least_squares.py), so the same observations give the same coefficients to
the last bit on all hosts.

Cost: numpy over the rows; a fit of 10 unknowns to 80 observations takes about a hundredth of a second, of 30 to 240
half a second, on one core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from gem_data.interface import CostModel, CostTerm, Schema
from gem_data.least_squares import nnls
from gem_data.rows import Int64, Rows

Float64 = npt.NDArray[np.float64]

UNITS = ("seconds", "flops", "bytes", "events")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measured batch: stream -> events of each row, the number of rows, and what was measured.

    impressions  of each row, where rows are requests; None: one each
    """

    lengths: Mapping[str, Int64]
    rows: int
    value: float
    impressions: Int64 | None = None


@dataclass(frozen=True, kw_only=True)
class FitError:
    """Relative errors |predicted - measured| / measured over some batches."""

    count: int
    mean: float
    worst: float


def events_cost(schema: Schema) -> CostModel:
    """The load that is a row's number of events over all streams."""
    return CostModel(unit="events", terms=tuple(CostTerm(stream=stream.name) for stream in schema.streams))


def term_counts(term: CostTerm, lengths: Int64, impressions: Int64 | None = None) -> Float64:
    """Tokens or pairs of every row for one term, without its coefficient. impressions: of each row; None: one.

    >>> term_counts(CostTerm(stream="s", pairs=True, window=2), np.array([3, 0, 1])).tolist()
    [5.0, 0.0, 1.0]
    >>> term_counts(CostTerm(stream="s", pairs=True, extra=1, targets=1), np.array([3]), np.array([3])).tolist()
    [18.0]
    """
    counts = _first_counts(term, lengths)
    if impressions is None:
        return counts
    if term.repeated:
        return counts * impressions
    t = np.asarray(lengths, dtype=np.float64) + term.extra
    seen = (np.minimum(t, term.window) if term.window else t) if term.pairs else np.ones(len(t))
    more: Float64 = counts + term.targets * (impressions - 1) * seen
    return more


def _first_counts(term: CostTerm, lengths: Int64) -> Float64:
    """With the one impression that a row has at least."""
    t = np.asarray(lengths, dtype=np.float64) + term.extra
    if not term.pairs:
        return t
    w = float(term.window)
    if term.causal:
        inside = t * (t + 1) / 2
        return np.where(t <= w, inside, w * (w + 1) / 2 + (t - w) * w) if w else inside
    # Within +-w: every token sees 2 w + 1, but for the w (w + 1) pairs that would lie beyond the two ends.
    return np.where(t <= w, t * t, t * (2 * w + 1) - w * (w + 1)) if w else t * t


def row_costs(model: CostModel, lengths: Mapping[str, Int64], rows: int, impressions: Int64 | None = None) -> Float64:
    """(rows,) load of every row. `lengths`: stream -> events of each row, as they are trained (after cutting).

    impressions  (rows,) of each row, where rows are requests

    Raises ValueError where a stream of the model has no lengths, or not one per row.
    """
    total = np.full(rows, model.per_sample)
    if impressions is not None:
        total += model.per_impression * (impressions - 1)
    for term in model.terms:
        if term.stream not in lengths or len(lengths[term.stream]) != rows:
            raise ValueError(
                f"cost model: expected {rows} lengths of stream {term.stream!r}, came lengths of "
                f"{ {name: len(value) for name, value in lengths.items()} }. Use a model made for this data."
            )
        total += term.coefficient * term_counts(term, lengths[term.stream], impressions)
    return total


def batch_cost(model: CostModel, lengths: Mapping[str, Int64], rows: int, impressions: Int64 | None = None) -> float:
    """What the model predicts for a batch: per_step and the loads of its rows."""
    return model.per_step + float(row_costs(model, lengths, rows, impressions).sum())


def loads_of(
    schema: Schema,
    rows: Rows,
    model: CostModel,
    *,
    max_length: int | None,
    drawn: tuple[Int64, ...] | None = None,
) -> Float64:
    """(R,) load of decoded rows, with their streams cut as the loader cuts them. drawn: limits by stream and row."""
    limits = {s.name: s.max_length if max_length is None else min(s.max_length, max_length) for s in schema.streams}
    lengths = {
        stream.name: np.minimum(np.diff(events.offsets), limits[stream.name])
        for stream, events in zip(schema.streams, rows.streams, strict=True)
    }
    if drawn is not None:
        for stream, most in zip(schema.streams, drawn, strict=True):
            lengths[stream.name] = np.minimum(lengths[stream.name], most)
    return row_costs(model, lengths, len(rows), None if rows.bounds is None else np.diff(rows.bounds))


def check_cost(model: CostModel, schema: Schema) -> None:
    """Raise ValueError unless the model's streams exist and its numbers are finite and not negative."""
    names = [stream.name for stream in schema.streams]
    if model.unit not in UNITS:
        raise ValueError(f"cost model: unit: expected one of {', '.join(UNITS)}, came {model.unit!r}")
    for name in ("per_step", "per_sample", "per_impression"):
        value = getattr(model, name)
        _check_number(name, value)
    for number, term in enumerate(model.terms):
        if term.stream not in names:
            raise ValueError(f"cost model: terms[{number}]: expected a stream of {names}, came {term.stream!r}")
        _check_number(f"terms[{number}].coefficient", term.coefficient)
        for field, value in {"window": term.window, "extra": term.extra, "targets": term.targets}.items():
            if value < 0:
                raise ValueError(f"cost model: terms[{number}].{field}: expected at least 0, came {value}")


def cost_to_dict(model: CostModel) -> dict[str, Any]:
    """The JSON form; `cost_from_dict` reads it back. What concerns requests is left out where it says nothing."""
    plain = {**dataclasses.asdict(model), "terms": [_said(term, ("targets", "repeated")) for term in model.terms]}
    if not model.per_impression:
        del plain["per_impression"]
    return plain


def _said(term: CostTerm, optional: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(term).items() if value or name not in optional}


def cost_from_dict(value: Mapping[str, Any], *, source: str) -> CostModel:
    """Strict: unknown keys and wrong types are ValueErrors that name `source`."""
    content = dict(_fields(value, CostModel, source, "cost model"))
    terms = content.get("terms", [])
    if not isinstance(terms, (list, tuple)):
        raise ValueError(f"{source}: cost model: terms: expected a list, came {terms!r:.60}")
    content["terms"] = tuple(
        CostTerm(**_fields(term, CostTerm, source, f"terms[{number}]")) for number, term in enumerate(terms)
    )
    return CostModel(**content)


def fit_cost(
    terms: Sequence[CostTerm], observations: Sequence[Observation], *, unit: str, held_out: int = 4
) -> tuple[CostModel, FitError, FitError]:
    """The model of these terms that predicts the observations best, its error on them, and on those held out.

    Every `held_out`-th observation takes no part in the fit (0: all take part, and the second error has count 0).
    Raises ValueError for fewer measurements than unknowns, or one that is not positive.
    """
    kept = [o for number, o in enumerate(observations) if not held_out or number % held_out != held_out - 1]
    rest = [o for number, o in enumerate(observations) if held_out and number % held_out == held_out - 1]
    requests = any(o.impressions is not None for o in observations)
    unknowns = len(terms) + 2 + requests
    if len(kept) < unknowns:
        raise ValueError(f"observations: expected at least {unknowns} for the fit, came {len(kept)}")
    values = np.array([o.value for o in kept])
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError("observations: expected values above 0, came others: measure again")
    weights = [Fraction(float(1 / value)) for value in values]  # of relative errors
    matrix = [
        [Fraction(count) * weight for count in _unknowns(terms, o, requests)]
        for o, weight in zip(kept, weights, strict=True)
    ]
    found = nnls(matrix, [Fraction(o.value) * weight for o, weight in zip(kept, weights, strict=True)])
    model = CostModel(
        unit=unit,
        per_step=float(found[0]),
        per_sample=float(found[1]),
        terms=tuple(
            dataclasses.replace(term, coefficient=float(c))
            for term, c in zip(terms, found[2 : 2 + len(terms)], strict=True)
        ),
        per_impression=float(found[-1]) if requests else 0.0,
    )
    return model, fit_error(model, kept), fit_error(model, rest)


def _unknowns(terms: Sequence[CostTerm], o: Observation, requests: bool) -> list[float]:
    """What one observation counts of each unknown; the last one is of further impressions, where there are requests."""
    counted = [float(term_counts(term, o.lengths[term.stream], o.impressions).sum()) for term in terms]
    further = 0 if o.impressions is None else int(o.impressions.sum()) - o.rows
    return [1.0, float(o.rows), *counted, *([float(further)] if requests else [])]


def fit_error(model: CostModel, observations: Sequence[Observation]) -> FitError:
    """Relative errors of the model on measured batches."""
    errors = [abs(batch_cost(model, o.lengths, o.rows, o.impressions) - o.value) / o.value for o in observations]
    return FitError(count=len(errors), mean=float(np.mean(errors)) if errors else 0.0, worst=max(errors, default=0.0))


def _check_number(name: str, value: float) -> None:
    if not (np.isfinite(value) and value >= 0):
        raise ValueError(f"cost model: {name}: expected a finite number >= 0, came {value}")


def _fields(value: Any, cls: type, source: str, place: str) -> dict[str, Any]:
    known = {field.name: field for field in dataclasses.fields(cls)}
    if not isinstance(value, Mapping):
        raise ValueError(f"{source}: {place}: expected an object, came {value!r:.60}")
    for key, came in value.items():
        if key not in known:
            raise ValueError(f"{source}: {place}: unknown key {key!r} (known: {', '.join(known)})")
        kind = str(known[key].type)
        fits = {
            "float": isinstance(came, (int, float)) and not isinstance(came, bool),
            "int": type(came) is int,
            "bool": type(came) is bool,
            "str": isinstance(came, str),
        }.get(kind, True)
        if not fits:
            raise ValueError(f"{source}: {place}: {key}: expected {kind}, came {came!r:.60}")
    for key, field in known.items():
        if field.default is dataclasses.MISSING and key not in value:
            raise ValueError(f"{source}: {place}: the key {key!r} is missing")
    return dict(value)
