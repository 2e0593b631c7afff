"""The global balancer: a loader whose batches hold rows that another rank read, so that loads are alike.

    read (this rank's slice) -> all-gather of (load, bytes) a row -> every rank computes the same partition
                             -> all-to-all of packed rows -> batch

It works one step ahead, on a thread and a gloo group of its own, so that the exchange hides behind the training step.
The global batch stays the same set of rows, so losses are those of the unbalanced run up to rounding; which rank has
which row follows from loads alone, so a resumed run repeats it bit for bit.

Why the fetches match across ranks: each call of next() hands out one batch and asks for one more. All ranks call it in
step, so all have asked for the same number of exchanges, and `close` can wait for the one that is under way. A rank
that cannot read, or not even open its epoch, says so in the same all-gather; then all ranks raise at that batch. A
collective that fails, because another rank is gone or too late, is an ExchangeError, which nobody else can be told.

What is read ahead belongs to the loader and not to its iterator: the batch that waits is the next one that is handed
out, by whichever iterator, so breaking out of an epoch loses nothing, and nobody touches the loader inside while the
thread reads from it. Position and state are those of what was handed out and trained, as of any loader.

A read that failed does lose something: ranks that could read have passed a batch that the failed one has not. Rows of
two global batches must not be mixed, so epoch() is refused from then on, until `load_state_dict` moves all ranks to one
position; and each rank says the step of its batch beside the loads, and all raise where they differ.

Cost: loads are 16 bytes a row to every rank; rows move once, all but about 1 / W of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gem_data.api import partition
from gem_data.exchange import Rows, pack_rows, row_bytes, rows_of_batch, unpack_rows
from gem_data.interface import Batch, CostModel, Loader, Schema
from torch import Tensor

from gem_pipelines.cost import batch_loads
from gem_pipelines.errors import ExchangeError, RemoteError, RunError, told
from gem_pipelines.runtime import Runtime

_ENDED, _READ, _FAILED = 0, 1, 2
_NO_STEP = -1  # of a rank at the end of the epoch
_SHOWN = 8  # ranks that an error lists
_FIRST = 2  # line of the first row in what a rank says


class BalancedLoader:
    """gem_data.interface.Loader around another one; see the module docstring."""

    def __init__(
        self,
        loader: Loader,
        *,
        cost: CostModel,
        runtime: Runtime,
        global_batch_size: int,
        method: str = "lpt",
        counts: str = "equal",
        timeout: timedelta | None = None,
    ) -> None:
        """Every rank must build it at the same time: it makes a process group, whose collectives may take `timeout`
        (None: as torch has it for gloo).
        """
        self.inner = self._loader = loader
        self.schema: Schema = loader.schema
        self._exchange = RowExchange(
            loader.schema,
            cost=cost,
            runtime=runtime,
            most_rows=-(-global_batch_size // runtime.world_size),
            method=method,
            counts=counts,
            timeout=timeout,
        )
        self._thread: ThreadPoolExecutor | None = None
        self._source: Iterator[Batch] | None = None  # that the thread reads; None: to be opened where reading goes on
        self._next: Future[Batch | None] | None = None  # asked for, not handed out; None in it: the end of the epoch
        self._handed: int | None = None  # step of the last batch handed out since the start or the last load
        self._iterator: weakref.ref[_Epoch] | None = None
        self._failure: str | None = None  # why this rank may be at another step than the others

    @property
    def rows_per_epoch(self) -> int:
        """See gem_data.interface.Loader; of a stream, those of the present window."""
        return self._loader.rows_per_epoch

    @property
    def batches_per_epoch(self) -> int:
        """See gem_data.interface.Loader; of a stream, those of the present window."""
        return self._loader.batches_per_epoch

    def epoch(self) -> Iterator[Batch]:
        """See gem_data.interface.Loader. Raises ValueError after a failed read, until load_state_dict. Where the loader
        inside cannot begin its epoch, on any rank, the first next() raises, on all of them.
        """
        if self._failure is not None:
            raise ValueError(
                f"epoch: reading failed before ({self._failure}), and ranks may stand at different steps since. Call "
                "load_state_dict with the same state on all ranks, that of state_dict(), say."
            )
        self._end_iterator("another epoch() of this loader was started")
        if self._next is not None and self._is_end(self._next):
            self._next = self._source = None
        if self._next is None:
            self._ask()
        iterator = _Epoch(self)
        self._iterator = weakref.ref(iterator)
        return iterator

    def mark_trained(self, batch: Batch) -> None:
        """See gem_data.interface.Loader."""
        if self._handed is None or batch.step > self._handed:
            last = "none yet" if self._handed is None else f"up to step {self._handed}"
            raise ValueError(f"mark_trained: expected a batch that was handed out ({last}), came step {batch.step}")
        self._loader.mark_trained(batch)

    def state_dict(self) -> dict[str, Any]:
        """See gem_data.interface.Loader: that of the loader inside, so balance may be turned off on resuming."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See gem_data.interface.Loader. Waits for the exchange that is under way."""
        self._settle()
        self._loader.load_state_dict(state)
        self._end_iterator("load_state_dict moved this loader")
        self._next = self._source = self._handed = self._failure = None

    def close(self) -> None:
        """See gem_data.interface.Loader. Waits for the exchange that is under way."""
        self._end_iterator("this loader was closed")
        self._settle()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._loader.close()
        self._thread = self._source = None

    def _take(self) -> Batch | None:
        """Hand out the batch that waits, and ask for one more; None at the end of the epoch."""
        waiting = self._next
        assert waiting is not None
        try:
            batch = waiting.result()
        except BaseException as error:
            # Else it is this wait that was interrupted, maybe with the batch there already: it stays the next one.
            if waiting.done() and waiting.exception() is error:
                self._next = self._source = None
                self._failure = told(error)
            raise
        if batch is None:
            self._next = self._source = None
            return None
        self._handed = batch.step
        if self._source is None and self._ends_epoch(batch):
            # Closed since it was read: the loader inside would go on with the next epoch.
            self._next = Future()
            self._next.set_result(None)
        else:
            self._ask()
        return batch

    def _ask(self) -> None:
        source: Iterator[Batch] | Exception | None = self._source
        if source is None:
            try:
                source = self._source = self._loader.epoch()
            except Exception as error:  # whatever it is: the other ranks wait for this one in the exchange
                source = error
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gem_pipelines.balance")
        self._next = self._thread.submit(self._exchange.fetch, source)

    def _settle(self) -> None:
        """Wait until the thread is idle."""
        if self._next is not None:
            wait([self._next])

    @staticmethod
    def _is_end(waiting: Future[Batch | None]) -> bool:
        """Whether no batch of the epoch is left; waits for it. An error is no end: next() raises it."""
        return waiting.exception() is None and waiting.result() is None

    def _ends_epoch(self, batch: Batch) -> bool:
        first: int = getattr(self._loader, "first_step", 0)  # of a stream, where the present window begins
        return (batch.step + 1 - first) % self.batches_per_epoch == 0

    def _end_iterator(self, reason: str) -> None:
        iterator = None if self._iterator is None else self._iterator()
        if iterator is not None:
            iterator.ended = reason
        self._iterator = None


