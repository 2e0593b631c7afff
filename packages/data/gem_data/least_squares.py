"""Non-negative least squares without rounding: the active-set method of Lawson and Hanson (1974, chapter 23).

In exact numbers, because libraries of linear algebra round differently on each kind of processor, and a cost decides
the order of rows and stands in loader states: the same observations must give the same coefficients to the last bit on
all hosts of a job and after it has moved. Without rounding there is no tolerance either, and what is a polynomial of
whole numbers is found as such.

    columns (1, 0), (1, 1), target (2, -1): unconstrained x = (3, -1), so the second unknown is 0, and x = (2, 0)

Fractions would search a common divisor at every operation. All numbers are therefore brought to one denominator, which
drops out of the normal equations, and are whole from there: the equations are eliminated as Bareiss (1968) does, where
every division is exact and no number grows beyond a minor of the matrix, in the half of it that symmetry leaves; a
solution is whole numbers over one denominator.

Cost: an unknown more is one more elimination; 30 unknowns and 240 observations take half a second on one core.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from operator import mul


def nnls(matrix: Sequence[Sequence[Fraction]], target: Sequence[Fraction]) -> list[Fraction]:
    """argmin |matrix x - target| over x >= 0, exactly.

    >>> matrix = [[Fraction(1), Fraction(1)], [Fraction(0), Fraction(1)]]
    >>> nnls(matrix, [Fraction(2), Fraction(-1)]) == [2, 0]
    True
    """
    gram, aim = _normal_equations(matrix, target)
    count = len(aim)
    x, below, active = [0] * count, 1, list[int]()  # the solution is x / below
    while True:
        slopes = [goal * below - sum(map(mul, row, x)) for goal, row in zip(aim, gram, strict=True)]
        entering = _steepest(slopes, gram, active)
        if entering is None:
            return [Fraction(value, below) for value in x]
        active.append(entering)
        while True:
            step = [0] * count
            solved, step_below = _solve([[gram[i][j] for j in active] for i in active], [aim[i] for i in active])
            for j, value in zip(active, solved, strict=True):
                step[j] = value
            falling = [j for j in active if step[j] <= 0]
            if not falling:
                x, below = step, step_below
                break
            # Go as far as the first unknown that would turn negative, and take it out.
            now, then = [value * step_below for value in x], [value * below for value in step]
            share = min(Fraction(now[j], now[j] - then[j]) if now[j] else Fraction(0) for j in falling)
            here, there = share.denominator - share.numerator, share.numerator
            x, below = _reduced(
                [here * a + there * b for a, b in zip(now, then, strict=True)], below * step_below * share.denominator
            )
            active = [j for j in active if x[j] > 0]


def _normal_equations(
    matrix: Sequence[Sequence[Fraction]], target: Sequence[Fraction]
) -> tuple[list[list[int]], list[int]]:
    """Products of all columns with one another and with the target, times the square of one common denominator."""
    common = lcm(*(value.denominator for row in matrix for value in row), *(value.denominator for value in target))
    columns = [[_whole(value, common) for value in column] for column in zip(*matrix, strict=True)]
    goal = [_whole(value, common) for value in target]
    gram = [[sum(map(mul, left, right)) for right in columns[: number + 1]] for number, left in enumerate(columns)]
    square = [[gram[max(i, j)][min(i, j)] for j in range(len(columns))] for i in range(len(columns))]
    return square, [sum(map(mul, column, goal)) for column in columns]


def _whole(value: Fraction, common: int) -> int:
    return value.numerator * (common // value.denominator)


def _steepest(slopes: Sequence[int], gram: Sequence[Sequence[int]], active: Sequence[int]) -> int | None:
    """The unknown along which alone the squared error falls most, s * s / gram[j][j], which no scale of a column
    changes; the first of those alike; None where it falls along none.
    """
    best: int | None = None
    for j, slope in enumerate(slopes):
        if slope <= 0 or j in active:
            continue
        if best is None or slope * slope * gram[best][best] > slopes[best] * slopes[best] * gram[j][j]:
            best = j
    return best


def _solve(matrix: list[list[int]], target: list[int]) -> tuple[list[int], int]:
    """x and a denominator above 0: matrix (x / denominator) = target. The matrix is symmetric and positive definite: a
    column that others span has no slope.
    """
    count = len(target)
    rows = [[*row[i:], value] for i, (row, value) in enumerate(zip(matrix, target, strict=True))]  # from the diagonal
    before = 1
    for k, row in enumerate(rows):
        pivot = row[0]
        for i in range(k + 1, count):
            factor = row[i - k]  # of column i, which symmetry makes that of row i
            own, tail = rows[i], row[i - k :]
            rows[i] = [(pivot * a - factor * b) // before for a, b in zip(own, tail, strict=True)]
        before = pivot
    x = [0] * count
    for i in range(count - 1, -1, -1):
        row = rows[i]
        x[i] = (before * row[-1] - sum(map(mul, row[1:-1], x[i + 1 :]))) // row[0]
    return x, before


def _reduced(values: Sequence[int], below: int) -> tuple[list[int], int]:
    shared = gcd(below, *values)
    return [value // shared for value in values], below // shared
