"""Row groups decoded ahead of the batches: which windows this rank needs next, and the threads that decode them.

A window is many batches, and its first batch needs all of it. So whoever decodes a window when its first row is due
makes the trainer wait for a whole window at every edge, however fast reading is on average, and batches read ahead
(prefetch.py) are too few to cover that. Here the plan, which is pure numbers, is walked further than batches are made:
windows are asked for in the order in which they will be due, and their row groups go to threads in that order.

What the number of threads cannot change: groups are handed out in the plan's order when their window is due, and an
exception of reading one is raised there and then, at the batch that it belongs to, in the thread that makes batches. A
window that this rank never needs (of a shard that other ranks share, or after the last batch with drop_last) is not
read. pyarrow and numpy let go of the interpreter's lock for most of the time that a group takes.

    windows of 2 groups, batches of half a window, one thread; a time for each batch
    batches made       0   1   2   3   4   5
    window needed      0   0   1   1   2   2
    decoded meanwhile  1   1   2   2   3   3       (window 0 before batch 0: nothing is ahead of the first)

Cost: of every shard one window beside the one that batches are made of; where a window has fewer groups than there are
threads, as many windows as give each a group. Walking ahead costs what walking would: each batch's place in the plan is
worked out once. Why not processes: decoded columns would have to be copied or shared between them, and what reading
spends in Python is small.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from gem_data.batching import Cursor, EpochPlan, Group, Piece, Plan
from gem_data.prefetch import OwnThread, StopFlag
from gem_data.rows import Rows

THREAD_NAME = "gem_data.reader"

_STRIDE = 8  # batches that the plan is walked ahead for each that is made, so that no batch waits for a long walk
_FARTHEST = 1024  # batches: bounds what is kept of the plan where a window has very many

Read = Callable[[], Rows]
"""The rows of one group, once they are there; raises what reading it raised."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What one batch of this rank is made of. global_rows: of all ranks; after: the position behind it."""

    step: int
    global_rows: int
    pieces: tuple[Piece, ...]
    after: Cursor


def planned_batches(plan: Plan, cursor: Cursor, *, rank: int, world_size: int) -> Iterator[Planned]:
    """This rank's batches from `cursor` to the end of its epoch."""
    start = cursor.epoch
    while cursor.epoch == start:
        given = plan.shares(cursor)
        after = plan.advance(cursor, given)
        pieces = plan.pieces(cursor, given, rank=rank, world_size=world_size)
        yield Planned(step=cursor.step, global_rows=int(given.sum()), pieces=tuple(pieces), after=after)
        cursor = after


class GroupReader:
    """Iterates over `batches`; `take` hands out the windows that their pieces name, in the order of the pieces."""

    def __init__(
        self,
        batches: Iterator[Planned],
        epoch: EpochPlan,
        read: Callable[[Group], Rows],
        *,
        readers: int,
        windows: int,
        stop: StopFlag,
    ) -> None:
        """readers: threads; 0 = `read` is called where a group's rows are asked for. windows: most ahead of a shard.

        stop: once raised, no group is begun any more, and who asks for its rows gets a CancelledError.
        """
        self._batches, self._epoch, self._windows, self._stop = batches, epoch, windows, stop
        self._read = partial(_read_unless_stopped, read, stop)
        # Threads start when first needed, and hold no reference to self. They are daemons, which end with the thread
        # that calls close(): those of concurrent.futures decode all that is queued before an interpreter is left.
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads = [
            OwnThread(target=_work, args=(self._tasks, self._read), name=f"{THREAD_NAME}_{number}", daemon=True)
            for number in range(readers)
        ]
        self._planned: deque[Planned] = deque()
        self._last: dict[int, int] = {}  # shard -> window that was asked for last
        self._due: deque[tuple[int, int]] = deque()  # (shard, window) in order, not yet given to the threads
        self._ahead: deque[tuple[int, int, list[Future[Rows]]]] = deque()  # given to them, not yet taken
        self._held: Counter[int] = Counter()  # shard -> windows in _ahead

    def __iter__(self) -> Iterator[Planned]:
        return self

    def __next__(self) -> Planned:
        if not self._threads:
            return next(self._batches)
        self._walk()
        if not self._planned:
            raise StopIteration
        return self._planned.popleft()

    def take(self, shard: int, window: int) -> Sequence[Read]:
        """The groups of the window, in reading order. Takes what the pieces name, once each and in their order."""
        if not self._threads:
            return [partial(self._read, group) for group in self._epoch.window_groups(shard, window)]
        first_shard, first_window, futures = self._ahead.popleft()
        assert (first_shard, first_window) == (shard, window), "windows were taken in another order than planned"
        self._held[shard] -= 1
        self._submit()
        return [future.result for future in futures]

    def close(self) -> None:
        """Forget what no thread has begun, and wait for the threads. Idempotent."""
        self._stop.raised = True
        started = [thread for thread in self._threads if thread.ident is not None]
        for _ in started:
            self._tasks.put(None)
        for thread in started:
            thread.join()
        self._planned.clear()
        self._due.clear()
        self._ahead.clear()

    def _walk(self) -> None:
        """Look further into the plan, until the next window that is due must wait for one to be taken."""
        for _ in range(_STRIDE):
            if self._due or len(self._planned) >= _FARTHEST:
                break
            batch = next(self._batches, None)
            if batch is None:
                break
            self._planned.append(batch)
            for piece in batch.pieces:
                if self._last.get(piece.shard) != piece.window:
                    self._last[piece.shard] = piece.window
                    self._due.append((piece.shard, piece.window))
            self._submit()

    def _submit(self) -> None:
        """Give windows to the threads in order, as long as no shard has more than its number ahead."""
        while self._due and self._held[self._due[0][0]] < self._windows:
            shard, window = self._due.popleft()
            groups = self._epoch.window_groups(shard, window)
            tasks = [_Task(group) for group in groups]
            self._ahead.append((shard, window, [task.rows for task in tasks]))
            self._held[shard] += 1
            for task in tasks:
                self._tasks.put(task)
            for thread in self._threads:
                if thread.ident is None:
                    thread.start()


class _Task:
    """A group to be read, and its rows once they are."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rows: Future[Rows] = Future()


def _read_unless_stopped(read: Callable[[Group], Rows], stop: StopFlag, group: Group) -> Rows:
    if stop.raised:
        raise CancelledError
    return read(group)


def _work(tasks: SimpleQueue[_Task | None], read: Callable[[Group], Rows]) -> None:
    while (task := tasks.get()) is not None:
        try:
            task.rows.set_result(read(task.group))
        except BaseException as error:
            task.rows.set_exception(error)
        task = None  # rows that were taken are not held until the next group comes
