"""schema.json: strict reading and writing, and which columns a schema asks of a file.

Strict, because a misspelt key that is silently ignored is a feature silently not trained: unknown keys, missing keys,
wrong JSON types, repeated names and features of undeclared tables are DataErrors that name the place and the nearest
known key. Names are limited to letters, digits, "_" and "-": a dot separates the parts of a column name
("stream.views.item"), so a name with a dot would make column names ambiguous.

Cost: one parse at start; nothing here runs per row.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from gem_data.interface import INTERFACE_VERSION, DataError, IdFeature, LabelInfo, Schema, StreamInfo
from gem_data.remote import RemotePath, data_path

SCHEMA_FILE = "schema.json"
VERSION_KEY = "interface_version"
SPLITS = ("train", "eval")
RESERVED_FIELDS = ("action", "time")
MAX_ACTION_BITS = 62
MAX_TABLE_ROWS = 2**62
MAX_SCHEMA_BYTES = 256 << 20
_LONGEST_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HASH = re.compile(r"[0-9a-f]{16}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A column that a schema asks for: `kind` is "int", "float" or "list" (of int64); `each`: a list of these, one
    entry an impression."""

    name: str
    kind: str
    each: bool = False


def columns(schema: Schema) -> tuple[Column, ...]:
    """Every column that must exist, in file order.

    >>> from gem_data.testing import tiny_schema
    >>> [c.name for c in columns(tiny_schema())][:5]
    ['sample_id', 'user_id', 'timestamp', 'label.click', 'label.like']
    """
    found = [Column(name=name, kind="int") for name in ("sample_id", "user_id", "timestamp")]
    found += [Column(name=f"label.{label.name}", kind="float") for label in schema.labels]
    found += [Column(name=f"weight.{label.name}", kind="float") for label in schema.labels if label.weighted]
    found += [Column(name=f"id.{feature.name}", kind="int") for feature in schema.scalars]
    found += [Column(name=f"ids.{feature.name}", kind="list") for feature in schema.lists]
    found += [Column(name=f"dense.{name}", kind="float") for name in schema.dense]
    for stream in schema.streams:
        found += [Column(name=name, kind="list") for name in stream_columns(stream)]
    if schema.impression:
        found = [dataclasses.replace(column, each=is_impression(schema, column.name)) for column in found]
    return tuple(found)


def is_impression(schema: Schema, column: str) -> bool:
    """Whether `column` has one entry an impression, where a row is a request."""
    always = column == "sample_id" or column.startswith(("label.", "weight."))
    return bool(schema.impression) and (always or column in schema.impression)


def request_part(schema: Schema) -> Schema:
    """What stands once in a request, as a schema of plain rows: no labels, and sample_id is the first impression's."""
    return _part(schema, of_impressions=False, labels=(), streams=schema.streams)


def impression_part(schema: Schema) -> Schema:
    """What each impression has, as a schema of plain rows; user_id and timestamp are the request's."""
    return _part(schema, of_impressions=True, labels=schema.labels, streams=())


def _part(
    schema: Schema, *, of_impressions: bool, labels: tuple[LabelInfo, ...], streams: tuple[StreamInfo, ...]
) -> Schema:
    own = set(schema.impression)
    return dataclasses.replace(
        schema,
        labels=labels,
        scalars=tuple(f for f in schema.scalars if (f"id.{f.name}" in own) == of_impressions),
        lists=tuple(f for f in schema.lists if (f"ids.{f.name}" in own) == of_impressions),
        dense=tuple(name for name in schema.dense if (f"dense.{name}" in own) == of_impressions),
        streams=streams,
        impression=(),
    )


def stream_columns(stream: StreamInfo) -> tuple[str, ...]:
    """Column names of one stream: its fields in order, then action, then time."""
    return tuple(f"stream.{stream.name}.{part}" for part in (*(f.name for f in stream.fields), *RESERVED_FIELDS))


