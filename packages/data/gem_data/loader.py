"""The loader: this rank's part of every global batch, read ahead by threads, resumable at what was trained.

Which rows make a batch is batching.py's pure plan; this file executes it: it keeps the decoded window of every shard
that this rank reads, so that a row group is decoded once an epoch, copies rows into batches (window.py, collate.py) and
hands those out. One thread makes batches, others decode the row groups that it will need next (reading.py).

Three positions, all `Cursor`s of the plan:

    fetched   where the reading thread is; lives only inside the iterator and is never saved
    yielded   after the last batch handed out; epoch() goes on here
    trained   after the last batch that mark_trained() was told of; state_dict() is this one

A state is independent of rank, world size and prefetching because the plan is. It names, per logical shard, the file,
row group and row to be read next, for people and as a proof: loading recomputes them from the plan and refuses a state
whose places do not agree. It also names every file with the hash of its content from schema.json, so that a state of
other data or of another order cannot continue silently (state.py says what that does and does not cover).

A row group that cannot be used is left out on request (on_damage), and its rows keep their places in the order. With
base batches it takes its whole window along: where its neighbours' rows stand follows from the loads of all rows of the
window, those of the damaged group among them, which nobody knows. Any order made without them is another one than that
of a process that could read the group, before or after, so rows would come twice or never. Left out whole, a window has
one order or none; which rows are left does not depend on when, or by which rank, the damage was met, and the state need
not tell. The price is up to window_groups - 1 sound row groups, told to on_damage like the damaged one.

Cost: one window of decoded rows per shard of this rank (row group rows x window_groups), 16 bytes a row and column
beside it, the next window where readers decode ahead, and the batches read ahead. state_dict() sorts one window per
shard (about 2 ms each).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gem_data.balance import base_batch_order
from gem_data.batching import PAIRS, Cursor, EpochPlan, Group, Plan
from gem_data.collate import take_batch
from gem_data.cost import check_cost, events_cost, loads_of
from gem_data.interface import Batch, DataError, LoaderConfig, Schema
from gem_data.lengths import drawn_limits
from gem_data.prefetch import OwnThread, Prefetch, StopFlag
from gem_data.reading import GroupReader, Read, planned_batches
from gem_data.remote import RemotePath
from gem_data.rows import Int64, Rows
from gem_data.schema import SCHEMA_FILE, read_schema, select
from gem_data.shards import Shards, groups_of
from gem_data.state import build_state, cursor_from_state
from gem_data.validation import check_config
from gem_data.window import Limits, Window, join, limits_of

Kept = npt.NDArray[np.bool_]
"""Whether each row of a window, counted as the plan does, is in a group that could be used."""

OnDamage = Callable[[DataError, int], None]
"""Hears of a row group that cannot be used, and its rows; called in the plan's order, perhaps in another thread."""


