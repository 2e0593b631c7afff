"""The largest differencing method: the groups of its definition in lists, and no garbage that stops the process."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
from gem_data.api import partition
from gem_data.simulate import long_tailed_loads
from hypothesis import given, settings
from hypothesis import strategies as st


def by_definition(loads: list[float], parts: int, counts: str) -> list[list[int]]:
    """Karmarkar and Karp with lists of rows: merge the two widest states until one is left; -1 fills the last tuple."""
    order = sorted(range(len(loads)), key=lambda row: -loads[row])
    step = parts if counts == "equal" else 1
    order += [-1] * (-len(order) % step)
    states = []
    for number, start in enumerate(range(0, len(order), step)):
        groups = [[row] for row in order[start : start + step]] + [[] for _ in range(parts - step)]
        sums = [sum(loads[row] for row in group if row >= 0) for group in groups]
        states.append((max(sums) - min(sums), number, sums, groups))
    created = len(states)
    while len(states) > 1:
        states.sort(key=lambda state: (-state[0], state[1]))
        (_, _, a, a_rows), (_, _, b, b_rows), *states = states
        heavy, light = sorted(range(parts), key=lambda p: -a[p]), sorted(range(parts), key=lambda p: b[p])
        sums = [a[i] + b[j] for i, j in zip(heavy, light, strict=True)]
        groups = [a_rows[i] + b_rows[j] for i, j in zip(heavy, light, strict=True)]
        states.append((max(sums) - min(sums), created, sums, groups))
        created += 1
    groups = [sorted(row for row in group if row >= 0) for group in (states[0][3] if states else [[]] * parts)]
    if counts == "free":
        return groups
    wanted = [(part + 1) * len(loads) // parts - part * len(loads) // parts for part in range(parts)]
    places = sorted(range(parts), key=lambda part: -wanted[part])
    by_size = sorted(groups, key=lambda group: -len(group))
    return [group for _, group in sorted(zip(places, by_size, strict=True))]


LOADS = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5, 1e9]) | st.floats(0, 1e6), max_size=40)


@settings(max_examples=100, deadline=None)
@given(LOADS, st.integers(1, 7), st.sampled_from(["equal", "free"]))
def test_groups_are_those_of_the_definition(loads: list[float], parts: int, counts: str) -> None:
    """With free counts by their sums: which of two equally heavy groups a row joins is open."""
    found = partition(loads, parts, method="kk", counts=counts)
    if counts == "equal":
        wanted = by_definition(loads, parts, counts)
        assert [part.tolist() for part in found] == [sorted(group) for group in wanted]
    else:
        wanted = by_definition([load for load in loads if load], parts, counts)
        weighing = [load for load in loads if load]
        sums = sorted(math.fsum(weighing[row] for row in group) for group in wanted)
        assert sorted(math.fsum(loads[row] for row in part) for part in found) == pytest.approx(sums, rel=1e-9)
        assert sorted(row for part in found for row in part.tolist()) == list(range(len(loads)))


@pytest.mark.parametrize("method", ["lpt", "kk"])
def test_a_call_sets_off_no_collection_of_garbage(method: str) -> None:
    """64 parts of 256 rows. A full collection costs 0.2 s where torch is loaded, ten times the call."""
    loads = long_tailed_loads(64 * 256, seed=3)
    started: list[int] = []

    def note(phase: str, facts: dict[str, int]) -> None:
        if phase == "start":
            started.append(facts["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        found = partition(loads, 64, method=method)
    finally:
        gc.callbacks.remove(note)
    assert np.array_equal(np.sort(np.concatenate(found)), np.arange(len(loads)))
    assert len(started) <= 1, started
