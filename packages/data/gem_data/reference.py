"""The definition of the loader, in plain Python: rows as dicts, batches as lists, no arithmetic on buffers.

Everything that is fast elsewhere is written here a second time and as plainly as possible: the order of an epoch
(batching.py's six rules, in Python integers), the collation (one list per feature), the checks of values (one row at a
time) and the state (a whole epoch's batches are listed and counted). It reads the whole split into memory and is for
tests only; `testing.conformance_cases` and the tests hold the fast loader against it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import xxhash
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_data.batching import ORDER_VERSION
from gem_data.cost import cost_to_dict
from gem_data.interface import Batch, DataError, EventStream, LoaderConfig, Schema
from gem_data.reference_balance import reference_base_order, reference_load
from gem_data.rows import Where, check_types
from gem_data.schema import columns, is_impression, read_schema, select, stream_columns
from gem_data.validation import check_config, check_open_ids

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

Row = dict[str, Any]
Place = tuple[int, int, int]


class ReferenceLoader:
    """gem_data.interface.Loader, slow and plain. Without reading ahead, so `prefetch` and `readers` do nothing."""

    def __init__(
        self, directory: str | Path, *, split: str, config: LoaderConfig, rank: int = 0, world_size: int = 1
    ) -> None:
        check_config(config, rank=rank, world_size=world_size)
        self.schema = select(read_schema(directory), features=config.features, labels=config.labels)
        self._config, self._split, self._rank, self._world_size = config, split, rank, world_size
        check_open_ids(config.open_ids, self.schema)
        self._rows, self._files = _read_rows(Path(directory), self.schema, split, config.open_ids)
        rows, size = len(self._rows), config.global_batch_size
        self.batches_per_epoch = rows // size if config.drop_last else math.ceil(rows / size)
        self.rows_per_epoch = self.batches_per_epoch * size if config.drop_last else rows
        if not self.batches_per_epoch:
            raise DataError(f"{directory}: {rows} rows make no batch of {size}.")
        self._yielded = self._trained = 0
        self._iterators = 0

    def epoch(self) -> Iterator[Batch]:
        """See interface.Loader."""
        self._iterators += 1
        return self._batches(self._iterators)

    def _batches(self, iterator: int) -> Iterator[Batch]:
        epoch = self._yielded // self.batches_per_epoch
        batches = self._epoch_batches(epoch)
        while True:
            if iterator != self._iterators:
                raise ValueError("this iterator over an epoch has ended")
            step = self._yielded
            if step // self.batches_per_epoch != epoch:
                return
            places = [place for share in batches[step % self.batches_per_epoch] for place in share]
            n, r, w = len(places), self._rank, self._world_size
            own = places[r * n // w : (r + 1) * n // w]
            rows = [self._cut(self._rows[place], place, epoch) for place in own]
            batch = reference_collate(self.schema, rows, own, self._config.max_length, n, step)
            self._yielded = step + 1
            yield batch

    def _cut(self, row: Row, place: Place, epoch: int) -> Row:
        return reference_stochastic_cut(self.schema, row, place, self._config, epoch)

    def mark_trained(self, batch: Batch) -> None:
        """See interface.Loader."""
        if not self._trained <= batch.step < self._yielded:
            raise ValueError(f"mark_trained: step {batch.step} was not yielded or is trained already")
        self._trained = batch.step + 1

    def state_dict(self) -> dict[str, Any]:
        """See interface.Loader."""
        return self._state_at(self._trained)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See interface.Loader."""
        step = state.get("step") if isinstance(state, Mapping) else None
        if type(step) is not int or step < 0 or self._state_at(step) != state:
            raise DataError("loader state: it is not the state of this loader at any step.")
        self._yielded = self._trained = step
        self._iterators += 1

    def close(self) -> None:
        """See interface.Loader."""
        self._iterators += 1

    def _epoch_batches(self, epoch: int) -> list[list[list[Place]]]:
        move = None if self._config.base_batch is None else self._move_base_batches
        return reference_epoch([(f, g, n) for f, g, n in _groups(self._rows)], self._config, epoch, move)

    def _move_base_batches(self, held: list[Place], first: int, key: tuple[int, ...]) -> list[Place]:
        config = self._config
        rows = [self._cut(self._rows[place], place, key[1]) for place in held]
        loads = [reference_load(self.schema, row, config.cost, config.max_length) for row in rows]
        order = reference_base_order(
            loads, config, first=first, permute=lambda count, start: reference_permutation(count, *key, start)
        )
        return [held[index] for index in order]

    def _state_at(self, step: int) -> dict[str, Any]:
        epoch, done = divmod(step, self.batches_per_epoch)
        shards = reference_shards(_groups(self._rows), self._config, epoch)
        taken = [0] * len(shards)
        for batch in self._epoch_batches(epoch)[:done]:
            for shard, share in enumerate(batch):
                taken[shard] += len(share)
        places = []
        for order, count in zip(shards, taken, strict=True):
            place = order[count] if count < len(order) else None
            file, group, row = (None, None, None) if place is None else place
            path = None if file is None else self.schema.files[file].path
            places.append({"rows_read": count, "file": path, "row_group": group, "row": row})
        config = dataclasses.asdict(self._config)
        del config["prefetch"], config["readers"], config["open_ids"]
        config |= {"features": list(config["features"]), "labels": list(config["labels"])}
        if self._config.cost is not None:
            config["cost"] = cost_to_dict(self._config.cost)
        return {
            "order_version": ORDER_VERSION,
            "split": self._split,
            "files": self._files,
            "config": config,
            "epoch": epoch,
            "step": step,
            "samples": epoch * self.rows_per_epoch + sum(taken),
            "shards": places,
        }


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _hash(*key: int) -> int:
    start = 0
    for part in key:
        start = _mix(((start + _GOLDEN) & _MASK) ^ _mix(part + _GOLDEN))
    return start


