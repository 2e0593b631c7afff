"""Strictly earlier events of a group, for every row at once.

A row's history may hold only what was known before its second, so events that share the row's time are left out, its
own included. Events are sorted by (group, time) once; a row's history is then one span of that order, found by two
binary searches on the key group * span + time. Sums over a span are differences of a prefix sum. No loop over rows.

Group 1 has events at times 10, 20, 20, 30: the row (group 1, time 20) owns the span of one event (time 10), a row at
time 21 owns three, with max_length 2 the latest two (20, 20).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gem_datasets.prepared import Floats, Ints, Ragged


@dataclass(frozen=True, kw_only=True)
class EventLog:
    """Events sorted by (group, time), stable. `order[p]` is the input index of the event at position p."""

    order: Ints
    key: Ints
    span: int
    first_time: int

    @staticmethod
    def of(group: Ints, time: Ints) -> EventLog:
        """Sort events; groups are >= 0, times in seconds, equal lengths (at least one event)."""
        first_time = int(time.min())
        span = int(time.max()) - first_time + 2
        assert int(group.min()) >= 0, "groups must be >= 0"
        assert (int(group.max()) + 1) * span < 2**63, "group * time span overflows int64"
        key = group.astype(np.int64) * span + (time - first_time)
        order = np.argsort(key, kind="stable")
        return EventLog(order=order, key=key[order], span=span, first_time=first_time)

    def earlier(self, group: Ints, time: Ints, *, max_length: int | None = None) -> Spans:
        """For each (group, time): the span of events of the group with an earlier time, the latest `max_length`."""
        base = group.astype(np.int64) * self.span
        start = np.searchsorted(self.key, base, side="left")
        stop = np.searchsorted(self.key, base + np.clip(time - self.first_time, 0, self.span - 1), side="left")
        if max_length is not None:
            start = np.maximum(start, stop - max_length)
        return Spans(log=self, start=start, stop=stop)


@dataclass(frozen=True, kw_only=True)
class Spans:
    """For each row the positions start[b]:stop[b] of an event log."""

    log: EventLog
    start: Ints
    stop: Ints

    def lengths(self) -> Ints:
        """Events in each span."""
        return self.stop - self.start

    def sum(self, values: npt.NDArray[np.generic]) -> Floats:
        """Sum of `values` (one per input event) over each span; exact for integers below 2^53."""
        prefix = np.zeros(len(values) + 1, dtype=np.float64)
        np.cumsum(values[self.log.order], out=prefix[1:], dtype=np.float64)
        return prefix[self.stop] - prefix[self.start]

    def index(self) -> Ragged:
        """Input indices of the events of each span, oldest first."""
        lengths = self.lengths()
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        positions = np.arange(offsets[-1]) + np.repeat(self.start - offsets[:-1], lengths)
        return Ragged(values=self.log.order[positions], offsets=offsets)


def smoothed_rate(spans: Spans, positive: npt.NDArray[np.generic], *, prior: Floats, strength: float) -> Floats:
    """(positives + strength * prior) / (events + strength) over each span: 3 of 4 at prior 0.5, strength 6 is 0.6."""
    return (spans.sum(positive) + strength * prior) / (spans.lengths() + strength)
