"""The rule by which a figure has moved, and the table that says so. Pure: plain numbers in, verdicts out.

A figure is a cost: larger is worse. With base b, head h and limit r > 1:

    regressed   h > b * r          improved   h < b / r          same   otherwise
    new         no base            gone       no head: a case or counter that vanished fails as a regression does,
                                              since a figure that is not taken cannot regress
    added       no base, of a case that has other figures in the record: fails, since nobody has seen what it costs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["regressed", "improved", "same", "new", "gone", "added"]
FAILING = ("regressed", "gone", "added")


@dataclass(frozen=True, kw_only=True)
class Move:
    """What became of one figure. key: "<case>/<counter>" or "<case>"; limit: the ratio allowed."""

    key: str
    base: float | None
    head: float | None
    limit: float
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """head / base; infinite from nothing to something, 1 for nothing on both sides."""
        if self.base is None or self.head is None:
            return math.nan
        if self.base == 0:
            return 1.0 if self.head == 0 else math.inf
        return self.head / self.base


def judge(base: float | None, head: float | None, limit: float) -> Verdict:
    """The rule above, for one figure."""
    if not (math.isfinite(limit) and limit > 1):
        raise ValueError(f"a limit is a finite ratio above 1, got {limit}")
    for value in (base, head):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"a figure is a finite number, got {value}: it was not measured")
    if base is None:
        return "new"
    if head is None:
        return "gone"
    if head > base * limit:
        return "regressed"
    return "improved" if head < base / limit else "same"


def compare(base: Mapping[str, float], head: Mapping[str, float], limit_of: Callable[[str], float]) -> list[Move]:
    """Every figure of either side, in the order of head, what has gone at the end."""
    keys = [*head, *(key for key in base if key not in head)]
    moves = []
    for key in keys:
        b, h, limit = base.get(key), head.get(key), limit_of(key)
        try:
            moves.append(Move(key=key, base=b, head=h, limit=limit, verdict=judge(b, h, limit)))
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return moves


def failed(moves: list[Move]) -> bool:
    """Whether the gate must fail."""
    return any(move.verdict in FAILING for move in moves)


def table(moves: list[Move], *, unit: Callable[[float], str], show_same: bool = False) -> str:
    """One line per figure that moved (with show_same: per figure), worst first, under a heading; "" for none."""
    shown = [move for move in moves if show_same or move.verdict != "same"]
    if not shown:
        return ""
    order = ("regressed", "gone", "added", "new", "improved", "same")
    shown.sort(key=lambda move: (order.index(move.verdict), -move.ratio if move.ratio == move.ratio else 0))
    width = max(len(move.key) for move in shown)
    lines = [f"{'verdict':<10} {'case':<{width}} {'base':>14} {'head':>14} {'ratio':>7} {'limit':>7}"]
    for move in shown:
        base, head = ("-" if value is None else unit(value) for value in (move.base, move.head))
        ratio = "-" if math.isnan(move.ratio) else f"{move.ratio:.3f}"
        lines.append(f"{move.verdict:<10} {move.key:<{width}} {base:>14} {head:>14} {ratio:>7} {move.limit:>7.3f}")
    return "\n".join(lines)


def summary(moves: list[Move]) -> str:
    """How many of each verdict, e.g. "2 regressed, 31 same"."""
    counts = {verdict: sum(move.verdict == verdict for move in moves) for verdict in Verdict.__args__}  # type: ignore[attr-defined]
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "nothing to compare"