def reference_permutation(count: int, *key: int) -> list[int]:
    """0..count-1 sorted by the splitmix64 hash of a counter that starts at the hash of `key`."""
    start = _hash(*key)
    return sorted(range(count), key=lambda index: _mix(start + index * _GOLDEN))


def reference_stochastic_cut(schema: Schema, row: Row, place: Place, config: LoaderConfig, epoch: int) -> Row:
    """The row with its streams cut by stochastic length: lengths.py, one list at a time."""
    alpha = config.stochastic_length
    if alpha is None:
        return row
    cut = dict(row)
    for stream in schema.streams:
        longest = stream.max_length if config.max_length is None else min(stream.max_length, config.max_length)
        short = int(longest ** (alpha / 2))
        length = min(len(row[f"stream.{stream.name}.time"]), longest)
        drawn = (_hash(config.seed, epoch, 4, xxhash.xxh3_64_intdigest(stream.name.encode()), *place) >> 11) * 2.0**-53
        if length > short and drawn * length**2 >= longest**alpha:
            for name in stream_columns(stream):
                cut[name] = row[name][len(row[name]) - short :]
    return cut


Move = Callable[[list[Place], int, tuple[int, ...]], list[Place]]
"""(a window's rows, rows of the shard before them, the key of their permutations) -> the rows in another order."""


def reference_shards(
    groups: list[Place], config: LoaderConfig, epoch: int, move: Move | None = None
) -> list[list[Place]]:
    """The order of the rows of every logical shard: rules 1 to 4 of batching.py. `groups`: (file, group, rows)."""
    order = reference_permutation(len(groups), config.seed, epoch, 1) if config.shuffle else range(len(groups))
    dealt: list[list[Place]] = [[] for _ in range(config.logical_shards)]
    for index in order:
        min(dealt, key=lambda shard: sum(rows for _, _, rows in shard)).append(groups[index])
    result = []
    for number, shard in enumerate(dealt):
        rows: list[Place] = []
        width = config.window_groups if config.shuffle else 1
        for window, start in enumerate(range(0, len(shard), width)):
            held = [(file, group, row) for file, group, count in shard[start : start + width] for row in range(count)]
            if config.shuffle:
                held = [held[i] for i in reference_permutation(len(held), config.seed, epoch, 2, number, window)]
            if move is not None:
                held = move(held, len(rows), (config.seed, epoch, 3, number, window))
            rows += held
        result.append(rows)
    return result


def reference_epoch(
    groups: list[Place], config: LoaderConfig, epoch: int, move: Move | None = None
) -> list[list[list[Place]]]:
    """Global batches of an epoch, each as the shares of the shards: rule 5, one row at a time."""
    shards = reference_shards(groups, config, epoch, move)
    taken = [0] * len(shards)
    batches = []
    while any(taken[s] < len(shards[s]) for s in range(len(shards))):
        left = [len(shards[s]) - taken[s] for s in range(len(shards))]
        count = min(config.global_batch_size, sum(left))
        if config.drop_last and count < config.global_batch_size:
            break
        given = [0] * len(shards)
        for _ in range(count):
            # The next row comes from the shard that gave the fewest; among these from the one with the most left.
            able = [s for s in range(len(shards)) if given[s] < left[s]]
            shard = min(able, key=lambda s: (given[s], given[s] - left[s], s))
            given[shard] += 1
        batches.append([shards[s][taken[s] : taken[s] + given[s]] for s in range(len(shards))])
        taken = [taken[s] + given[s] for s in range(len(shards))]
    return batches