def select(schema: Schema, *, features: Sequence[str] = (), labels: Sequence[str] = ()) -> Schema:
    """`schema` with these features and labels alone, in its own order, and the tables they use. Empty: all.

    Names are those of LoaderConfig.features. Raises ValueError naming what there is.

    >>> from gem_data.testing import tiny_schema
    >>> few = select(tiny_schema(), features=["stream.views.item", "dense.hour"], labels=["like"])
    >>> [column.name for column in columns(few)][3:]
    ['label.like', 'weight.like', 'dense.hour', 'stream.views.item', 'stream.views.action', 'stream.views.time']
    """
    tasks = [label.name for label in schema.labels]
    _check_selected("labels", labels, tasks)
    if labels:
        schema = dataclasses.replace(schema, labels=tuple(label for label in schema.labels if label.name in labels))
    if not features:
        return schema
    known = [f"id.{feature.name}" for feature in schema.scalars] + [f"ids.{feature.name}" for feature in schema.lists]
    known += [f"dense.{name}" for name in schema.dense]
    for stream in schema.streams:
        known += [f"stream.{stream.name}", *(f"stream.{stream.name}.{field.name}" for field in stream.fields)]
    _check_selected("features", features, known)
    chosen = dataclasses.replace(
        schema,
        scalars=tuple(feature for feature in schema.scalars if f"id.{feature.name}" in features),
        lists=tuple(feature for feature in schema.lists if f"ids.{feature.name}" in features),
        dense=tuple(name for name in schema.dense if f"dense.{name}" in features),
        streams=tuple(cut for stream in schema.streams if (cut := _selected_stream(stream, features)) is not None),
    )
    if schema.impression:
        own = tuple(column for column in schema.impression if column in features)
        if not own:
            raise ValueError(
                "features: expected at least one that each impression of a request has of its own "
                f"({', '.join(schema.impression)}), without which they are all alike; came none"
            )
        chosen = dataclasses.replace(chosen, impression=own)
    used = {table for _, table in chosen.id_features()}
    return dataclasses.replace(chosen, tables=tuple(table for table in schema.tables if table.name in used))


def _check_selected(setting: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{setting}: expected names of {', '.join(known)}; came {name!r}")


def _selected_stream(stream: StreamInfo, features: Sequence[str]) -> StreamInfo | None:
    prefix = f"stream.{stream.name}"
    if prefix in features:
        return stream
    fields = tuple(field for field in stream.fields if f"{prefix}.{field.name}" in features)
    if fields and fields[0] != stream.fields[0]:
        raise ValueError(
            f"features: {prefix}.{fields[0].name} without {prefix}.{stream.fields[0].name}: the first field of a "
            "stream is its item, by which events are told apart; name it too"
        )
    return dataclasses.replace(stream, fields=fields) if fields else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' (did you mean "x"?)' for the nearest known name, else the known names."""
    names = sorted(known)
    if len(name) > _LONGEST_NAME:
        return f" ({len(name)} characters)"
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f' (did you mean "{close[0]}"?)'
    return f" (known: {', '.join(names)})" if names else ""


def schema_from_dict(value: Mapping[str, Any], *, source: str = SCHEMA_FILE) -> Schema:
    """Parse the JSON form of a Schema (dataclasses.asdict with lists for tuples). `source` names it in errors.

    Raises DataError naming key, what was expected and what came.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"{source}: expected a JSON object, came {_kind(value)}.", file=source)
    content = dict(value)
    version = content.pop(VERSION_KEY, list(INTERFACE_VERSION))
    _check_version(version, source)
    schema = typing.cast(Schema, _parse(content, Schema, source, ""))
    check_schema(schema, source=source)
    return schema


def schema_to_dict(schema: Schema) -> dict[str, Any]:
    """The JSON form of `schema`; schema_from_dict reads it back."""
    plain = json.loads(json.dumps(dataclasses.asdict(schema), allow_nan=False))
    if not schema.impression:  # as it was before there were requests
        del plain["impression"]
    return {VERSION_KEY: list(INTERFACE_VERSION), **plain}