class _Epoch:
    """Iterator over the balanced batches of an epoch: no more than the right to take them."""

    def __init__(self, loader: BalancedLoader) -> None:
        self._loader = loader
        self._at_end = False
        self.ended: str | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.ended is not None:
            raise ValueError(f"this iterator over an epoch has ended: {self.ended}. Call epoch() again.")
        if self._at_end:
            raise StopIteration
        try:
            batch = self._loader._take()
        except BaseException as error:
            self.ended = f"reading failed: {error}"
            raise
        if batch is None:
            self._at_end = True
            raise StopIteration
        return batch


class RowExchange:
    """Reads a batch and returns the balanced one; runs on one thread, and all ranks' calls match."""

    def __init__(
        self,
        schema: Schema,
        *,
        cost: CostModel,
        runtime: Runtime,
        most_rows: int,
        method: str,
        counts: str,
        timeout: timedelta | None = None,
    ) -> None:
        self._schema, self._cost, self._method, self._counts = schema, cost, method, counts
        self._rank, self._world = runtime.rank, runtime.world_size
        self._most_rows = most_rows
        self._group: Any = None
        if runtime.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="balance")

    def fetch(self, source: Iterator[Batch] | Exception) -> Batch | None:
        """The next balanced batch; None at the end of the epoch. source: what it is read from, or why there is none.

        Raises on all ranks where one cannot read, or reads another step than the others; ExchangeError where a rank is
        gone or too late.
        """
        if self._world == 1:
            return _next_of(source)
        batch, rows, failure, mine_RC = None, None, None, self._table(None)
        try:
            batch = _next_of(source)
            mine_RC = self._table(batch)
            rows = None if batch is None else rows_of_batch(self._schema, batch)
        except Exception as error:  # the other ranks wait in the all-gather, whatever it is
            failure, mine_RC[0, 0] = error, _FAILED
        table_WRC = self._gather(mine_RC)
        states = [int(state) for state in table_WRC[:, 0, 0]]
        if _FAILED in states:
            self._raise_together(failure)
        _check_steps([int(step) for step in table_WRC[:, 1, 0]])
        if batch is None or rows is None:
            return None
        counts = [int(count) for count in table_WRC[:, 0, 1]]
        facts_N2 = np.concatenate(
            [said[_FIRST : _FIRST + n].numpy() for said, n in zip(table_WRC, counts, strict=True)]
        )
        return self._exchange(batch, rows, counts, facts_N2[:, 0], facts_N2[:, 1].astype(np.int64))

    def _table(self, batch: Batch | None) -> Tensor:
        """(2 + most rows, 2) float64, what a rank says: [state, rows], [step, 0], then [load, bytes] of every row."""
        mine_RC = torch.zeros(_FIRST + self._most_rows, 2, dtype=torch.float64)
        mine_RC[0, 0] = _ENDED if batch is None else _READ
        mine_RC[1, 0] = _NO_STEP if batch is None else batch.step
        if batch is not None:
            rows = batch.rows
            mine_RC[0, 1] = rows
            mine_RC[_FIRST : _FIRST + rows, 0] = torch.from_numpy(batch_loads(self._cost, batch))
            mine_RC[_FIRST : _FIRST + rows, 1] = torch.from_numpy(row_bytes(self._schema, batch))
        return mine_RC

    def _gather(self, mine: Tensor) -> Tensor:
        """(W, ...): what every rank gives, of one shape."""
        parts = [torch.empty_like(mine) for _ in range(self._world)]
        with self._collective("all-gather"):
            dist.all_gather(parts, mine, group=self._group)
        return torch.stack(parts)

    @contextmanager
    def _collective(self, name: str) -> Iterator[None]:
        """What fails in it is no failed read: it must not be told to the ranks, which may be gone."""
        try:
            yield
        except Exception as error:
            raise ExchangeError(
                f"rank {self._rank}: the {name} of the balancer failed: {error}\n"
                "Where that is of a connection or a time limit, another rank stopped first, and what it reported is "
                "the cause; or it is only slow: raise train.timeout_s."
            ) from error

    def _exchange(
        self,
        batch: Batch,
        rows: Rows,
        counts: list[int],
        loads_N: np.ndarray[Any, np.dtype[np.float64]],
        bytes_N: np.ndarray[Any, np.dtype[np.int64]],
    ) -> Batch:
        """Send the rows of this rank's batch where the partition says, and make a batch of those that come."""
        owners = partition(loads_N, self._world, method=self._method, counts=self._counts)
        ends = np.cumsum([0, *counts])
        low, high = ends[self._rank], ends[self._rank + 1]
        outgoing = [part[(part >= low) & (part < high)] - low for part in owners]
        own = owners[self._rank]
        incoming = [own[(own >= ends[rank]) & (own < ends[rank + 1])] for rank in range(self._world)]
        sizes = [int(bytes_N[take].sum()) for take in incoming]
        with self._collective("all-to-all"):  # the other ranks are in it: what fails before is as bad
            send = torch.cat([pack_rows(self._schema, rows, take) for take in outgoing])
            received = torch.empty(sum(sizes), dtype=torch.uint8)
            dist.all_to_all_single(
                received,
                send,
                output_split_sizes=sizes,
                input_split_sizes=[int(bytes_N[take + low].sum()) for take in outgoing],
                group=self._group,
            )
        return unpack_rows(
            self._schema,
            list(torch.split(received, sizes)),
            [len(take) for take in incoming],
            global_rows=batch.global_rows,
            step=batch.step,
        )

    def _raise_together(self, failure: Exception | None) -> None:
        """Every rank raises; those that can read repeat what the others say."""
        text = "" if failure is None else told(failure)
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([data.numel()]))
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: data.numel()] = data
        texts = self._gather(padded)
        if failure is not None:
            raise failure
        rank = next(rank for rank, size in enumerate(sizes) if int(size))
        said = bytes(texts[rank][: int(sizes[rank])].tolist()).decode()
        raise RemoteError(f"rank {rank} reported: {said}")


def _next_of(source: Iterator[Batch] | Exception) -> Batch | None:
    if isinstance(source, Exception):
        raise source
    return next(source, None)


def _check_steps(steps: list[int]) -> None:
    """Raise RunError, on all ranks, unless they read the same step of the data."""
    if len(set(steps)) == 1:
        return
    found = []
    for step in sorted(set(steps)):
        ranks = [str(rank) for rank, came in enumerate(steps) if came == step]
        shown = ", ".join(ranks[:_SHOWN]) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
        found.append(f"{'the end of the epoch' if step == _NO_STEP else f'step {step}'} on rank {shown}")
    raise RunError(
        f"balance: expected the same step of the data on all ranks, came {'; '.join(found)}. Call load_state_dict with "
        "the same state on all of them."
    )
