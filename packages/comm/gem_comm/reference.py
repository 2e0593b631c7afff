"""The definition of every collective: what all ranks receive, from what all ranks give; and a group of threads.

`collect(calls)` is a pure function of the calls of all ranks. `ThreadCollectives` are ranks that are threads of one
process and meet at a barrier, where the last to come calls `collect`: the oracle that other implementations are
compared with, and what tests and simulations of many ranks run on. Reductions add in rank order in float64 (int64 for
integers) and round once.

It never waits for a rank that has failed: its error breaks the barrier for the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gem_comm.interface import Call, Collectives, CommError, Pending
from gem_comm.single import Done


def collect(calls: Sequence[Call]) -> list[Tensor]:
    """Results of one collective; calls[i] is that of the rank at position i."""
    kinds = [call.kind for call in calls]
    if len(set(kinds)) != 1:
        raise CommError(f"ranks disagree: they called {kinds}")
    xs = [torch.empty(0) if call.x is None else call.x for call in calls]
    n, first = len(calls), calls[0]
    if first.kind == "barrier":
        return [torch.empty(0) for _ in xs]
    _same_layout(xs, dim0=first.kind != "all_to_all")
    if first.kind == "all_gather":
        return [torch.cat(xs) for _ in xs]
    if first.kind == "broadcast":
        return [xs[first.source].clone() for _ in xs]
    if first.kind == "all_to_all":
        return _exchange(calls, xs)
    total = reduce(xs, first.op)
    if first.kind == "all_reduce":
        return [total.clone() for _ in xs]
    return [part.clone() for part in total.chunk(n)] if total.shape[0] else [total.clone() for _ in xs]


def reduce(xs: Sequence[Tensor], op: str) -> Tensor:
    """sum, mean, max or min over ranks, in float64 or int64, rounded once to the dtype of the parts."""
    wide = torch.stack([x.to(torch.float64 if x.dtype.is_floating_point else torch.int64) for x in xs])
    if op == "max":
        return wide.amax(0).to(xs[0].dtype)
    if op == "min":
        return wide.amin(0).to(xs[0].dtype)
    total = wide.sum(0)
    return (total / len(xs) if op == "mean" else total).to(xs[0].dtype)


def _exchange(calls: Sequence[Call], xs: Sequence[Tensor]) -> list[Tensor]:
    parts = [x.split(list(call.send_rows)) for call, x in zip(calls, xs, strict=True)]
    for i, receiver in enumerate(calls):
        given = tuple(call.send_rows[i] for call in calls)
        if given != receiver.receive_rows:
            raise CommError(f"rank {i} expects {receiver.receive_rows} rows, the others send it {given}")
    return [torch.cat([sent[i] for sent in parts]) for i in range(len(calls))]


def _same_layout(xs: Sequence[Tensor], *, dim0: bool) -> None:
    found = [(x.shape[0 if dim0 else 1 :], x.dtype) for x in xs]
    if len(set(found)) != 1:
        raise CommError(f"ranks disagree: their tensors are {[(tuple(shape), dtype) for shape, dtype in found]}")


class _Meeting:
    """One group's place to meet: calls come in, `collect` runs once, results go out."""

    def __init__(self, size: int, limit_s: float) -> None:
        self._calls: list[Any] = [None] * size
        self._results: list[Tensor] = []
        self._problem: Exception | None = None
        self._all_in = threading.Barrier(size, action=self._run, timeout=limit_s)
        # Nobody may put in the next call before everybody has taken the last result.
        self._all_out = threading.Barrier(size, timeout=limit_s)

    def _run(self) -> None:
        try:
            self._results, self._problem = collect(self._calls), None
        except Exception as problem:
            self._problem = problem

    def exchange(self, position: int, call: Call) -> Tensor:
        self._calls[position] = call
        try:
            self._all_in.wait()
            if self._problem is not None:
                raise CommError(str(self._problem)) from self._problem
            result = self._results[position]
            self._all_out.wait()
        except threading.BrokenBarrierError:
            raise CommError(f"{call.kind}: another rank failed or did not come within the time limit") from None
        return result


class ThreadCollectives(Collectives):
    """The rank at position `rank` of a group of threads."""

    def __init__(self, meeting: _Meeting, *, axis: str, ranks: tuple[int, ...], rank: int) -> None:
        self.axis, self.ranks, self.rank, self.size = axis, ranks, rank, len(ranks)
        self._meeting = meeting

    def launch(self, call: Call) -> Pending:
        result = self._meeting.exchange(self.rank, call)
        if call.out is None:
            return Done(result)
        call.out.copy_(result)
        return Done(call.out)


def thread_groups(groups: Sequence[Sequence[int]], *, axis: str, limit_s: float = 20.0) -> dict[int, ThreadCollectives]:
    """rank -> its collectives over one axis."""
    made: dict[int, ThreadCollectives] = {}
    for group in groups:
        ranks = tuple(group)
        meeting = _Meeting(len(ranks), limit_s)
        for position, rank in enumerate(ranks):
            made[rank] = ThreadCollectives(meeting, axis=axis, ranks=ranks, rank=position)
    return made


def run_ranks(world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """Run work(rank) in one thread a rank; results in rank order. The first rank's error that is not an echo of
    another's is raised."""
    results: list[Any] = [None] * world_size
    problems: list[Exception | None] = [None] * world_size

    def one(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as problem:
            problems[rank] = problem

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [problem for problem in problems if problem is not None]
    if found:
        raise next((problem for problem in found if "another rank failed" not in str(problem)), found[0])
    return results
