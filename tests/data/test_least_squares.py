"""Exact least squares: what optimality demands, a plain implementation in fractions, and the time it may take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from gem_data.least_squares import nnls

Problem = tuple[list[list[Fraction]], list[Fraction]]


def plain_nnls(matrix: Sequence[Sequence[Fraction]], target: Sequence[Fraction]) -> list[Fraction]:
    """The same method with a fraction for every number, as it is written in the book."""
    count = len(matrix[0])
    columns = list(zip(*matrix, strict=True))
    gram = [[plain_dot(left, right) for right in columns] for left in columns]
    aim = [plain_dot(column, target) for column in columns]
    x, active = [Fraction(0)] * count, list[int]()
    while True:
        # How much the squared error falls along each unknown alone: what no scale of a column changes.
        slopes = [goal - plain_dot(row, x) for goal, row in zip(aim, gram, strict=True)]
        falls = [s * s / gram[j][j] if s > 0 and j not in active else Fraction(0) for j, s in enumerate(slopes)]
        best = max(falls, default=Fraction(0))
        if best == 0:
            return x
        active = sorted([*active, falls.index(best)])
        while True:
            solved = plain_solve([[gram[i][j] for j in active] for i in active], [aim[i] for i in active])
            step = [Fraction(0)] * count
            for j, value in zip(active, solved, strict=True):
                step[j] = value
            falling = [j for j in active if step[j] <= 0]
            if not falling:
                x = step
                break
            # Go as far as the first unknown that would turn negative, and take it out.
            share = min(x[j] / (x[j] - step[j]) if x[j] else Fraction(0) for j in falling)
            x = [now + share * (then - now) for now, then in zip(x, step, strict=True)]
            active = [j for j in active if x[j] > 0]


def plain_dot(left: Sequence[Fraction], right: Sequence[Fraction]) -> Fraction:
    return sum((a * b for a, b in zip(left, right, strict=True)), Fraction(0))


def plain_solve(matrix: list[list[Fraction]], target: list[Fraction]) -> list[Fraction]:
    """x of matrix x = target, by elimination. It is positive definite: a column that others span has no slope."""
    rows = [[*row, value] for row, value in zip(matrix, target, strict=True)]
    for j, pivot in enumerate(rows):
        pivot[:] = [value / pivot[j] for value in pivot]
        for row in rows[:j] + rows[j + 1 :]:
            if row[j]:
                row[:] = [value - row[j] * own for value, own in zip(row, pivot, strict=True)]
    return [row[-1] for row in rows]


def problem(rng: np.random.Generator, kind: str) -> Problem:
    """Small whole numbers make columns that span one another, and unknowns that tie; weights make all sizes."""
    rows, count = int(rng.integers(1, 14)), int(rng.integers(1, 7))
    if kind == "normal":
        matrix, target = rng.standard_normal((rows, count)), rng.standard_normal(rows)
    else:
        matrix, target = rng.integers(-3, 4, (rows, count)), rng.integers(-3, 4, rows)
    weights = [Fraction(1)] * rows
    if kind == "weighted":
        weights = [Fraction(int(w), int(v)) for w, v in rng.integers(1, 10, (rows, 2)) ** 5]
    return (
        [[Fraction(v) * w for v in row] for row, w in zip(matrix.tolist(), weights, strict=True)],
        [Fraction(v) * w for v, w in zip(target.tolist(), weights, strict=True)],
    )


@pytest.mark.parametrize("kind", ["normal", "whole", "weighted"])
def test_it_is_optimal_and_that_of_plain_fractions(kind: str) -> None:
    rng = np.random.default_rng(3)
    zeros = 0
    for _ in range(80):
        matrix, target = problem(rng, kind)
        x = nnls(matrix, target)
        # Karush, Kuhn and Tucker: these, and nothing else, make it the minimum.
        misses = [plain_dot(row, x) - goal for row, goal in zip(matrix, target, strict=True)]
        for value, column in zip(x, zip(*matrix, strict=True), strict=True):
            slope = plain_dot(column, misses)
            assert value >= 0
            assert slope == 0 if value > 0 else slope >= 0
        assert x == plain_nnls(matrix, target)
        zeros += x.count(Fraction(0))
    assert zeros > 80


def test_unknowns_are_taken_out_again() -> None:
    """The one along which the error falls most is 0 in the end; without the bound it would be -1."""
    columns = [(9, 9, 1), (9, 0, 0), (0, 9, 0)]
    matrix = [[Fraction(v) for v in row] for row in zip(*columns, strict=True)]
    assert nnls(matrix, [Fraction(9), Fraction(9), Fraction(-1)]) == [0, 1, 1]


def test_thirty_unknowns_are_found_in_time() -> None:
    """Every rank fits at every start; with a division of fractions for every number this took above 10 s."""
    rng = np.random.default_rng(0)
    counts, planted = rng.integers(0, 2**20, (240, 30)), rng.integers(1, 1000, 30)
    values = (counts @ planted).tolist()
    weights = [Fraction(1 / value) for value in values]
    matrix = [[count * weight for count in row] for row, weight in zip(counts.tolist(), weights, strict=True)]
    target = [value * weight for value, weight in zip(values, weights, strict=True)]
    began = time.process_time()
    found = nnls(matrix, target)
    assert time.process_time() - began < 2.0
    assert found == planted.tolist()