def reference_collate(
    schema: Schema, rows: list[Row], places: list[Place], max_length: int | None, global_rows: int, step: int
) -> Batch:
    """A Batch from rows as dicts of Python values."""
    groups = [plain_rows(schema, row) for row in rows]
    each = [row for group in groups for row in group]
    is_first = [number == 0 for group in groups for number in range(len(group))]
    once = schema.request_keys()

    def laid(key: str, lists: list[list[int]]) -> list[list[int]]:
        """Ids of every impression; what stands once in a request is the first one's."""
        return [own if key not in once or first else [] for own, first in zip(lists, is_first, strict=True)]

    ids: list[list[list[int]]] = [laid(f.name, [[row[f"id.{f.name}"]] for row in each]) for f in schema.scalars]
    ids += [laid(f.name, [row[f"ids.{f.name}"] for row in each]) for f in schema.lists]
    streams = {}
    for stream in schema.streams:
        limit = stream.max_length if max_length is None else min(stream.max_length, max_length)

        def latest(name: str, of: list[Row], stream: str = stream.name, limit: int = limit) -> list[list[int]]:
            lists = [row[f"stream.{stream}.{name}"] for row in of]
            return [events[max(len(events) - limit, 0) :] for events in lists]

        ids += [laid(f"{stream.name}.{f.name}", latest(f.name, each)) for f in stream.fields]
        actions, times, offsets = latest("action", rows), latest("time", rows), [0]
        for events in times:
            offsets.append(offsets[-1] + len(events))
        streams[stream.name] = EventStream(
            offsets=_int64(offsets),
            actions=_int64([action for events in actions for action in events]),
            times=_int64([time for events in times for time in events]),
        )
    labels = [[row[f"label.{label.name}"] for label in schema.labels] for row in each]
    weights = [[row[f"weight.{label.name}"] if label.weighted else 1 for label in schema.labels] for row in each]
    dense = [[row[f"dense.{name}"] for name in schema.dense] for row in each]
    origins = [list(place) for place, group in zip(places, groups, strict=True) for _ in group]
    requests = None
    if schema.impression:
        requests = _int64([sum(len(group) for group in groups[:number]) for number in range(len(groups) + 1)])
    return Batch(
        sample_ids=_int64([row["sample_id"] for row in each]),
        user_ids=_int64([row["user_id"] for row in each]),
        timestamps=_int64([row["timestamp"] for row in each]),
        labels=torch.tensor(labels, dtype=torch.float32).reshape(len(each), len(schema.labels)),
        weights=torch.tensor(weights, dtype=torch.float32).reshape(len(each), len(schema.labels)),
        dense=torch.tensor(dense, dtype=torch.float32).reshape(len(each), len(schema.dense)),
        ids=KeyedJaggedTensor(
            keys=[key for key, _ in schema.id_features()],
            values=_int64([value for feature in ids for events in feature for value in events]),
            lengths=_int64([len(events) for feature in ids for events in feature]),
            stride=len(each),
        ),
        streams=streams,
        row_index=_int64(origins).reshape(len(each), 3),
        global_rows=global_rows,
        step=step,
        requests=requests,
    )


def plain_rows(schema: Schema, row: Row) -> list[Row]:
    """The impressions of a row as plain rows, each with its request's part; of plain data the row itself."""
    if not schema.impression:
        return [row]
    return [
        {name: value[number] if is_impression(schema, name) else value for name, value in row.items()}
        for number in range(len(row["sample_id"]))
    ]