class ArrowLoader:
    """gem_data.interface.Loader over a directory in the native layout. Build it with gem_data.api.build_loader.

    Not thread-safe: one consumer. Every rank must build it with the same directory, split and config.
    """

    def __init__(
        self,
        directory: str | Path | RemotePath,
        *,
        split: str,
        config: LoaderConfig,
        rank: int = 0,
        world_size: int = 1,
        on_damage: OnDamage | None = None,
        only: Collection[tuple[int, int]] | None = None,
        shards: Shards | None = None,
    ) -> None:
        """Reads schema.json and every footer of the split; no row. Raises DataError, or ValueError for a setting.

        only: read these (file, row group) alone; None: all of the split.
        shards: of this split with these features, labels and open_ids, whose footers need not be read again.
        """
        check_config(config, rank=rank, world_size=world_size)
        self.schema: Schema = (
            select(read_schema(directory), features=config.features, labels=config.labels)
            if shards is None
            else shards.schema
        )
        if config.cost is not None:
            check_cost(config.cost, self.schema)
        self.config = config
        self.split = split
        self._rank, self._world_size, self._on_damage = rank, world_size, on_damage
        self._shards = Shards(directory, self.schema, split, open_ids=config.open_ids) if shards is None else shards
        groups = [Group(file=file, group=group, rows=rows) for file, group, rows in groups_of(self._shards.footers)]
        if only is not None:
            groups = [group for group in groups if (group.file, group.group) in only]
        self._plan = Plan(groups, config)
        if not self._plan.batches_per_epoch:
            rows = sum(group.rows for group in groups)
            raise DataError(
                f'{self._shards.directory / SCHEMA_FILE}: split "{split}": expected rows for at least one batch, came '
                f"{rows} (global_batch_size {config.global_batch_size}, drop_last {config.drop_last}). "
                "Lower global_batch_size or turn drop_last off.",
                file=SCHEMA_FILE,
            )
        self.rows_per_epoch = self._plan.rows_per_epoch
        self.batches_per_epoch = self._plan.batches_per_epoch
        self._yielded = self._trained = self._plan.start()
        # Weak: breaking out of a loop drops its iterator, which stops the reading thread, but does not wait for it.
        self._open: weakref.ref[_Epoch] | None = None
        self._thread: OwnThread | None = None

    def epoch(self) -> Iterator[Batch]:
        """Batches from the current position to the end of the current epoch. See interface.Loader."""
        self._end_iterator("another epoch() of this loader was started")
        iterator = _Epoch(self, self._yielded)
        self._open = weakref.ref(iterator)
        self._thread = iterator.thread
        return iterator

    def at_end_of_first_epoch(self) -> bool:
        """Whether every batch of the first epoch, and none of the second, was handed out."""
        return self._yielded.step == self.batches_per_epoch

    def mark_trained(self, batch: Batch) -> None:
        """Move the state past `batch` (and those before it). See interface.Loader."""
        if not self._trained.step <= batch.step < self._yielded.step:
            raise ValueError(
                f"mark_trained: expected a batch of step {self._trained.step} to {self._yielded.step - 1} (yielded by "
                f"this loader and not yet marked), came step {batch.step}"
            )
        cursor = self._trained
        while cursor.step <= batch.step:
            cursor = self._plan.advance(cursor)
        self._trained = cursor

    def state_dict(self) -> dict[str, Any]:
        """JSON-able position after the last trained batch. See interface.Loader."""
        return build_state(self._plan, self._trained, self.split, self.config, self._shards.footers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises DataError, and then changes nothing. See interface.Loader."""
        cursor = cursor_from_state(state, self._plan, self.split, self.config, self._shards.footers)
        self._end_iterator("load_state_dict moved this loader")
        self._yielded = self._trained = cursor

    def close(self) -> None:
        """Stop the reading thread and let go of decoded rows. Idempotent."""
        self._end_iterator("this loader was closed")

    def _end_iterator(self, reason: str) -> None:
        iterator = None if self._open is None else self._open()
        if iterator is not None:
            iterator.end(reason)
        elif self._thread is not None:
            self._thread.join_ended()
        self._open = self._thread = None


class _Epoch:
    """The iterator of one epoch(): counts what was handed out, and refuses once something else moved the loader."""

    def __init__(self, loader: ArrowLoader, start: Cursor) -> None:
        self._loader = loader
        self._ended: str | None = None
        stop = StopFlag()
        source = _read(loader, start, stop)
        depth = loader.config.prefetch
        self._source: Prefetch[tuple[Batch, Cursor]] | Generator[tuple[Batch, Cursor], None, None] = source
        self.thread: OwnThread | None = None
        if depth:
            self._source = Prefetch(source, depth=depth, name="gem_data.loader", stop=stop)
            self.thread = self._source.thread

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self._check_open()
        try:
            batch, self._loader._yielded = next(self._source)
        except StopIteration:
            self._check_open()  # on_damage may close the loader, in the thread that reads
            raise
        except CancelledError:
            self._check_open()
            raise
        except BaseException as error:
            # Otherwise a consumer that swallows the error would take the next StopIteration for the epoch's end.
            self._ended = f"reading failed: {error}"
            raise
        return batch

    def _check_open(self) -> None:
        if self._ended is not None:
            raise ValueError(f"this iterator over an epoch has ended: {self._ended}. Call epoch() again.") from None

    def end(self, reason: str) -> None:
        """Stop reading ahead; a later next() says why."""
        self._ended = reason
        self._source.close()


def warn_of_small_windows(loader: ArrowLoader) -> None:
    """Say, on one rank, that windows hold fewer base batches than base_pool asks for, and larger ones could."""
    config, epoch = loader.config, loader._plan.epoch(0)
    if config.base_batch is None or loader._rank:
        return
    windows = [epoch.window_groups(shard, 0) for shard in range(config.logical_shards)]
    held = max(sum(group.rows for group in window) for window in windows) // config.base_batch
    wanted = min(config.base_pool, int(epoch.shard_rows.max()) // config.base_batch)
    if held < wanted:
        groups = -(-wanted * len(windows[0]) // max(held, 1))
        todo = f"Raise window_groups to {groups}" if config.shuffle else "Turn shuffle on, or write larger row groups"
        warnings.warn(
            f"base_pool {config.base_pool}: a window of {len(windows[0])} row groups holds {held} base batches of "
            f"{config.base_batch} rows, so no more are sorted together and loads are less even. {todo}, or lower "
            "base_pool to say that this is meant.",
            stacklevel=3,
        )


def _read(loader: ArrowLoader, cursor: Cursor, stop: StopFlag) -> Generator[tuple[Batch, Cursor], None, None]:
    """This rank's batches from `cursor` to the end of its epoch, each with the position after it; until `stop`."""
    shards, config, epoch = loader._shards, loader.config, loader._plan.epoch(cursor.epoch)
    planned = planned_batches(loader._plan, cursor, rank=loader._rank, world_size=loader._world_size)
    readers = config.readers if config.prefetch else 0
    groups = config.window_groups if config.shuffle else 1
    reader = GroupReader(
        planned, epoch, partial(_decode, shards), readers=readers, windows=max(1, -(-readers // groups)), stop=stop
    )
    with contextlib.closing(reader):
        windows = _Windows(shards, epoch, config, cursor.epoch, reader, loader._on_damage)
        for batch in reader:
            held, takes = [], []
            for piece in batch.pieces:
                window = windows.get(piece.shard, piece.window)
                take = window.order[piece.start : piece.stop]
                if window.rows is not None:
                    held.append(window.rows)
                    takes.append(take[take >= 0])
                del window, take  # or it would be held while the next one is joined
            yield (
                take_batch(shards.schema, held, takes, global_rows=batch.global_rows, step=batch.step),
                batch.after,
            )


def _decode(shards: Shards, group: Group) -> Rows:
    return shards.read(group.file, group.group)


@dataclass(frozen=True, kw_only=True)
class _Held:
    """rows: of the groups that are sound; order: of the plan's rows, pointing into `rows`, -1 for one that is not."""

    number: int
    rows: Window | None
    order: Int64


class _Windows:
    """The decoded window that each shard is in, and the order of its rows."""

    def __init__(
        self,
        shards: Shards,
        epoch: EpochPlan,
        config: LoaderConfig,
        number: int,
        reader: GroupReader,
        on_damage: OnDamage | None,
    ) -> None:
        self._shards, self._epoch, self._config, self._number = shards, epoch, config, number
        self._reader, self._on_damage = reader, on_damage
        self._held: dict[int, _Held] = {}

    def get(self, shard: int, window: int) -> _Held:
        """Take the window unless it is the one at hand; the shard's former window is let go first."""
        held = self._held.get(shard)
        if held is None or held.number != window:
            self._held.pop(shard, None)
            held = None
            groups = self._epoch.window_groups(shard, window)
            reads = self._reader.take(shard, window)
            read = [self._read(group, rows) for group, rows in zip(groups, reads, strict=True)]
            parts = self._all_or_none(groups, read)
            kept = np.repeat([part is not None for part in parts], [group.rows for group in groups])
            sound = [part for part in parts if part is not None]
            schema = self._shards.schema
            drawn = [drawn_limits(schema, part, self._config, self._number) for part in sound]
            order = self._order(shard, window, sound, drawn, kept)
            assert len(order) == len(kept)
            whole = limits_of(schema, self._config.max_length)
            limits = [whole if most is None else most for most in drawn]
            rows = join(schema, sound, limits) if sound else None
            held = self._held[shard] = _Held(number=window, rows=rows, order=order)
        return held

    def _read(self, group: Group, read: Read) -> Rows | None:
        try:
            return read()
        except DataError as error:
            if self._on_damage is None:
                raise
            self._on_damage(error, group.rows)
            return None

    def _all_or_none(self, groups: Sequence[Group], parts: list[Rows | None]) -> list[Rows | None]:
        """With base batches, nothing of a window of which a group is damaged; see the module docstring."""
        damaged = [group for group, part in zip(groups, parts, strict=True) if part is None]
        if self._config.base_batch is None or not damaged:
            return parts
        assert self._on_damage is not None
        files = self._shards.schema.files
        first = damaged[0]
        for group, part in zip(groups, parts, strict=True):
            if part is not None:
                error = DataError(
                    f"{files[group.file].path}, row group {group.group}: left out, although it is sound, beside "
                    f"{files[first.file].path}, row group {first.group}: with base batches the order of a window "
                    "follows from all of its loads. Restore the damaged one, or lower window_groups.",
                    file=files[group.file].path,
                    row_group=group.group,
                )
                self._on_damage(error, group.rows)
        return [None] * len(parts)

    def _order(
        self, shard: int, window: int, sound: Sequence[Rows], drawn: Sequence[Limits | None], kept: Kept
    ) -> Int64:
        """The plan's order, and with base batches its rows moved so that shares weigh alike (balance.py).

        Rows are counted as the plan does; the result points into the rows of the sound groups alone.
        """
        order = self._moved(shard, window, sound, drawn)
        if kept.all():
            return order
        return np.where(kept[order], (np.cumsum(kept) - 1)[order], -1)

    def _moved(self, shard: int, window: int, sound: Sequence[Rows], drawn: Sequence[Limits | None]) -> Int64:
        config, order = self._config, self._epoch.window_order(shard, window)
        if config.base_batch is None or not sound:
            return order
        schema = self._shards.schema
        cost = events_cost(schema) if config.cost is None else config.cost
        loads = np.concatenate(
            [
                loads_of(schema, rows, cost, max_length=config.max_length, drawn=most)
                for rows, most in zip(sound, drawn, strict=True)
            ]
        )
        moved = base_batch_order(
            loads[order],
            base_batch=config.base_batch,
            share=config.global_batch_size // config.logical_shards,
            first=self._epoch.window_start(shard, window),
            pool=config.base_pool,
            key=(config.seed, self._number, PAIRS, shard, window),
        )
        return order[moved]