def read_schema(directory: str | Path | RemotePath) -> Schema:
    """Read and check `directory`/schema.json. Raises DataError; opens no Parquet file. A URL is read through fsspec."""
    path = data_path(directory) / SCHEMA_FILE
    try:
        size = path.stat().st_size
        if size > MAX_SCHEMA_BYTES:
            raise DataError(f"{path}: expected at most {MAX_SCHEMA_BYTES} bytes, came {size}.", file=SCHEMA_FILE)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"{path}: no such file. A data set is a directory with {SCHEMA_FILE} beside its Parquet files; "
            "check the path, or make one with `gemline data prepare`.",
            file=SCHEMA_FILE,
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}", file=SCHEMA_FILE) from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}. Prepare the data set again.", file=SCHEMA_FILE) from error
    return schema_from_dict(value, source=str(path))


def check_schema(schema: Schema, *, source: str = SCHEMA_FILE) -> None:
    """Check names, tables, streams and files of a schema made in code. Raises DataError."""
    _check_names(source, "tables", [table.name for table in schema.tables])
    _check_names(source, "labels", [label.name for label in schema.labels])
    _check_names(source, "dense", schema.dense)
    _check_names(source, "streams", [stream.name for stream in schema.streams])
    _check_names(source, "scalars and lists", [feature.name for feature in (*schema.scalars, *schema.lists)])
    if not schema.labels:
        raise DataError(f"{source}: labels: expected at least one task, came none.", file=source)
    for table in schema.tables:
        _check_range(source, f"tables: rows of {table.name}", table.rows, 1, MAX_TABLE_ROWS)
    tables = schema.table_rows()
    _check_tables(source, "scalars", schema.scalars, tables)
    _check_tables(source, "lists", schema.lists, tables)
    for stream in schema.streams:
        _check_stream(source, stream, tables)
    _check_impression(source, schema)
    _check_names(source, "files", [file.path for file in schema.files], pattern=None)
    for file in schema.files:
        _check_file(source, file.path, file.split)
        _check_range(source, f"files: rows of {file.path}", file.rows, 0, 2**62)
        for digest in file.blocks_xxh3:
            if _HASH.fullmatch(digest) is None:
                raise DataError(
                    f"{source}: files: blocks_xxh3 of {file.path}: expected 16 hexadecimal digits each, came "
                    f'"{digest}".',
                    file=source,
                )
        if file.xxh3 and _HASH.fullmatch(file.xxh3) is None:
            raise DataError(
                f'{source}: files: xxh3 of {file.path}: expected 16 hexadecimal digits or nothing, came "{file.xxh3}".',
                file=source,
            )


def _check_impression(source: str, schema: Schema) -> None:
    _check_names(source, "impression", schema.impression, pattern=None)
    known = [f"id.{feature.name}" for feature in schema.scalars] + [f"ids.{feature.name}" for feature in schema.lists]
    known += [f"dense.{name}" for name in schema.dense]
    for column in schema.impression:
        if column.startswith(("label.", "weight.", "sample_id")):
            why = ": labels, weights and sample_id always belong to impressions, leave them out"
        elif column.startswith("stream."):
            why = ": streams are the user's, once in a request"
        else:
            why = did_you_mean(column, known)
        if column not in known:
            raise DataError(
                f'{source}: impression: expected columns of scalars, lists and dense features, came "{column}"{why}.',
                file=source,
            )


