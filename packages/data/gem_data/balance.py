"""Who gets which rows, so that everyone's work is alike: pure functions of loads, no file, no tensor, no processes.

A step takes as long as its slowest rank. Three tools, by what they cost:

    base_batch_order   inside one rank's own reading order, nothing is sent: base batches (128 rows, say) are sorted by
                       load and the heaviest are put with the lightest. Meta reports about 90 % of the optimum
    partition          over all ranks of one global batch: close to perfect, but the rows must be sent
    budget_batches     cuts rows at hand into parts of at most so much load, which bounds memory; the job cuts a rank's
                       batch so into micro-batches. The loader makes no batches of a budget: its batches are of
                       global_batch_size rows, and which rows make a step does not follow from loads

The first two keep every row once an epoch; the third cuts where it must. All are deterministic: equal loads are taken
in order, and the only randomness is a permutation by a key (batching.permutation), so that a resumed run repeats them.

partition with "lpt" gives each row, heaviest first, to the least loaded part (Graham 1969); with "kk" it is the
largest differencing method (Karmarkar and Karp 1982), for equal counts in its balanced form (tuples of one row per
part). LPT is O(n log n) and on long-tailed lengths as good; it is the default.

Cost: LPT takes about 1 microsecond a row, "kk" with equal counts half of that, with free ones about 5; base_batch_order
a sort of base batches per window.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gem_data.batching import permutation
from gem_data.rows import Int64

Float64 = npt.NDArray[np.float64]

METHODS = ("lpt", "kk")
COUNTS = ("equal", "free")


def imbalance(loads: Sequence[float] | Float64) -> float:
    """Max over mean: 1 is perfect, W is everything on one of W. 1 where there is no load at all.

    >>> imbalance([3.0, 1.0])
    1.5
    """
    values = np.asarray(loads, dtype=np.float64)
    mean = float(values.mean()) if values.size else 0.0
    return float(values.max()) / mean if mean > 0 else 1.0


def partition(
    loads: Sequence[float] | Float64, parts: int, *, method: str = "lpt", counts: str = "equal"
) -> tuple[Int64, ...]:
    """Rows of every part, each in rising order, so that the parts' sums of `loads` are alike.

    counts  "equal": part p gets (p + 1) n // parts - p n // parts rows, as many as a plain cut would give; "free": any,
            and rows without load, which no sum tells where to put, go where the fewest rows are

    >>> [part.tolist() for part in partition([9.0, 1.0, 5.0, 5.0], 2)]
    [[0, 1], [2, 3]]

    Raises ValueError for an unknown method, parts < 1, or loads that are negative or not finite.
    """
    if method not in METHODS or counts not in COUNTS:
        raise ValueError(f"expected method of {METHODS} and counts of {COUNTS}, came {method!r} and {counts!r}")
    if parts < 1:
        raise ValueError(f"parts: expected at least 1, came {parts}")
    values = np.asarray(loads, dtype=np.float64)
    if values.size and not (np.isfinite(values).all() and values.min() >= 0):
        raise ValueError("loads: expected finite numbers >= 0")
    divide = _karmarkar_karp if method == "kk" else _lpt
    if counts == "equal":
        rows = divide(values, parts, counts)
    else:
        weighing = np.flatnonzero(values)
        rows = _dealt(np.flatnonzero(values == 0), [weighing[part] for part in divide(values[weighing], parts, counts)])
    return tuple(np.sort(part) for part in rows)


def _capacities(rows: int, parts: int) -> list[int]:
    return [(part + 1) * rows // parts - part * rows // parts for part in range(parts)]


def _dealt(rows: Int64, parts: Sequence[Int64]) -> list[Int64]:
    """`parts` with `rows` added, each to the part that has the fewest (the lowest number on a tie)."""
    heap = [(len(part), number) for number, part in enumerate(parts)]
    heapq.heapify(heap)
    owners = np.empty(len(rows), np.int64)
    for index in range(len(rows)):
        count, number = heap[0]
        owners[index] = number
        heapq.heapreplace(heap, (count + 1, number))
    return [np.concatenate([part, rows[owners == number]]) for number, part in enumerate(parts)]


def _lpt(loads: Float64, parts: int, counts: str) -> list[Int64]:
    room = _capacities(len(loads), parts) if counts == "equal" else [len(loads)] * parts
    heap = [(0.0, part) for part in range(parts) if room[part]]
    found: list[list[int]] = [[] for _ in range(parts)]
    for row in np.argsort(-loads, kind="stable").tolist():
        total, part = heap[0]
        found[part].append(row)
        if len(found[part]) < room[part]:
            heapq.heapreplace(heap, (total + float(loads[row]), part))
        else:
            heapq.heappop(heap)
    return [np.array(part, np.int64) for part in found]


def _karmarkar_karp(loads: Float64, parts: int, counts: str) -> list[Int64]:
    """A state is a division of some rows into `parts` groups; the two widest are merged, heaviest with lightest.

    Of a state only the sums of its groups are kept, and of a merge which groups met; who is where is read back from the
    last merge to the first. Lists of the rows themselves were some 30,000 new containers a call for 64 parts of 256
    rows: they set off full collections of garbage, each ten times as long as the call where torch is loaded.
    """
    if parts == 1 or not len(loads) or (len(loads) == 1 and counts == "free"):
        return [np.arange(len(loads)), *[np.empty(0, np.int64)] * (parts - 1)]
    order = np.argsort(-loads, kind="stable")
    group_of_row = np.empty(len(order), np.int64)
    group_of_row[order] = (_merge_rows if counts == "free" else _merge_tuples)(loads[order], parts)
    sizes = np.bincount(group_of_row, minlength=parts)
    groups = np.split(np.argsort(group_of_row, kind="stable"), np.cumsum(sizes)[:-1])
    if counts == "free":
        return groups
    # Every group has one row of every tuple, so counts differ by one at most, as those of a plain cut do.
    wanted = _capacities(len(loads), parts)
    places = sorted(range(parts), key=lambda part: -wanted[part])
    by_size = sorted(range(parts), key=lambda part: -len(groups[part]))
    placed = dict(zip(places, by_size, strict=True))
    return [groups[placed[part]] for part in range(parts)]


class _States:
    """States by number: sums of their groups, and the merges that made some of two others."""

    def __init__(self, sums: list[Float64]) -> None:
        self.sums = sums
        self._merges: list[tuple[int, Int64, int, Int64, int]] = []

    def merge(self, left: int, right: int) -> int:
        """The number of a new state: the heaviest group of `left` with the lightest of `right`, and so forth."""
        heavy, light = np.argsort(-self.sums[left], kind="stable"), np.argsort(self.sums[right], kind="stable")
        self._merges.append((left, heavy, right, light, len(self.sums)))
        self.sums.append(self.sums[left][heavy] + self.sums[right][light])
        return len(self.sums) - 1

    def add(self, parts: int) -> int:
        """The number of a new state without rows."""
        self.sums.append(np.zeros(parts))
        return len(self.sums) - 1

    def width(self, state: int) -> float:
        """The heaviest group's sum less the lightest's."""
        return float(self.sums[state].max() - self.sums[state].min())

    def read_back(self, last: int, parts: int) -> Int64:
        """(S, P): the group of state `last` in which the groups of every state ended."""
        group_SP = np.empty((len(self.sums), parts), np.int64)
        group_SP[last] = np.arange(parts)
        for left, heavy, right, light, merged in reversed(self._merges):
            group_SP[left, heavy] = group_SP[right, light] = group_SP[merged]
        return group_SP


def _merge_tuples(loads: Float64, parts: int) -> Int64:
    """Group of every row, from states of one row a group (the last with gaps). loads: heaviest first."""
    seeds = -(-len(loads) // parts)
    filled = np.zeros(seeds * parts)
    filled[: len(loads)] = loads
    states = _States(list(filled.reshape(seeds, parts)))
    heap = [(-states.width(number), number) for number in range(seeds)]
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = states.merge(heapq.heappop(heap)[1], heapq.heappop(heap)[1])
        heapq.heappush(heap, (-states.width(merged), merged))
    return states.read_back(heap[0][1], parts)[:seeds].reshape(-1)[: len(loads)]


def _merge_rows(loads: Float64, parts: int) -> Int64:
    """Group of every row, from states of one row. loads: heaviest first, all above 0; two parts at least.

    A row that meets a state joins its lightest group: no sort. Nearly all merges of many rows over many parts are of
    that kind. A row is as wide as its load; where widths are equal, rows come before states.
    """
    rows, count = [*loads.tolist(), -1.0, -1.0], len(loads)  # none is left: narrower than any
    states, state_of_row, group_in_state = _States([]), [0] * count, [0] * count
    waiting: list[tuple[float, int, int]] = []  # (-width, age, state)
    row = age = 0
    while row < count or len(waiting) > 1:
        first, met = row, list[int]()
        for _ in range(2):
            if waiting and -waiting[0][0] > rows[row]:
                met.append(heapq.heappop(waiting)[2])
            else:
                row += 1
        state = states.merge(*met) if len(met) == 2 else met[0] if met else states.add(parts)
        sums = states.sums[state]
        heaviest, lightest = float(sums.max()), int(sums.argmin())
        limit = -waiting[0][0] if waiting else -1.0
        while first < row:
            total = float(sums[lightest]) + rows[first]
            sums[lightest], heaviest = total, max(heaviest, total)
            state_of_row[first], group_in_state[first] = state, lightest
            first, lightest = first + 1, int(sums.argmin())
            wider = heaviest - float(sums[lightest]) > max(limit, rows[row + 1])
            if first == row < count and rows[row] >= limit and wider:  # this and the next row are the widest again
                row += 1
        heapq.heappush(waiting, (float(sums[lightest]) - heaviest, age, state))
        age += 1
    return states.read_back(waiting[0][2], parts)[state_of_row, group_in_state]


def base_batch_order(
    loads: Float64, *, base_batch: int, share: int, first: int, pool: int, key: Sequence[int]
) -> Int64:
    """A new order of the rows of a window so that every `share` of consecutive rows has about the same load.

    loads  (n,) of the rows in their present order
    share  rows that one batch takes; a multiple of base_batch
    first  how many rows of the shard came before this window: shares begin at its multiples
    pool   base batches that are sorted together
    key    seeds the order of the shares of a pool, which would otherwise come by load

    Rows before the first border of shares and after the last one complete shares with the neighbouring windows. They
    are chosen as an even sample over the loads, so that their sum is near the mean. The rows between are cut, in their
    present order, into base batches. A pool of k base batches a share is sorted; its heaviest P = pool / k form one
    share each, and every next P go heaviest to the share that is lightest so far: for k = 2, the heaviest base batch
    with the lightest one.

    Base batches of 1, shares of 2, loads [7, 1, 5, 3]: pairs (7, 1) and (5, 3), so [0, 1, 2, 3] or [2, 3, 0, 1].
    """
    count = len(loads)
    head = min(-first % share, count)
    tail = (count - head) % share
    spread = _even_sample(loads, head + tail)
    inside = np.setdiff1d(np.arange(count), spread, assume_unique=True)
    blocks = inside.reshape(-1, base_batch)
    weights = loads[blocks].sum(axis=1)
    per_share = share // base_batch
    pool = max(pool // per_share, 1) * per_share
    ordered = [
        _balance_pool(weights, start, min(start + pool, len(blocks)), per_share, key)
        for start in range(0, len(blocks), pool)
    ]
    middle = blocks[np.concatenate(ordered)].reshape(-1) if ordered else inside
    # The even sample alternates between head and tail by load, in proportion.
    ends = _split_evenly(spread, head)
    return np.concatenate([ends[0], middle, ends[1]]).astype(np.int64, copy=False)


def _balance_pool(weights: Float64, start: int, stop: int, per_share: int, key: Sequence[int]) -> Int64:
    """Numbers of base batches start..stop in the order in which shares of `per_share` take them."""
    numbers = start + np.argsort(-weights[start:stop], kind="stable")
    layers = numbers.reshape(per_share, -1)
    shares = layers.shape[1]
    totals, members = np.zeros(shares), np.empty((shares, per_share), np.int64)
    for index, layer in enumerate(layers):
        lightest = np.argsort(totals, kind="stable")
        members[lightest, index] = layer
        totals[lightest] += weights[layer]
    return members[permutation(shares, *key, start)].reshape(-1)


def _even_sample(loads: Float64, size: int) -> Int64:
    """`size` row numbers at even distances in the order of loads, heaviest first."""
    if not size:
        return np.empty(0, np.int64)
    order = np.argsort(-loads, kind="stable")
    return order[((2 * np.arange(size) + 1) * len(loads)) // (2 * size)]


def _split_evenly(rows: Int64, first: int) -> tuple[Int64, Int64]:
    """`first` of `rows` at even distances, and the others, both in the present order."""
    if not first or first == len(rows):
        return rows[:first], rows[first:]
    places = ((2 * np.arange(first) + 1) * len(rows)) // (2 * first)
    chosen = np.zeros(len(rows), dtype=bool)
    chosen[places] = True
    return rows[chosen], rows[~chosen]


def budget_batches(
    loads: Sequence[float] | Float64, *, budget: float, max_rows: int | None = None
) -> list[tuple[int, int]]:
    """Consecutive (start, stop) whose loads stay within `budget`; a row that exceeds it stands alone.

    It cuts rows that one rank has at hand. No batches of a loader are made of it: see the module docstring.

    >>> budget_batches([2.0, 3.0, 1.0, 9.0, 1.0], budget=5.0)
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    if not budget > 0 or (max_rows is not None and max_rows < 1):
        raise ValueError(f"expected a budget above 0 and max_rows of at least 1, came {budget} and {max_rows}")
    values = np.asarray(loads, dtype=np.float64)
    # Walking the values, not differences of one long running sum: what fits must not depend on rounding.
    found, start, total = [], 0, 0.0
    for row, load in enumerate(values.tolist()):
        if row > start and (total + load > budget or (max_rows is not None and row - start >= max_rows)):
            found.append((start, row))
            start, total = row, 0.0
        total += load
    if len(values):
        found.append((start, len(values)))
    return found
