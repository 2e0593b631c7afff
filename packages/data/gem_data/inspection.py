"""inspect_dataset: what is in a data set, in numbers that a person or a report can show. One pass of reading."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gem_data.interface import Schema
from gem_data.remote import RemotePath
from gem_data.rows import Int64, Rows
from gem_data.schema import SPLITS, impression_part, read_schema, request_part
from gem_data.shards import Shards

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
# Ids are counted with one byte an id; beyond this many rows a table's distinct ids are not counted.
_MAX_COUNTED_TABLE = 1 << 28


def inspect_dataset(
    directory: str | Path | RemotePath, *, check: bool = False, open_ids: Collection[str] = ()
) -> dict[str, Any]:
    """JSON-able description of the data set.

    check  also check every value, as reading for training does: then data that this function accepts cannot stop a
           run half-way, at the cost of the checks alone (the pass over the files is made anyway)
    open_ids  features whose ids may lie outside their tables, as in LoaderConfig

    {"name", "created_by", "facts", "tables": {table: rows},
     "splits": {split: {
        "rows", "files", "row_groups", "bytes", "users", "time": {"first", "last"},
        "labels": {task: {"rate", "positives", "weight_sum"}},      rate = sum(weight * label) / sum(weight), or null
        "dense": {name: {"min", "mean", "max"}},
        "lists": {name: {"total", "mean", "quantiles": {"0.5": ...}}},
        "streams": {name: {"total", "mean", "quantiles", "max_length", "cut_rows"}},  cut_rows: longer than max_length
        "tables": {table: distinct ids that occur, or null},
        "impressions": {"total", "mean", "quantiles"}}}}     only where rows are requests: of each of them

    Raises DataError for data that cannot be decoded, and with `check` for the first bad value.
    """
    schema = read_schema(directory)
    present = [split for split in SPLITS if any(file.split == split for file in schema.files)]
    return {
        "name": schema.name,
        "created_by": schema.created_by,
        "facts": schema.facts,
        "tables": schema.table_rows(),
        "splits": {
            split: _inspect_split(Shards(directory, schema, split, open_ids=open_ids), check=check) for split in present
        },
    }


class _Gathered:
    """What one pass over a split gathers."""

    def __init__(self, schema: Schema) -> None:
        self.labels = np.zeros(len(schema.labels))
        self.weighted = np.zeros(len(schema.labels))
        self.weights = np.zeros(len(schema.labels))
        self.dense: dict[str, list[npt.NDArray[np.float32]]] = {name: [] for name in schema.dense}
        self.keys: list[Int64] = []
        self.lists: dict[str, list[Int64]] = {feature.name: [] for feature in schema.lists}
        self.streams: dict[str, list[Int64]] = {stream.name: [] for stream in schema.streams}
        self.impressions: list[Int64] = []
        self.seen = {t.name: np.zeros(t.rows, bool) for t in schema.tables if t.rows <= _MAX_COUNTED_TABLE}

    def add(self, schema: Schema, rows: Rows) -> None:
        self.keys.append(rows.keys[1:])
        if rows.inner is None or rows.bounds is None:
            self._add_labels(rows)
            self._add_features(schema, rows)
            return
        self.impressions.append(np.diff(rows.bounds))
        self._add_labels(rows.inner)
        self._add_features(request_part(schema), rows)
        self._add_features(impression_part(schema), rows.inner)

    def _add_labels(self, rows: Rows) -> None:
        self.labels += rows.labels.sum(axis=0, dtype=np.float64)
        self.weighted += (rows.labels * rows.weights.astype(np.float64)).sum(axis=0)
        self.weights += rows.weights.sum(axis=0, dtype=np.float64)

    def _add_features(self, schema: Schema, rows: Rows) -> None:
        for index, name in enumerate(schema.dense):
            self.dense[name].append(rows.dense[:, index])
        for feature, jagged in zip(schema.lists, rows.lists, strict=True):
            self.lists[feature.name].append(np.diff(jagged.offsets))
        for stream, events in zip(schema.streams, rows.streams, strict=True):
            self.streams[stream.name].append(np.diff(events.offsets))
        for feature, ids in zip(schema.scalars, rows.scalars, strict=True):
            self._see(feature.table, ids)
        for feature, jagged in zip(schema.lists, rows.lists, strict=True):
            self._see(feature.table, jagged.values)
        for stream, events in zip(schema.streams, rows.streams, strict=True):
            for feature, ids in zip(stream.fields, events.columns, strict=False):
                self._see(feature.table, ids)

    def _see(self, table: str, ids: Int64) -> None:
        if table in self.seen:
            seen = self.seen[table]
            seen[ids[(ids >= 0) & (ids < len(seen))]] = True


def _inspect_split(shards: Shards, *, check: bool) -> dict[str, Any]:
    schema = shards.schema
    read = shards.read if check else shards.read_unchecked
    gathered = _Gathered(schema)
    for footer in shards.footers:
        for group in range(len(footer.group_rows)):
            gathered.add(schema, read(footer.index, group))
    keys = np.concatenate(gathered.keys, axis=1) if gathered.keys else np.empty((2, 0), np.int64)
    rows = keys.shape[1]
    streams = {}
    for stream in schema.streams:
        events = _joined(gathered.streams[stream.name])
        cut = int((events > stream.max_length).sum())
        streams[stream.name] = {**_summary(events), "max_length": stream.max_length, "cut_rows": cut}
    described = {
        "rows": rows,
        "files": len(shards.footers),
        "row_groups": sum(len(footer.group_rows) for footer in shards.footers),
        "bytes": sum(footer.bytes for footer in shards.footers),
        "users": len(np.unique(keys[0])),
        "time": {"first": int(keys[1].min()), "last": int(keys[1].max())} if rows else None,
        "labels": {
            label.name: {
                "rate": float(gathered.weighted[task] / gathered.weights[task]) if gathered.weights[task] else None,
                # a NaN label makes the sum NaN: inspection shows what can be shown, reading names the row
                "positives": int(gathered.labels[task]) if np.isfinite(gathered.labels[task]) else None,
                "weight_sum": float(gathered.weights[task]),
            }
            for task, label in enumerate(schema.labels)
        },
        "dense": {name: _range(_joined(found)) for name, found in gathered.dense.items()},
        "lists": {name: _summary(_joined(found)) for name, found in gathered.lists.items()},
        "streams": streams,
        "tables": {
            table.name: int(gathered.seen[table.name].sum()) if table.name in gathered.seen else None
            for table in schema.tables
        },
    }
    if schema.impression:
        described["impressions"] = _summary(_joined(gathered.impressions))
    return described


def _joined(parts: list[Any]) -> npt.NDArray[Any]:
    joined: npt.NDArray[Any] = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return joined


def _summary(lengths: Int64) -> dict[str, Any]:
    if not lengths.size:
        return {"total": 0, "mean": None, "quantiles": {}}
    found = np.quantile(lengths, QUANTILES)
    return {
        "total": int(lengths.sum()),
        "mean": float(lengths.mean()),
        "quantiles": {f"{share:g}": float(value) for share, value in zip(QUANTILES, found, strict=True)},
    }


def _range(values: npt.NDArray[np.float32]) -> dict[str, float | None]:
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return {"min": None, "mean": None, "max": None}
    return {"min": float(finite.min()), "mean": float(finite.mean()), "max": float(finite.max())}
