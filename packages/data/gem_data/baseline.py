"""What people write first: torch's DataLoader over rows, with a straightforward collate. A yardstick, not to be used.

Two readings of "straightforward", both in this process (`num_workers=0`, so that a core is compared with a core), both
reading the same columns of the same files into the same tensors (KeyedJaggedTensor, streams, labels):

    lists    rows are Python values, `table.to_pylist()`, and collate calls torch.tensor: the way of most examples
    slices   rows are numpy slices of the columns' flat values, and collate concatenates them: as good as a row-by-row
             dataset gets

Shuffled alike (RandomSampler), all columns, lists cut to the schema's limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_data.interface import Schema
from gem_data.schema import columns, read_schema
from gem_data.shards import Shards

KINDS = ("lists", "slices")


class RowDataset(Dataset[dict[str, Any]]):
    """All rows of a split in memory, one at a time."""

    def __init__(self, directory: str | Path, *, split: str, kind: str) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {KINDS}, came {kind!r}")
        self.schema: Schema = read_schema(directory)
        shards = Shards(directory, self.schema, split)
        groups = [(footer.index, group) for footer in shards.footers for group in range(len(footer.group_rows))]
        self._kind = kind
        self._rows: list[dict[str, Any]] = []
        self._groups: list[dict[str, Any]] = []
        self._starts = [0]
        for file, group in groups:
            table = shards.read_table(file, group)
            self._starts.append(self._starts[-1] + table.num_rows)
            if kind == "lists":
                self._rows += table.to_pylist()
            else:
                arrays = {}
                for name in table.column_names:
                    column = table.column(name).combine_chunks()
                    jagged = hasattr(column, "offsets")
                    arrays[name] = (
                        (column.values.to_numpy(), column.offsets.to_numpy()) if jagged else column.to_numpy()
                    )
                self._groups.append(arrays)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._kind == "lists":
            return self._rows[index]
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - self._starts[group]
        found = {}
        for name, held in self._groups[group].items():
            if isinstance(held, tuple):
                values, offsets = held
                found[name] = values[offsets[row] : offsets[row + 1]]
            else:
                found[name] = held[row]
        return found


def collate_rows(schema: Schema, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tensors of a list of rows."""
    limits = {f"stream.{s.name}": s.max_length for s in schema.streams}
    found: dict[str, Any] = {}
    for column in columns(schema):
        values = [row[column.name] for row in rows]
        if column.kind != "list":
            found[column.name] = torch.tensor(values)
            continue
        limit = limits.get(column.name.rsplit(".", 1)[0])
        if limit is not None:
            values = [events[-limit:] for events in values]
        if isinstance(values[0], np.ndarray):
            flat = torch.from_numpy(np.concatenate(values))
        else:
            flat = torch.tensor([event for events in values for event in events], dtype=torch.int64)
        found[column.name] = (flat, torch.tensor([len(events) for events in values]))
    keys, parts, lengths = [], [], []
    for feature in schema.scalars:
        keys.append(feature.name)
        parts.append(found[f"id.{feature.name}"])
        lengths.append(torch.ones(len(rows), dtype=torch.int64))
    named = [(f.name, f"ids.{f.name}") for f in schema.lists]
    named += [(f"{s.name}.{f.name}", f"stream.{s.name}.{f.name}") for s in schema.streams for f in s.fields]
    for key, name in named:
        keys.append(key)
        parts.append(found[name][0])
        lengths.append(found[name][1])
    found["ids"] = KeyedJaggedTensor(keys=keys, values=torch.cat(parts), lengths=torch.cat(lengths))
    return found


def baseline_epoch(
    directory: str | Path, *, split: str, batch_size: int, kind: str, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Batches of one epoch; reading the files is part of it."""
    dataset = RowDataset(directory, split=split, kind=kind)
    loader: DataLoader[dict[str, Any]] = DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
        collate_fn=lambda rows: collate_rows(dataset.schema, rows),
    )
    yield from loader
