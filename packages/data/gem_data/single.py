"""One Batch from rows in memory: for scoring an ad-hoc history, for serving checks and for tests.

The same decoding and the same checks as in reading files; only the place in a message differs ("rows in memory").
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from gem_data.collate import Part, collate
from gem_data.interface import Batch, Schema
from gem_data.rows import Where, arrow_type, check_types, decode
from gem_data.schema import Column, columns, did_you_mean
from gem_data.validation import check_values

_WHERE = Where(file="rows in memory")


def batch_from_table(schema: Schema, table: pa.Table, *, max_length: int | None = None, step: int = 0) -> Batch:
    """All rows of `table` as one Batch, in order; other columns than the schema's are ignored.

    `row_index` holds (-1, -1, row). Raises DataError naming row and column.
    """
    check_types(schema, table.schema, _WHERE)
    for name in (column.name for column in columns(schema)):
        # In-memory lists may be malformed in ways that a file cannot be: let Arrow check offsets and bounds.
        try:
            table.column(name).validate(full=True)
        except pa.ArrowInvalid as error:
            raise _WHERE.error(
                column=name, expected="a well-formed Arrow column", came=str(error), todo="Build the column anew."
            ) from error
    rows = decode(schema, table, _WHERE)
    check_values(schema, rows, _WHERE)
    part = Part(rows=rows, take=np.arange(len(rows), dtype=np.int64))
    return collate(schema, [part] if len(rows) else [], max_length=max_length, step=step)


def batch_from_dicts(
    schema: Schema,
    rows: Sequence[Mapping[str, Any]],
    *,
    scoring: bool = False,
    max_length: int | None = None,
    step: int = 0,
) -> Batch:
    """Rows given as {column name: value}, lists as Python lists, as one Batch.

    scoring  labels and weights may be missing, and become 0: a row of weight 0 adds nothing to a loss or a metric.
             sample_id may be missing (then the number of the row, or of the impression) and user_id too (then 0).

    A request (Schema.impression) has a list, one entry an impression, wherever the columns ask for one.

    Raises DataError naming row and column for missing or unknown columns, values of another type, and all that is
    checked in reading files.

    >>> from gem_data.interface import IdFeature, LabelInfo, Schema, StreamInfo, TableInfo
    >>> schema = Schema(
    ...     name="demo", created_by="docs",
    ...     tables=(TableInfo(name="item", rows=10),), labels=(LabelInfo(name="like"),),
    ...     scalars=(IdFeature(name="item", table="item"),),
    ...     streams=(StreamInfo(
    ...         name="views", fields=(IdFeature(name="item", table="item"),), action_bits=1, max_length=5),),
    ... )
    >>> batch = batch_from_dicts(schema, [
    ...     {"timestamp": 100, "id.item": 3, "stream.views.item": [7, 8],
    ...      "stream.views.action": [1, 0], "stream.views.time": [40, 90]},
    ...     {"timestamp": 100, "id.item": 4, "stream.views.item": [],
    ...      "stream.views.action": [], "stream.views.time": []},
    ... ], scoring=True)
    >>> batch.ids.values().tolist(), batch.ids.lengths().tolist(), batch.streams["views"].offsets.tolist()
    ([3, 4, 7, 8], [1, 1, 2, 0], [0, 2, 2])
    """
    wanted = {column.name: column for column in columns(schema)}
    filled, first = [], 0
    for number, row in enumerate(rows):
        count = _impressions(row, number, wanted) if schema.impression else None
        filled.append(_filled(row, number, wanted, scoring, first, count))
        first += 1 if count is None else count
    arrays = {name: _array(column, [row[name] for row in filled]) for name, column in wanted.items()}
    return batch_from_table(schema, pa.table(arrays), max_length=max_length, step=step)


def _impressions(row: Mapping[str, Any], number: int, wanted: Mapping[str, Column]) -> int:
    """Entries of the first column given that has one an impression; decoding compares the others with it."""
    for name, column in wanted.items():
        if column.each and name in row:
            if isinstance(row[name], (list, tuple, np.ndarray)):
                return len(row[name])
            raise _WHERE.error(
                row=number,
                column=name,
                expected="a list with one entry an impression",
                came=f"{row[name]!r:.60}",
                todo="This schema describes requests: see `impression` in schema.json.",
            )
    return 0


def _filled(
    row: Mapping[str, Any], number: int, wanted: Mapping[str, Column], scoring: bool, first: int, count: int | None
) -> dict[str, Any]:
    """The row with what scoring allows to leave out. first: samples before it; count: impressions of a request."""

    def each(value: Any) -> Any:
        return value if count is None else [value] * count

    for name in row:
        if name not in wanted:
            raise _WHERE.error(
                row=number,
                column=str(name),
                expected="a column of the schema",
                came=f"an unknown one{did_you_mean(str(name), wanted)}",
                todo="Leave it out, or correct its name.",
            )
    filled = dict(row)
    if scoring:
        filled.setdefault("sample_id", first if count is None else list(range(first, first + count)))
        filled.setdefault("user_id", 0)
        for name in wanted:
            if name.startswith(("label.", "weight.")):
                filled.setdefault(name, each(0.0))
        for name in wanted:
            if name.startswith("label.") and name not in row:
                filled[name.replace("label.", "weight.", 1)] = each(0.0)
    for name in wanted:
        if name not in filled:
            raise _WHERE.error(
                row=number,
                column=name,
                expected="a value",
                came="none",
                todo="Give every column of the schema (labels may be left out with scoring=True).",
            )
    return filled


def _array(column: Column, values: list[Any]) -> pa.Array:
    wanted = arrow_type(column)
    for number, value in enumerate(values):
        if value is not None and not (_all_fit if column.each else _fits)(column.kind, value):
            raise _WHERE.error(
                row=number,
                column=column.name,
                expected=("a list, for each impression " if column.each else "") + _EXPECTED[column.kind],
                came=f"{value!r:.60}",
                todo="Convert the value before.",
            )
    # Arrow alone would cut 1.5 to 1 and take true for 1; after the check above only the range can be wrong.
    return pa.array(values, wanted)


_EXPECTED = MappingProxyType(
    {"int": "a whole number of 64 bits", "float": "a number", "list": "a list of whole numbers"}
)


def _all_fit(kind: str, value: Any) -> bool:
    """Whether `value` lists an entry of `kind` for each impression."""
    return isinstance(value, (list, tuple, np.ndarray)) and all(part is None or _fits(kind, part) for part in value)


def _fits(kind: str, value: Any) -> bool:
    if kind == "list":
        if isinstance(value, np.ndarray):
            return value.ndim == 1 and (value.dtype == np.int64 or not value.size)
        return isinstance(value, (list, tuple)) and all(part is None or _fits("int", part) for part in value)
    if isinstance(value, (bool, np.bool_)):
        return False
    if kind == "int":
        return isinstance(value, numbers.Integral) and -(2**63) <= int(value) < 2**63
    return isinstance(value, numbers.Real)
