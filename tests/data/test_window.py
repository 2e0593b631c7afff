"""Windows: rows of several groups, their events copied once, against plain slicing and against one decoded table."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from gem_data import window as window_module
from gem_data.collate import Part, collate, take_batch, whole_batch
from gem_data.interface import IdFeature, LabelInfo, Schema, StreamInfo, TableInfo
from gem_data.rows import Events, Jagged, Rows, Where, decode
from gem_data.testing import batch_difference, tiny_schema, tiny_table
from gem_data.window import gather, join, limits_of
from hypothesis import given, settings
from hypothesis import strategies as st

WHERE = Where(file="test")
SCHEMA = Schema(
    name="window",
    created_by="test",
    tables=(TableInfo(name="t", rows=1 << 40),),
    labels=(LabelInfo(name="y"),),
    scalars=(IdFeature(name="a", table="t"),),
    lists=(IdFeature(name="l", table="t"),),
    streams=(StreamInfo(name="s", fields=(IdFeature(name="x", table="t"),), action_bits=1, max_length=9),),
)


def make_rows(lengths: list[tuple[int, int]], first: int) -> Rows:
    """Rows with so many values in the list and events in the stream; all numbers differ, and need more than 32 bits."""
    count = len(lengths)
    sizes = np.array(lengths, np.int64).reshape(count, 2)
    offsets = [np.concatenate([[0], np.cumsum(sizes[:, k])]) for k in range(2)]

    def numbers(kind: int, size: int) -> np.ndarray:
        return (1 << 35) + 1_000_000 * kind + first + np.arange(size) * (1 << 20 | 1)

    return Rows(
        keys=np.stack([numbers(kind, count) for kind in range(3)]),
        labels=np.ones((count, 1), np.float32),
        weights=np.ones((count, 1), np.float32),
        dense=np.zeros((count, 0), np.float32),
        scalars=numbers(3, count).reshape(1, count),
        lists=(Jagged(values=numbers(4, int(offsets[0][-1])), offsets=offsets[0]),),
        streams=(Events(columns=tuple(numbers(5 + k, int(offsets[1][-1])) for k in range(3)), offsets=offsets[1]),),
        origin=np.stack([np.full(count, first), np.zeros(count, np.int64), np.arange(count)], axis=1),
    )


def slices(groups: list[Rows], places: list[tuple[int, int]], limit: int) -> list[list[int]]:
    """[scalar, list, field, action, time] of the rows at (group, row), by plain slicing."""
    found: list[list[int]] = [[] for _ in range(5)]
    for group, row in places:
        rows = groups[group]
        found[0].append(int(rows.scalars[0, row]))
        found[1] += rows.lists[0].values[rows.lists[0].offsets[row] : rows.lists[0].offsets[row + 1]].tolist()
        for k, column in enumerate(rows.streams[0].columns):
            start, stop = rows.streams[0].offsets[row : row + 2]
            found[2 + k] += column[max(start, stop - limit) : stop].tolist()
    return found


ROW = st.tuples(st.integers(0, 3), st.integers(0, 6))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(ROW, min_size=1, max_size=8), min_size=1, max_size=4), st.data(), st.integers(0, 7))
def test_chosen_rows_are_slices(shape: list[list[tuple[int, int]]], data: st.DataObject, limit: int) -> None:
    groups = [make_rows(lengths, first=10_000 * number) for number, lengths in enumerate(shape)]
    places = [(group, row) for group, rows in enumerate(groups) for row in range(len(rows))]
    order = data.draw(st.permutations(range(len(places))))
    take = np.array(order[: data.draw(st.integers(0, len(order)))], np.int64)
    values, lengths = gather([join(SCHEMA, groups, [[limit]] * len(groups))], [take])
    wanted = slices(groups, [places[row] for row in take], limit)
    ends = [0, *np.cumsum(lengths.sum(axis=1)).tolist()]
    assert [values[a:b].tolist() for a, b in itertools.pairwise(ends)] == wanted
    values[:] = 0  # nobody else's memory
    assert slices(groups, [places[row] for row in take], limit) == wanted


def test_several_windows_make_one_batch() -> None:
    groups = [make_rows([(1, 3), (0, 1), (2, 0)], 0), make_rows([(3, 2)], 50), make_rows([(0, 1), (1, 4)], 70)]
    windows = [join(SCHEMA, groups[:2], [[9], [9]]), join(SCHEMA, groups[2:], [[2]])]
    batch = take_batch(SCHEMA, windows, [np.array([3, 0, 1]), np.array([1, 0])])
    rows = [(1, 0), (0, 0), (0, 1), (2, 1), (2, 0)]
    assert batch.row_index.tolist() == [groups[g].origin[r].tolist() for g, r in rows]
    assert batch.sample_ids.tolist() == [int(groups[g].keys[0, r]) for g, r in rows]
    assert batch.ids.lengths().tolist() == [1] * 5 + [3, 1, 0, 1, 0] + [2, 3, 1, 2, 1]
    first, second = slices(groups, rows[:3], 9), slices(groups, rows[3:], 2)
    # Column by column, rows of both windows in turn.
    assert batch.ids.values().tolist() == [*first[0], *second[0], *first[1], *second[1], *first[2], *second[2]]
    assert batch.streams["s"].actions.tolist() == first[3] + second[3]
    assert batch.streams["s"].times.tolist() == first[4] + second[4]


@pytest.mark.parametrize("reach", [16, 64, 1 << 30])
def test_long_buffers_are_entered_at_several_places(reach: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "_REACH", reach)
    groups = [make_rows([(3, 6), (1, 5), (2, 1), (0, 4), (3, 3)], 0), make_rows([(1, 2)], 90)]
    window = join(SCHEMA, groups, [[9], [9]])
    assert len(window.buffers) == 8 if reach > 64 else len(window.buffers) > 8
    values, _ = gather([window, window], [np.array([4, 2, 5]), np.array([0, 3])])
    wanted = slices(groups, [(0, 4), (0, 2), (1, 0), (0, 0), (0, 3)], 9)
    assert values.tolist() == [value for column in wanted for value in column]


def test_groups_joined_are_one_table_decoded_at_once() -> None:
    schema, table = tiny_schema(), tiny_table(rows=20, seed=0)
    groups = [decode(schema, table.slice(a, n), WHERE) for a, n in ((0, 7), (7, 0), (7, 13))]
    whole = decode(schema, table, WHERE)
    limits = limits_of(schema, 3)
    assert limits == [min(3, stream.max_length) for stream in schema.streams]
    take = np.random.default_rng(0).permutation(20)
    expected = collate(schema, [Part(rows=whole, take=take)], max_length=3)
    found = take_batch(schema, [join(schema, groups, [limits] * 3)], [take])
    origin = found.row_index
    assert batch_difference(dataclasses.replace(found, row_index=expected.row_index), expected) is None
    assert origin[:, 2].tolist() == [row if row < 7 else row - 7 for row in take.tolist()]


def test_whole_rows_are_the_rows_taken_in_order() -> None:
    streams = tuple(dataclasses.replace(stream, max_length=99) for stream in tiny_schema().streams)  # nothing is cut
    schema, table = dataclasses.replace(tiny_schema(), streams=streams), tiny_table(rows=20, seed=1)
    groups = [decode(schema, table.slice(a, n), WHERE, file_index=a) for a, n in ((0, 7), (7, 0), (7, 13))]
    parts = [Part(rows=rows, take=np.arange(len(rows))) for rows in groups]
    expected = collate(schema, parts, global_rows=31, step=4)
    assert batch_difference(whole_batch(schema, groups, global_rows=31, step=4), expected) is None
    nothing = whole_batch(schema, [groups[1]], global_rows=31, step=4)
    assert batch_difference(nothing, collate(schema, [parts[1]], global_rows=31, step=4)) is None
    assert nothing.labels.shape == (0, 2)
