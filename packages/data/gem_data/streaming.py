"""Training in the order of time: a window of the data after the other, each evaluated on the strictly later next one.

A window is a run of whole row groups of at least `seconds`; its edges lie where the next row group begins strictly
later than the last one ends, so that no second is on both sides. That asks of the data only what a log has anyway: row
groups in the order of time (rows inside one may be in any order, and are shuffled inside the window as ever).

    row groups of seconds [0-9] [10-19] [19-30] [31-40], windows of 15 s: [0-9 10-19 19-30] [31-40]; between 19 and 19
    there can be no edge

`StreamingLoader` is a Loader whose epoch n is window n. Inside a window everything is the ordinary loader's: the order,
the ranks' parts, base batches, and a state that resumes exactly. Its own state adds the window and refuses other ones.
A window must be trained to its end before the next one begins.

Cost: footers only; the bounds of a row group come from its statistics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem_data.interface import Batch, DataError, LoaderConfig
from gem_data.loader import ArrowLoader, OnDamage
from gem_data.remote import RemotePath
from gem_data.schema import read_schema
from gem_data.shards import Shards


@dataclass(frozen=True, kw_only=True)
class TimeWindow:
    """Row groups (file, row group) with rows of seconds first..last."""

    index: int
    first: int
    last: int
    rows: int
    groups: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class _Span:
    file: int
    group: int
    rows: int
    first: int
    last: int


def time_windows(directory: str | Path | RemotePath, *, split: str = "train", seconds: int) -> tuple[TimeWindow, ...]:
    """The windows of a split. Raises DataError where row groups are not in the order of time, or say no times."""
    if seconds < 1:
        raise ValueError(f"seconds: expected at least 1, came {seconds}")
    shards = Shards(directory, read_schema(directory), split)
    held: list[list[_Span]] = []
    for span in _spans(shards):
        last = max(s.last for s in held[-1]) if held else span.first
        if held and span.first < last:
            path = shards.schema.files[span.file].path
            raise DataError(
                f"{path}, row group {span.group}: expected rows not before second {last}, where the one before "
                f"it ends, came second {span.first}. Streaming needs row groups in the order of time: sort the rows by "
                "timestamp and write them again.",
                file=path,
                row_group=span.group,
                column="timestamp",
            )
        if held and (span.first == last or span.first < held[-1][0].first + seconds):
            held[-1].append(span)
        else:
            held.append([span])
    return tuple(
        TimeWindow(
            index=index,
            first=min(s.first for s in spans),
            last=max(s.last for s in spans),
            rows=sum(s.rows for s in spans),
            groups=tuple((s.file, s.group) for s in spans),
        )
        for index, spans in enumerate(held)
    )


def _spans(shards: Shards) -> Iterator[_Span]:
    for footer in shards.footers:
        for group, rows in enumerate(footer.group_rows):
            if not rows:
                continue
            metadata = footer.metadata.row_group(group)
            names = [metadata.column(i).path_in_schema for i in range(metadata.num_columns)]
            statistics = metadata.column(names.index("timestamp")).statistics
            if statistics is None or not statistics.has_min_max:
                raise DataError(
                    f"{footer.info.path}, row group {group}: expected statistics of column timestamp, came none. "
                    "Write the data set with write_dataset, which keeps them.",
                    file=footer.info.path,
                    row_group=group,
                    column="timestamp",
                )
            yield _Span(file=footer.index, group=group, rows=rows, first=int(statistics.min), last=int(statistics.max))


class StreamingLoader:
    """gem_data.interface.Loader over time windows: epoch n is window n, and after the last there are no more.

    windows                           all of them
    batches_by_window                 global batches of each
    window                            index of the one that is read now
    first_step                        step of its first batch
    at_edge                           whether it has been trained to its end
    rows_per_epoch, batches_per_epoch of that window
    """

    def __init__(
        self,
        directory: str | Path | RemotePath,
        *,
        seconds: int,
        config: LoaderConfig,
        split: str = "train",
        rank: int = 0,
        world_size: int = 1,
        on_damage: OnDamage | None = None,
    ) -> None:
        """Reads footers. Raises DataError or ValueError as ArrowLoader and time_windows do.

        on_damage: as in build_loader, for what is trained; `later` loaders have none
        """
        self._directory, self._split, self._config = directory, split, config
        self._rank, self._world_size, self._on_damage = rank, world_size, on_damage
        self.windows = time_windows(directory, split=split, seconds=seconds)
        size, up = config.global_batch_size, not config.drop_last
        self.batches_by_window = tuple((window.rows + up * (size - 1)) // size for window in self.windows)
        self.window, self._offset, self._trained = 0, 0, 0
        self._inner = self._open(0)
        self.schema = self._inner.schema

    @property
    def rows_per_epoch(self) -> int:
        """Rows that the present window yields over all ranks."""
        return self._inner.rows_per_epoch

    @property
    def batches_per_epoch(self) -> int:
        """Global batches of the present window."""
        return self._inner.batches_per_epoch

    @property
    def first_step(self) -> int:
        """Step of the first batch of the present window."""
        return self._offset

    @property
    def at_edge(self) -> bool:
        """Whether every batch of the present window is trained."""
        return self._trained == self.batches_per_epoch

    def epoch(self) -> Iterator[Batch]:
        """What is left of the present window; of the next one, if the present one has been trained to its end.

        Raises ValueError where that has been read but not trained, and StopIteration at once after the last window.
        """
        while self._trained == self.batches_per_epoch and self.window + 1 < len(self.windows):
            self._enter(self.window + 1)
        if self._trained == self.batches_per_epoch:
            return iter(())
        return self._batches(self._inner, self._offset)

    def mark_trained(self, batch: Batch) -> None:
        """See gem_data.interface.Loader."""
        self._inner.mark_trained(dataclasses.replace(batch, step=batch.step - self._offset))
        self._trained = batch.step - self._offset + 1

    def later(self, config: LoaderConfig) -> ArrowLoader | None:
        """A loader of the window after the present one: every row strictly later. None after the last window."""
        return self._open(self.window + 1, config) if self.window + 1 < len(self.windows) else None

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the window, the steps before it, and the position inside it."""
        return {
            "windows": self._described(),
            "window": self.window,
            "steps_before": self._offset,
            "trained": self._trained,
            # At its end the inner loader is at the start of a second pass, which never comes.
            "inside": None if self._trained == self.batches_per_epoch else self._inner.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises DataError, and then changes nothing, where windows or data differ."""
        keys = ("windows", "window", "steps_before", "trained", "inside")
        if not isinstance(state, Mapping) or set(state) != set(keys):
            raise DataError(f"loader state: expected an object with the keys {', '.join(keys)}, came {state!r:.80}.")
        if state["windows"] != self._described():
            raise DataError(
                "loader state: windows: they are not those of this loader. Resume with the same data and seconds."
            )
        inner = self._open(state["window"])
        if state["inside"] is not None:
            inner.load_state_dict(state["inside"])
        elif state["trained"] != inner.batches_per_epoch:
            raise DataError(f"loader state: trained: expected {inner.batches_per_epoch}, came {state['trained']!r}.")
        self._inner.close()
        self._inner, self.window = inner, state["window"]
        self._offset, self._trained = state["steps_before"], state["trained"]

    def close(self) -> None:
        """See gem_data.interface.Loader."""
        self._inner.close()

    def _enter(self, window: int) -> None:
        inner = self._open(window)
        self._inner.close()
        self._offset += self._inner.batches_per_epoch
        self._inner, self.window, self._trained = inner, window, 0

    def _batches(self, inner: ArrowLoader, offset: int) -> Iterator[Batch]:
        if inner.at_end_of_first_epoch():
            raise ValueError(
                f"epoch: window {self.window} has been read to its end, but only {self._trained} of its "
                f"{self.batches_per_epoch} batches were marked as trained; the next window begins after all of it"
            )
        for batch in inner.epoch():
            yield dataclasses.replace(batch, step=batch.step + offset)

    def _open(self, window: int, config: LoaderConfig | None = None) -> ArrowLoader:
        return ArrowLoader(
            self._directory,
            split=self._split,
            config=config or self._config,
            rank=self._rank,
            world_size=self._world_size,
            only=self.windows[window].groups,
            on_damage=self._on_damage if config is None else None,
        )

    def _described(self) -> list[list[int]]:
        return [[window.first, window.last, window.rows] for window in self.windows]
