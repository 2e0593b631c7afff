from __future__ import annotations

import numpy as np
import pytest
from gem_datasets.history import EventLog, smoothed_rate
from hypothesis import given, settings
from hypothesis import strategies as st


def test_the_worked_example():
    log = EventLog.of(np.array([1, 1, 1, 1]), np.array([30, 20, 10, 20]))
    group, time = np.array([1, 1, 0, 1]), np.array([20, 21, 99, 99])
    index = log.earlier(group, time).index()
    assert index.offsets.tolist() == [0, 1, 4, 4, 8]
    assert index.values.tolist() == [2, 2, 1, 3, 2, 1, 3, 0]  # equal times keep their order
    latest = log.earlier(group, time, max_length=2).index()
    assert latest.offsets.tolist() == [0, 1, 3, 3, 5]
    assert latest.values.tolist() == [2, 1, 3, 3, 0]


events = st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5), st.integers(0, 9)), min_size=1, max_size=30)
queries = st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), min_size=1, max_size=10)


@settings(max_examples=60, deadline=None)
@given(events=events, queries=queries, max_length=st.one_of(st.none(), st.integers(1, 4)))
def test_spans_are_the_strictly_earlier_events_of_the_group(events, queries, max_length):
    group, time, value = np.array(events).T
    spans = EventLog.of(group, time).earlier(*np.array(queries).T, max_length=max_length)
    index = spans.index()
    ordered = sorted(range(len(events)), key=lambda i: time[i])  # stable
    for row, (g, t) in enumerate(queries):
        expected = [i for i in ordered if group[i] == g and time[i] < t]
        expected = expected if max_length is None else expected[-max_length:]
        assert index.values[index.offsets[row] : index.offsets[row + 1]].tolist() == expected
        assert spans.lengths()[row] == len(expected)
        assert spans.sum(value)[row] == sum(value[i] for i in expected)


def test_smoothed_rate_by_hand():
    log = EventLog.of(np.zeros(4, dtype=np.int64), np.arange(4))
    spans = log.earlier(np.array([0, 0]), np.array([4, 0]))
    rate = smoothed_rate(spans, np.array([1, 1, 0, 1]), prior=np.array([0.5, 0.25]), strength=6.0)
    assert rate == pytest.approx([0.6, 0.25])