def _check_stream(source: str, stream: StreamInfo, tables: Mapping[str, int]) -> None:
    place = f"streams: {stream.name}"
    names = [f.name for f in stream.fields]
    _check_names(source, f"{place}: fields", names)
    if not names:
        raise DataError(f"{source}: {place}: expected at least one field (the item), came none.", file=source)
    for name in names:
        if name in RESERVED_FIELDS:
            raise DataError(
                f'{source}: {place}: a field may not be called "{name}": that column is fixed.', file=source
            )
    _check_tables(source, place, stream.fields, tables)
    _check_range(source, f"{place}: action_bits", stream.action_bits, 0, MAX_ACTION_BITS)
    _check_range(source, f"{place}: max_length", stream.max_length, 1, 2**31 - 1)


def _check_file(source: str, path: str, split: str) -> None:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\\" in path:
        raise DataError(f'{source}: files: expected a path inside the data set, came "{path}".', file=source)
    if split not in SPLITS:
        raise DataError(f'{source}: files: {path}: expected split "train" or "eval", came "{split}".', file=source)


def _check_names(source: str, place: str, names: Sequence[str], *, pattern: re.Pattern[str] | None = _NAME) -> None:
    seen: set[str] = set()
    for name in names:
        if pattern is not None and pattern.fullmatch(name) is None:
            raise DataError(
                f'{source}: {place}: expected names of letters, digits, "_" and "-", came "{name}".', file=source
            )
        if name in seen:
            raise DataError(f'{source}: {place}: expected different names, "{name}" comes twice.', file=source)
        seen.add(name)


def _check_tables(source: str, place: str, features: Sequence[IdFeature], tables: Mapping[str, int]) -> None:
    for feature in features:
        if feature.table not in tables:
            raise DataError(
                f'{source}: {place}: feature "{feature.name}" names table "{feature.table}", which is not in `tables`'
                f"{did_you_mean(feature.table, tables)}.",
                file=source,
            )


def _check_range(source: str, place: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise DataError(f"{source}: {place}: expected {low} to {high}, came {value}.", file=source)


def _check_version(version: Any, source: str) -> None:
    if not (isinstance(version, list) and len(version) == 2 and all(type(part) is int for part in version)):
        raise DataError(f"{source}: {VERSION_KEY}: expected [major, minor], came {version!r}.", file=source)
    if version[0] != INTERFACE_VERSION[0]:
        raise DataError(
            f"{source}: {VERSION_KEY}: this gem_data reads major version {INTERFACE_VERSION[0]}, came {version[0]}: "
            "prepare the data set again, or use the gem_data that wrote it.",
            file=source,
        )


def _parse(value: Any, wanted: Any, source: str, place: str) -> Any:
    """`value` (from JSON) as the annotated type `wanted`; strict. `place` is the path of keys so far."""
    where = f"{source}: {place}" if place else source
    if dataclasses.is_dataclass(wanted):
        return _parse_record(value, typing.cast(type, wanted), source, place)
    origin = typing.get_origin(wanted)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise DataError(f"{where}: expected a list, came {_kind(value)}.", file=source)
        item = typing.get_args(wanted)[0]
        return tuple(_parse(part, item, source, f"{place}[{index}]") for index, part in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise DataError(f"{where}: expected an object, came {_kind(value)}.", file=source)
        return dict(value)
    if type(value) is not wanted:
        raise DataError(f"{where}: expected {_TYPE_NAMES[wanted]}, came {_kind(value)}.", file=source)
    return value


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Types of a dataclass's fields; resolving them evaluates our own annotations, once."""
    return typing.get_type_hints(cls)


def _parse_record(value: Any, cls: type, source: str, place: str) -> Any:
    where = f"{source}: {place}" if place else source
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: expected an object, came {_kind(value)}.", file=source)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = _hints(cls)
    for key in value:
        if key not in fields:
            raise DataError(f'{where}: unknown key "{key}"{did_you_mean(str(key), fields)}.', file=source)
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _parse(value[name], hints[name], source, f"{place}.{name}" if place else name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DataError(f'{where}: the key "{name}" is missing.', file=source)
    return cls(**arguments)


_TYPE_NAMES = types.MappingProxyType({str: "a text", int: "a whole number", bool: "true or false"})


def _kind(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
