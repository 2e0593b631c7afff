"""What `load` returns, and the small pieces every data set is put together from.

The schema is a plain dict (the JSON form of the native layout's schema.json, without `files`): this package and the
one that writes the layout do not import each other, so the dict is the contract. `build` checks the part of it that a
mistake here would break: columns, types, ids inside their tables, lists of one stream of equal length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

# Raised whenever a data set comes out different for the same options: prepared copies are kept by it.
CREATED_BY = "gem_datasets 1.2"

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
LIST = pa.list_(pa.int64())


class DatasetError(ValueError):
    """A data set cannot be named, fetched, parsed or generated as asked; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """A data set in the native columns.

    schema  dict with name, created_by, tables, labels, scalars, lists, dense, streams, facts, and, where a row is a
            request, impression: the columns that each of its impressions has, lists in the tables (labels are, too)
    train   pyarrow.Table, rows in time order
    eval    pyarrow.Table, rows in time order, each strictly later than every row of `train`
    """

    schema: dict[str, Any]
    train: pa.Table
    eval: pa.Table


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """Packed lists: row b owns values[offsets[b]:offsets[b+1]]. Rows [7, 8], [] and [9]: offsets [0, 2, 2, 3]."""

    values: Ints
    offsets: Ints

    def to_arrow(self) -> pa.ListArray:
        """list<int64>, without passing through Python objects."""
        if len(self.values) >= 2**31:
            raise DatasetError(
                f"{len(self.values)} list values do not fit list<int64> offsets (2^31 - 1); use fewer rows"
            )
        return pa.ListArray.from_arrays(pa.array(self.offsets.astype(np.int32)), pa.array(self.values, pa.int64()))


def feature(name: str, table: str | None = None) -> dict[str, str]:
    """An id feature of the schema; its table has the same name unless given."""
    return {"name": name, "table": table or name}


def stream(name: str, fields: list[dict[str, str]], *, action_bits: int, max_length: int) -> dict[str, Any]:
    """An event stream of the schema; the first field is the item."""
    return {"name": name, "fields": fields, "action_bits": action_bits, "max_length": max_length}


def standardize(
    values: Floats, train_rows: int, *, least_std: float = 0.0
) -> tuple[npt.NDArray[np.float32], list[float]]:
    """(values - mean) / std as float32, and [mean, std]; both measured on the first `train_rows` rows only.

    A deviation below `least_std` is replaced by it, a constant column becomes 0.
    """
    mean = float(values[:train_rows].mean())
    std = max(float(values[:train_rows].std()), least_std)
    std = std if std > 1e-12 else 1.0
    return ((values - mean) / std).astype(np.float32), [mean, std]


def split_rows(time: Ints, fraction: float) -> int:
    """Rows of the training part of `time` (sorted): nearest to `fraction` such that evaluation is strictly later.

    Rows that share a second stay together: the group of equal times at the wanted cut goes, as a whole, to the side
    that keeps the count nearest to fraction * rows. Times 10, 20, 20, 20, 30 at 0.5: the wanted cut 2 lies within the
    group of 20s; cuts that separate times are 1 and 4, so 1 (10 | 20 20 20 30) is taken.
    """
    wanted = round(len(time) * fraction)
    if 0 < wanted < len(time):
        before = int(np.searchsorted(time, time[wanted], side="left"))
        after = int(np.searchsorted(time, time[wanted], side="right"))
        cuts = [cut for cut in (before, after) if 0 < cut < len(time)]
        if cuts:
            return min(cuts, key=lambda cut: abs(cut - wanted))
    raise DatasetError(f"{len(time)} rows cannot be cut by time at {fraction}: no two different times on either side")


def build(
    schema: dict[str, Any],
    columns: dict[str, pa.Array | Ragged | npt.NDArray[Any]],
    cut: int,
    *,
    first: Ints | None = None,
) -> PreparedData:
    """Put `columns` (all rows in time order) into one table, check it against `schema` and cut it at row `cut`.

    first  rows that begin a request: rows become requests, with lists where schema["impression"] says so
    """
    arrays = {name: _arrow(name, column) for name, column in columns.items()}
    wanted = _expected_columns(schema)
    assert set(arrays) == set(wanted), f"columns differ from the schema: {sorted(set(arrays) ^ set(wanted))}"
    table = pa.table({name: arrays[name] for name in wanted})
    for name, kind in wanted.items():
        assert table.schema.field(name).type == kind, f"{name} is {table.schema.field(name).type}, expected {kind}"
    _check_ids(schema, table)
    if first is not None:
        table, cut = _as_requests(schema, table, first), int(np.searchsorted(first, cut))
    return PreparedData(schema=schema, train=table.slice(0, cut), eval=table.slice(cut))


def _as_requests(schema: dict[str, Any], table: pa.Table, first: Ints) -> pa.Table:
    """Rows first[r]:first[r + 1] as the impressions of request r."""
    bounds = pa.array(np.append(first, table.num_rows), pa.int32())
    arrays = {}
    for name in table.column_names:
        values = table[name].combine_chunks()
        each = name == "sample_id" or name.split(".")[0] in ("label", "weight") or name in schema["impression"]
        arrays[name] = pa.ListArray.from_arrays(bounds, values) if each else values.take(pa.array(first))
    return pa.table(arrays)


def _arrow(name: str, column: Any) -> pa.Array:
    if isinstance(column, Ragged):
        return column.to_arrow()
    if isinstance(column, np.ndarray):
        kind = pa.float32() if name.split(".")[0] in ("label", "weight", "dense") else pa.int64()
        return pa.array(column, kind)
    return column


def _expected_columns(schema: dict[str, Any]) -> dict[str, pa.DataType]:
    wanted = {"sample_id": pa.int64(), "user_id": pa.int64(), "timestamp": pa.int64()}
    for label in schema["labels"]:
        wanted[f"label.{label['name']}"] = pa.float32()
        if label["weighted"]:
            wanted[f"weight.{label['name']}"] = pa.float32()
    wanted |= {f"id.{scalar['name']}": pa.int64() for scalar in schema["scalars"]}
    wanted |= {f"ids.{bag['name']}": LIST for bag in schema["lists"]}
    wanted |= {f"dense.{name}": pa.float32() for name in schema["dense"]}
    for events in schema["streams"]:
        names = [*(field["name"] for field in events["fields"]), "action", "time"]
        wanted |= {f"stream.{events['name']}.{name}": LIST for name in names}
    return wanted


def _check_ids(schema: dict[str, Any], table: pa.Table) -> None:
    rows = {entry["name"]: entry["rows"] for entry in schema["tables"]}
    columns = [(f"id.{entry['name']}", entry["table"]) for entry in schema["scalars"]]
    columns += [(f"ids.{entry['name']}", entry["table"]) for entry in schema["lists"]]
    for events in schema["streams"]:
        columns += [(f"stream.{events['name']}.{f['name']}", f["table"]) for f in events["fields"]]
        lists = [f"stream.{events['name']}.{name}" for name in (*(f["name"] for f in events["fields"]), "action")]
        lengths = pc.list_value_length(table[f"stream.{events['name']}.time"])
        assert all(pc.list_value_length(table[name]).equals(lengths) for name in lists), f"unequal lists: {lists}"
    for column, name in columns:
        ids = table[column].combine_chunks()
        bounds = pc.min_max(pc.list_flatten(ids) if pa.types.is_list(ids.type) else ids).as_py()
        low, high = bounds["min"], bounds["max"]
        assert low is None or (low >= 0 and high < rows[name]), (
            f"{column}: ids {low}..{high}, table {name} {rows[name]}"
        )
