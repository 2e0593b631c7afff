"""Which rows make which batch: a pure, seeded plan in plain numbers. No file, tensor or process group is touched here.

The order of an epoch, for row groups g = 0..G-1 in file order:

1. Permute the row groups by (seed, epoch).                              [shuffle off: keep file order]
2. Deal them to S = logical_shards sequences, each to the one with the fewest rows so far.
3. Cut each sequence into windows of `window_groups` row groups.
4. Shuffle the rows inside a window by (seed, epoch, shard, window).     [shuffle off: keep their order]
5. Global batch b takes min(global_batch_size, rows left) rows: an even share of every shard while its rows last,
   the remainder from the shards with the most rows left; it is the concatenation of the shares over the shards.
6. Rank r of W takes the contiguous slice [r*n//W, (r+1)*n//W) of the n rows.

So every row comes exactly once an epoch, the global batches do not depend on W, and with W dividing S and S dividing
the batch a rank's slice is made of whole shares of its own shards: it reads only their row groups. (In the last
batches of an epoch, when the first shards have run out, slices cross shard borders and a rank reads a neighbour's
window; that costs decoding, never correctness.)

"Permute by (seed, ...)" is defined here to the bit, not borrowed: sort by the splitmix64 hash of a counter that starts
at a hash of the key. numpy does not promise its generators' permutations across versions, and a resume under a newer
numpy must not silently train another order. splitmix64 (Steele, Lea, Flood 2014) is a bijection of its counter, so
keys never tie.

A position (`Cursor`) is how many rows of every shard were taken; the next batch follows from it alone, so resuming
costs nothing and replays nothing.

    12 rows in row groups of 5, 4 and 3; two shards, no shuffle, batches of 5
    shard 0: group 0 (5 rows); shard 1: groups 1, 2 (4 + 3 rows)
    batch 0: shares (2, 3)   batch 1: (2, 3)   batch 2: (1, 1)

Cost: a sort of one window's rows (about 2 ms for 32,768 rows), a heap of S over the G groups once an epoch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gem_data.interface import LoaderConfig

ORDER_VERSION = 1
"""Rises when the definition above changes: a loader state of another order is refused."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_GROUPS, _ROWS = 1, 2
PAIRS = 3
"""Third part of the keys that balance.base_batch_order permutes shares by; 1 and 2 are the order's own."""
LENGTHS = 4
"""Third part of the keys that lengths.py draws by."""

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Group:
    """One row group: `file` is the index into Schema.files."""

    file: int
    group: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """A position: `taken` rows of every shard in this epoch; `step` and `samples` count since the start of the run."""

    epoch: int
    step: int
    samples: int
    taken: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows start..stop of the order of one window of one shard."""

    shard: int
    window: int
    start: int
    stop: int


def splitmix64(value: int) -> int:
    """The finalizer of splitmix64 for one 64-bit number.

    >>> hex(splitmix64(0x9E3779B97F4A7C15))
    '0xe220a8397b1dcdaf'
    """
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def hash_key(*parts: int) -> int:
    """One 64-bit number from several, order-sensitive."""
    state = 0
    for part in parts:
        state = splitmix64((state + _GOLDEN) ^ splitmix64(part + _GOLDEN))
    return state


def extend_hash(states: npt.NDArray[np.uint64], part: Int64) -> npt.NDArray[np.uint64]:
    """hash_key with one more part, for many states and parts at once.

    >>> extend_hash(np.array([hash_key(1, 2)], np.uint64), np.array([3])).tolist() == [hash_key(1, 2, 3)]
    True
    """
    with np.errstate(over="ignore"):
        return _mix((states + np.uint64(_GOLDEN)) ^ _mix(part.astype(np.uint64) + np.uint64(_GOLDEN)))


def _mix(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64 of every element; the caller allows overflow."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def permutation(count: int, *key: int) -> Int64:
    """The permutation of 0..count-1 for `key`: indices sorted by splitmix64(hash_key(key) + i * golden ratio)."""
    with np.errstate(over="ignore"):
        hashes = np.uint64(hash_key(*key)) + np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN)
        hashes = _mix(hashes)
    return np.argsort(hashes).astype(np.int64, copy=False)


def deal(groups: Sequence[Group], shards: int) -> tuple[tuple[Group, ...], ...]:
    """Give each group to the shard with the fewest rows so far (the lowest number on a tie)."""
    dealt: list[list[Group]] = [[] for _ in range(shards)]
    heap = [(0, shard) for shard in range(shards)]
    for group in groups:
        rows, shard = heap[0]
        dealt[shard].append(group)
        heapq.heapreplace(heap, (rows + group.rows, shard))
    return tuple(tuple(shard) for shard in dealt)


def shares(left: Sequence[int] | Int64, count: int) -> Int64:
    """How many of `count` rows each shard gives when it has `left` rows: even, capped, the rest from the fullest.

    Needs count <= sum(left).

    >>> shares([10, 10, 1], 9).tolist()
    [4, 4, 1]
    >>> shares([10, 12, 9], 8).tolist()
    [3, 3, 2]
    """
    left = np.asarray(left, dtype=np.int64)
    if len(left) == 1:
        return np.array([count], dtype=np.int64)
    ordered = np.sort(left)
    # below[i]: rows given when the level is ordered[i], the i + 1 smallest giving everything they have.
    below = np.cumsum(ordered) + ordered * np.arange(len(left) - 1, -1, -1)
    full = int(np.searchsorted(below, count, side="right"))
    if full == len(left):
        return left.copy()
    level = (count - int(ordered[:full].sum())) // (len(left) - full)
    given = np.minimum(left, level)
    rest = count - int(given.sum())
    if rest:
        given[np.argsort(-(left - given), kind="stable")[:rest]] += 1
    return given


class EpochPlan:
    """The order of one epoch: the row groups of every shard, and the row order of every window.

    shards      row groups of every shard, in reading order
    shard_rows  (S,) int64
    """

    def __init__(self, groups: Sequence[Group], config: LoaderConfig, epoch: int) -> None:
        self._seed, self._epoch, self._shuffle = config.seed, epoch, config.shuffle
        # Without shuffling a window of one group is enough, and holds the least memory.
        self._window_groups = config.window_groups if config.shuffle else 1
        order = permutation(len(groups), self._seed, epoch, _GROUPS) if config.shuffle else range(len(groups))
        self.shards = deal([groups[index] for index in order], config.logical_shards)
        self.shard_rows = np.array([sum(group.rows for group in shard) for shard in self.shards], dtype=np.int64)
        self._window_ends = [
            np.cumsum([sum(group.rows for group in window) for window in self._windows(shard)], dtype=np.int64)
            for shard in range(len(self.shards))
        ]

    def window_groups(self, shard: int, window: int) -> tuple[Group, ...]:
        """The row groups of one window, in reading order."""
        start = window * self._window_groups
        return self.shards[shard][start : start + self._window_groups]

    def window_start(self, shard: int, window: int) -> int:
        """Rows of the shard before the window."""
        return int(self._window_ends[shard][window - 1]) if window else 0

    def window_order(self, shard: int, window: int) -> Int64:
        """The order in which the rows of the window's concatenated row groups are taken."""
        rows = sum(group.rows for group in self.window_groups(shard, window))
        if not self._shuffle:
            return np.arange(rows, dtype=np.int64)
        return permutation(rows, self._seed, self._epoch, _ROWS, shard, window)

    def pieces(self, shard: int, start: int, stop: int) -> list[Piece]:
        """Rows start..stop of a shard's order, cut at window borders."""
        found = []
        ends = self._window_ends[shard]
        while start < stop:
            window = int(np.searchsorted(ends, start, side="right"))
            begin = int(ends[window - 1]) if window else 0
            end = min(stop, int(ends[window]))
            found.append(Piece(shard=shard, window=window, start=start - begin, stop=end - begin))
            start = end
        return found

    def row_at(self, shard: int, position: int) -> tuple[int, int, int] | None:
        """(file, row group, row in it) of a position in a shard's order; None at the end of the shard."""
        if position >= int(self.shard_rows[shard]):
            return None
        piece = self.pieces(shard, position, position + 1)[0]
        row = int(self.window_order(shard, piece.window)[piece.start])
        for group in self.window_groups(shard, piece.window):
            if row < group.rows:
                return group.file, group.group, row
            row -= group.rows
        raise AssertionError("a window's order names a row outside its groups")

    def _windows(self, shard: int) -> list[tuple[Group, ...]]:
        count = -(-len(self.shards[shard]) // self._window_groups)
        return [self.window_groups(shard, window) for window in range(count)]


class Plan:
    """The whole run's order: pure, the same on every rank.

    rows_per_epoch, batches_per_epoch  of the global order (the tail left out with drop_last)
    """

    def __init__(self, groups: Sequence[Group], config: LoaderConfig) -> None:
        """`groups` in file order; `config` already checked."""
        self._groups, self._config = tuple(groups), config
        self._epochs: dict[int, EpochPlan] = {}
        rows, size = sum(group.rows for group in groups), config.global_batch_size
        self.batches_per_epoch = rows // size if config.drop_last else -(-rows // size)
        self.rows_per_epoch = self.batches_per_epoch * size if config.drop_last else rows

    def epoch(self, epoch: int) -> EpochPlan:
        """The plan of one epoch; the last two asked for are kept (reading may be an epoch ahead of training)."""
        # Reading thread and trainer both ask: build first, then swap in a new dict, so that no lock is needed.
        found = self._epochs.get(epoch)
        if found is None:
            found = EpochPlan(self._groups, self._config, epoch)
            self._epochs = {**dict(list(self._epochs.items())[-1:]), epoch: found}
        return found

    def start(self) -> Cursor:
        """The position before the first batch."""
        return Cursor(epoch=0, step=0, samples=0, taken=(0,) * self._config.logical_shards)

    def shares(self, cursor: Cursor) -> Int64:
        """(S,) rows that each shard gives to the batch at `cursor`."""
        done = sum(cursor.taken)
        count = min(self._config.global_batch_size, self.rows_per_epoch - done)
        return shares(self.epoch(cursor.epoch).shard_rows - np.asarray(cursor.taken, dtype=np.int64), count)

    def advance(self, cursor: Cursor, given: Int64 | None = None) -> Cursor:
        """The position after the batch at `cursor`; at the end of an epoch, the start of the next one.

        `given` is shares(cursor), where the caller has it already.
        """
        given = self.shares(cursor) if given is None else given
        taken = tuple(done + more for done, more in zip(cursor.taken, given.tolist(), strict=True))
        samples, epoch = cursor.samples + int(given.sum()), cursor.epoch
        if sum(taken) == self.rows_per_epoch:
            epoch, taken = epoch + 1, (0,) * len(taken)
        return Cursor(epoch=epoch, step=cursor.step + 1, samples=samples, taken=taken)

    def pieces(self, cursor: Cursor, given: Int64 | None = None, *, rank: int = 0, world_size: int = 1) -> list[Piece]:
        """What `rank` of `world_size` reads of the batch at `cursor`, in order. May be empty."""
        given = self.shares(cursor) if given is None else given
        epoch, total = self.epoch(cursor.epoch), int(given.sum())
        low, high = rank * total // world_size, (rank + 1) * total // world_size
        found, before = [], 0
        for shard, count in enumerate(given.tolist()):
            start, stop = max(low - before, 0), min(high - before, count)
            if start < stop:
                base = cursor.taken[shard]
                found += epoch.pieces(shard, base + start, base + stop)
            before += count
        return found
