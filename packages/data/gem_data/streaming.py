"""Training in the order of time: a window of the data after the other, each evaluated on the strictly later next one.

A window is a run of whole row groups of at least `seconds`; its edges lie where the next row group begins strictly
later than the last one ends, so that no second is on both sides. That asks of the data only what a log has anyway: row
groups in the order of time (rows inside one may be in any order, and are shuffled inside the window as ever).

    row groups of seconds [0-9] [10-19] [19-30] [31-40], windows of 15 s: [0-9 10-19 19-30] [31-40]; between 19 and 19
    there can be no edge

`StreamingLoader` is a Loader whose epoch n is window n. Inside a window everything is the ordinary loader's: the order,
the ranks' parts, base batches, and a state that resumes exactly. Its own state adds the windows and refuses other ones.
A window must be trained to its end before the next one begins. With drop_last a window of fewer rows than a batch has
none, and is passed over. `later` reads it together with the one that is trained next, so that nothing is trained that
was not predicted: windows of 24, 6 and 24 rows in batches of 8 train the first, predict 30 rows and train the third.

A log may grow: a state fits data whose files begin with its own, in number, hash and order. Windows that had begun keep
their edges, so that no row is trained twice or left out; later rows make new windows, or a longer last one where it had
not begun. windows [0-9] [10-17], the second in training, and row groups [18-30] [31-40] come: [0-9] [10-17] [18-40].

Cost: footers only, read once; the bounds of a row group come from its statistics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem_data.interface import Batch, DataError, LoaderConfig
from gem_data.loader import ArrowLoader, OnDamage, warn_of_small_windows
from gem_data.remote import RemotePath
from gem_data.schema import SCHEMA_FILE, read_schema, select
from gem_data.shards import Shards
from gem_data.state import same_files
from gem_data.validation import check_config

_KEYS = ("windows", "window", "steps_before", "trained", "inside")


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
    path: str
    file: int
    group: int
    rows: int
    first: int
    last: int


def time_windows(directory: str | Path | RemotePath, *, split: str = "train", seconds: int) -> tuple[TimeWindow, ...]:
    """The windows of a split. Raises DataError where row groups are not in the order of time, or say no times."""
    return _cut(_spans(Shards(directory, read_schema(directory), split)), seconds=seconds)


def _cut(spans: Sequence[_Span], *, seconds: int, begun: Sequence[Any] = ()) -> tuple[TimeWindow, ...]:
    """begun: rows of the first windows, which keep their edges."""
    if seconds < 1:
        raise ValueError(f"seconds: expected at least 1, came {seconds}")
    held: list[list[_Span]] = []
    rows, last = 0, spans[0].first if spans else 0
    for span in spans:
        if held and span.first < last:
            raise _not_before(span, last, "Streaming needs row groups in the order of time: sort the rows by timestamp")
        kept = bool(held) and len(held) <= len(begun)
        if kept and rows >= begun[len(held) - 1]:
            if span.first == last:
                raise _not_before(span, last + 1, "A window that has begun ends there: append rows that are later")
            held, rows = [*held, [span]], span.rows
        elif kept or (held and (span.first == last or span.first < held[-1][0].first + seconds)):
            held[-1].append(span)
            rows += span.rows
        else:
            held.append([span])
            rows = span.rows
        last = max(last, span.last)
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


def _not_before(span: _Span, second: int, todo: str) -> DataError:
    return DataError(
        f"{span.path}, row group {span.group}: expected rows not before second {second}, where the one before it ends, "
        f"came second {span.first}. {todo} and write them again.",
        file=span.path,
        row_group=span.group,
        column="timestamp",
    )


def _spans(shards: Shards) -> tuple[_Span, ...]:
    found = []
    for footer in shards.footers:
        for group, rows in enumerate(footer.group_rows):
            if not rows:
                continue
            seconds = footer.seconds(group)
            if seconds is None:
                raise DataError(
                    f"{footer.info.path}, row group {group}: expected statistics of column timestamp, came none. "
                    "Write the data set with write_dataset, which keeps them.",
                    file=footer.info.path,
                    row_group=group,
                    column="timestamp",
                )
            first, last = seconds
            found.append(
                _Span(path=footer.info.path, file=footer.index, group=group, rows=rows, first=first, last=last)
            )
    return tuple(found)


class StreamingLoader:
    """gem_data.interface.Loader over time windows: epoch n is window n, and after the last there are no more.

    windows                           all of them
    batches_by_window                 global batches of each; with drop_last a window may have none
    window                            index of the one that is read now
    first_step                        step of its first batch
    at_edge                           whether it has been trained to its end
    ahead                             the windows after it, to the one that is trained next: what `later` reads
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
        """Reads footers. Raises DataError or ValueError as ArrowLoader and time_windows do, and DataError where no
        window has a batch.

        on_damage: as in build_loader, for what is trained and for `later` loaders
        """
        check_config(config, rank=rank, world_size=world_size)
        self._directory, self._split, self._config, self._seconds = directory, split, config, seconds
        self._rank, self._world_size, self._on_damage = rank, world_size, on_damage
        schema = select(read_schema(directory), features=config.features, labels=config.labels)
        self._shards = Shards(directory, schema, split, open_ids=config.open_ids)
        self._spans = _spans(self._shards)
        self.windows = _cut(self._spans, seconds=seconds)
        self.window, self._offset, self._trained = self._next(0), 0, 0
        self._inner = self._open(self.windows[self.window].groups)
        warn_of_small_windows(self._inner)
        self.schema = self._inner.schema

    @property
    def batches_by_window(self) -> tuple[int, ...]:
        """See the class."""
        return self._batches_of(self.windows)

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

    @property
    def ahead(self) -> tuple[TimeWindow, ...]:
        """The windows after the present one, to the one that is trained next; all of them where none is."""
        batches = self.batches_by_window
        following = range(self.window + 1, len(self.windows))
        trained = next((index for index in following if batches[index]), len(self.windows) - 1)
        return self.windows[self.window + 1 : trained + 1]

    def epoch(self) -> Iterator[Batch]:
        """What is left of the present window; of the next one, if the present one has been trained to its end.

        Raises ValueError where that has been read but not trained, and StopIteration at once after the last window.
        """
        if self.at_edge and any(self.batches_by_window[self.window + 1 :]):
            self._enter(self._next(self.window + 1))
        if self.at_edge:
            return iter(())
        return self._batches(self._inner, self._offset)

    def mark_trained(self, batch: Batch) -> None:
        """See gem_data.interface.Loader."""
        self._inner.mark_trained(dataclasses.replace(batch, step=batch.step - self._offset))
        self._trained = batch.step - self._offset + 1

    def later(self, config: LoaderConfig) -> ArrowLoader | None:
        """A loader of the windows `ahead`: every row strictly later. None after the last window.

        It leaves out the row groups that cannot be used, where training does (on_damage).
        """
        groups = tuple(group for window in self.ahead for group in window.groups)
        return self._open(groups, config) if groups else None

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the windows, the steps before the present one, and the position inside it."""
        return {
            "windows": [[window.first, window.last, window.rows] for window in self.windows],
            "window": self.window,
            "steps_before": self._offset,
            "trained": self._trained,
            "inside": self._inner.state_dict(),  # at the edge: the start of a second pass, which never comes
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises DataError, and then changes nothing, where windows or data differ; data that
        have only grown fit, see the module.
        """
        _check_form(state)
        window, before, trained = state["window"], state["steps_before"], state["trained"]
        windows = self._windows_of(state)
        inner = self._open(windows[window].groups)
        grown = [windows[window].first, windows[window].last, windows[window].rows] != state["windows"][window]
        inside = state["inside"]
        if inside is not None:  # states of gem_data 1.6 and before have none at an edge
            fresh = inner.state_dict()
            if isinstance(inside, Mapping) and "files" in inside:
                same_files(inside["files"], fresh["files"], grown=True)
                inside = {**inside, "files": fresh["files"], **({"shards": fresh["shards"]} if grown else {})}
            inner.load_state_dict(inside)
        elif trained != inner.batches_per_epoch:
            raise DataError(f"loader state: trained: expected {inner.batches_per_epoch}, came {trained!r}.")
        steps = sum(self._batches_of(windows)[:window])
        if before != steps or not 0 <= trained <= inner.batches_per_epoch:
            raise DataError(
                f"loader state: steps_before and trained: expected {steps} and at most {inner.batches_per_epoch}, came "
                f"{before} and {trained}."
            )
        self._inner.close()
        self._inner, self.windows, self.window = inner, windows, window
        self._offset, self._trained = before, trained

    def close(self) -> None:
        """See gem_data.interface.Loader."""
        self._inner.close()

    def _windows_of(self, state: Mapping[str, Any]) -> tuple[TimeWindow, ...]:
        """The windows of the data as they are now, those of `state` that had begun with their edges."""
        described, count = state["windows"], state["window"] + (state["trained"] > 0)
        windows = _cut(self._spans, seconds=self._seconds, begun=[rows for _, _, rows in described[:count]])
        now = [[window.first, window.last, window.rows] for window in windows[: len(described)]]
        fits = now == described
        if not fits and len(now) == len(described) > count and now[:-1] == described[:-1]:
            (first, last, rows), (old_first, old_last, old_rows) = now[-1], described[-1]
            fits = first == old_first and last >= old_last and rows > old_rows
        if not fits:
            raise DataError(
                "loader state: windows: they are not those of this loader. Resume with the same data, to which later "
                "rows may have been appended, and with the same seconds."
            )
        return windows

    def _batches_of(self, windows: Sequence[TimeWindow]) -> tuple[int, ...]:
        size, up = self._config.global_batch_size, not self._config.drop_last
        return tuple((window.rows + up * (size - 1)) // size for window in windows)

    def _next(self, window: int) -> int:
        """The first window from `window` on that has a batch."""
        for index, batches in enumerate(self.batches_by_window[window:], start=window):
            if batches:
                return index
        most = max((window.rows for window in self.windows), default=0)
        raise DataError(
            f'{self._shards.directory / SCHEMA_FILE}: split "{self._split}": expected a window with rows for at least '
            f"one batch, came {len(self.windows)} windows of at most {most} rows (global_batch_size "
            f"{self._config.global_batch_size}, drop_last {self._config.drop_last}). Lower global_batch_size, turn "
            "drop_last off or make windows longer.",
            file=SCHEMA_FILE,
        )

    def _enter(self, window: int) -> None:
        inner = self._open(self.windows[window].groups)
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

    def _open(self, groups: Sequence[tuple[int, int]], config: LoaderConfig | None = None) -> ArrowLoader:
        own = self._config
        other = config is not None and (
            (config.features, config.labels, config.open_ids) != (own.features, own.labels, own.open_ids)
        )
        return ArrowLoader(
            self._directory,
            split=self._split,
            config=config or own,
            rank=self._rank,
            world_size=self._world_size,
            only=groups,
            shards=None if other else self._shards,
            on_damage=self._on_damage,
        )


def _check_form(state: Any) -> None:
    if not isinstance(state, Mapping) or set(state) != set(_KEYS):
        raise DataError(f"loader state: expected an object with the keys {', '.join(_KEYS)}, came {state!r:.80}.")
    for key in ("window", "steps_before", "trained"):
        if type(state[key]) is not int or state[key] < 0:
            raise DataError(f"loader state: {key}: expected a whole number >= 0, came {state[key]!r:.80}.")
    windows = state["windows"]
    described = isinstance(windows, list) and all(
        isinstance(window, list) and len(window) == 3 and all(type(value) is int for value in window)
        for window in windows
    )
    if not described or state["window"] >= len(windows):
        raise DataError(
            f"loader state: windows: expected [first, last, rows] of more than {state['window']} windows, came "
            f"{windows!r:.80}."
        )
