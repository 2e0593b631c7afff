"""Counting around any collectives: calls and bytes sent, by axis and kind, exact.

Bytes follow traffic.py. The ledger is the caller's, so that one of them counts all axes, and a test or a benchmark can
ask for the difference between two moments.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gem_comm.interface import Call, Collectives, Pending
from gem_comm.traffic import call_bytes


@dataclass(kw_only=True)
class Traffic:
    """Counts of this rank: (axis, kind) -> calls, and bytes sent. Groups of one rank send nothing and count calls."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, axis: str, kind: str, sent: int) -> None:
        self.calls[axis, kind] += 1
        self.sent[axis, kind] += sent

    def by_axis(self) -> dict[str, int]:
        """Bytes sent over each axis."""
        totals: Counter[str] = Counter()
        for (axis, _), count in self.sent.items():
            totals[axis] += count
        return dict(totals)

    def clear(self) -> None:
        """Start again from zero."""
        self.calls.clear()
        self.sent.clear()


class CountedCollectives(Collectives):
    """`inner`, counted into `traffic`."""

    def __init__(self, inner: Collectives, traffic: Traffic) -> None:
        self.axis, self.ranks, self.rank, self.size = inner.axis, inner.ranks, inner.rank, inner.size
        self._inner, self._traffic = inner, traffic

    def launch(self, call: Call) -> Pending:
        pending = self._inner.launch(call)
        self._traffic.add(self.axis, call.kind, call_bytes(call, size=self.size, rank=self.rank))
        return pending