def _int64(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _groups(rows: Mapping[Place, Row]) -> list[Place]:
    counts: dict[tuple[int, int], int] = {}
    for file, group, _ in rows:
        counts[file, group] = counts.get((file, group), 0) + 1
    return [(file, group, count) for (file, group), count in counts.items()]


def _read_rows(
    directory: Path, schema: Schema, split: str, open_ids: Collection[str]
) -> tuple[dict[Place, Row], list[dict[str, Any]]]:
    rows: dict[Place, Row] = {}
    files = []
    names = [column.name for column in columns(schema)]
    for index, info in enumerate(schema.files):
        if info.split != split:
            continue
        path = directory / info.path
        try:
            file = pq.ParquetFile(path, page_checksum_verification=True)
        except (OSError, ValueError) as error:
            raise DataError(f"{info.path}: cannot be read: {error}", file=info.path) from error
        check_types(schema, file.schema_arrow, Where(file=info.path))
        for group in range(file.num_row_groups):
            where = Where(file=info.path, row_group=group)
            lists = [_column(file, group, name, where) for name in names]
            for number, values in enumerate(zip(*lists, strict=True)):
                row = dict(zip(names, values, strict=True))
                check_request(schema, row, where, number)
                for one in plain_rows(schema, row):
                    check_row(schema, one, where, number, open_ids)
                rows[index, group, number] = row
        if file.metadata.num_rows != info.rows:
            raise DataError(f"{info.path}: {info.rows} rows expected, came {file.metadata.num_rows}", file=info.path)
        files.append(
            {
                "path": info.path,
                "rows": info.rows,
                "bytes": path.stat().st_size,
                "row_groups": file.num_row_groups,
                "xxh3": info.xxh3,
            }
        )
    if not files:
        raise DataError(f'{directory}: no files of split "{split}".')
    return rows, files


def _column(file: pq.ParquetFile, group: int, name: str, where: Where) -> list[Any]:
    try:
        return list(file.read_row_group(group, columns=[name]).column(name).to_pylist())
    except (OSError, ValueError) as error:
        raise where.error(column=name, expected="readable pages", came=f"{error}", todo="Restore the file.") from error


def check_request(schema: Schema, row: Row, where: Where, number: int) -> None:
    """A request has at least one impression, and one entry for each wherever impressions have something."""
    for name, value in row.items() if schema.impression else ():
        if not is_impression(schema, name):
            continue
        bad = value is None or not value or len(value) != len(row["sample_id"] or ())
        if bad:
            raise where.error(
                column=name,
                row=number,
                expected="a list as long as sample_id, of one entry or more",
                came=f"{value!r}",
                todo="Fix the row.",
            )


def check_row(schema: Schema, row: Row, where: Where, number: int, open_ids: Collection[str] = ()) -> None:
    """Every rule of the layout for one row; the first broken one raises DataError. open_ids: LoaderConfig."""

    def expect(valid: bool, column: str, expected: str) -> None:
        if not valid:
            raise where.error(
                column=column, row=number, expected=expected, came=f"{row[column]!r}", todo="Fix the row."
            )

    def in_table(ids: list[int], key: str, table: str) -> bool:
        return key in open_ids or all(0 <= i < tables[table] for i in ids)

    tables = schema.table_rows()
    for name, value in row.items():
        expect(value is not None and not (isinstance(value, list) and None in value), name, "no null")
    for label in schema.labels:
        expect(row[f"label.{label.name}"] in (0.0, 1.0), f"label.{label.name}", "0 or 1")
        if label.weighted:
            expect(0 <= row[f"weight.{label.name}"] < math.inf, f"weight.{label.name}", "a finite number >= 0")
    for feature in schema.scalars:
        ids = [row[f"id.{feature.name}"]]
        expect(in_table(ids, feature.name, feature.table), f"id.{feature.name}", "an id of its table")
    for feature in schema.lists:
        ids = row[f"ids.{feature.name}"]
        expect(in_table(ids, feature.name, feature.table), f"ids.{feature.name}", "ids of their table")
    for name in schema.dense:
        expect(math.isfinite(row[f"dense.{name}"]), f"dense.{name}", "a finite number")
    for stream in schema.streams:
        prefix = f"stream.{stream.name}"
        first = row[f"{prefix}.{stream.fields[0].name}"]
        for part in (*(f.name for f in stream.fields), "action", "time"):
            expect(len(row[f"{prefix}.{part}"]) == len(first), f"{prefix}.{part}", f"{len(first)} events")
        for feature in stream.fields:
            ids = row[f"{prefix}.{feature.name}"]
            known = in_table(ids, f"{stream.name}.{feature.name}", feature.table)
            expect(known, f"{prefix}.{feature.name}", "ids of their table")
        actions, times = row[f"{prefix}.action"], row[f"{prefix}.time"]
        expect(all(0 <= a < 1 << stream.action_bits for a in actions), f"{prefix}.action", "a mask of its bits")
        expect(times == sorted(times), f"{prefix}.time", "times that do not decrease")
        expect(all(time < row["timestamp"] for time in times), f"{prefix}.time", "times before the timestamp")
