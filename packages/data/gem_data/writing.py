"""Writes a data set: checked rows into Parquet with page checksums, schema.json last, the directory in one rename.

Rows are checked by the same code that checks them in reading, before they reach a file: a data set that this function
wrote reads without errors. The directory appears under its name only when complete: files are written and flushed into
a hidden neighbour that is renamed at the end, so a killed writer leaves no half data set that looks whole. schema.json
holds the hash of every file (hashing.py), by which a loader state knows its data.

Row groups are the unit of reading and shuffling, and a loader holds `window_groups` decoded ones per shard; so by
default one decodes to about 8 MiB (at most 65,536 rows). Windows of time are made of whole row groups: a log that is
streamed needs shorter ones. zstd with dictionary pages keeps repeated ids small.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gem_data.blocks import block_hashes
from gem_data.hashing import file_hash
from gem_data.interface import DataError, FileInfo, Schema
from gem_data.remote import local_only
from gem_data.rows import Where, arrow_type, check_types, decode
from gem_data.schema import SCHEMA_FILE, SPLITS, check_schema, columns, did_you_mean, schema_from_dict, schema_to_dict
from gem_data.validation import check_values

DEFAULT_ROWS_PER_FILE = 1 << 20
_TARGET_GROUP_BYTES = 8 << 20
_MIN_GROUP_ROWS, _MAX_GROUP_ROWS = 256, 65536


def write_dataset(
    directory: str | Path,
    schema: Schema | Mapping[str, Any],
    tables: Mapping[str, pa.Table | Iterable[pa.Table]],
    *,
    rows_per_file: int = DEFAULT_ROWS_PER_FILE,
    rows_per_group: int | None = None,
    table_groups: bool = False,
    overwrite: bool = False,
) -> Schema:
    """Write `tables` (split -> table, or tables to be written one after the other) as a data set.

    schema          its `files` are replaced; a mapping is the JSON form
    rows_per_file   a file is closed at the first row group that reaches this many rows
    rows_per_group  None = as many as decode to about 8 MiB, judged by the first table of each split
    table_groups    each table is a row group, however large; rows_per_group must be None
    overwrite       replace an existing data set; otherwise an existing, non-empty directory is refused

    Returns the schema as written. Raises DataError for bad rows (named by split and row) and ValueError for arguments;
    then nothing has been written.

    >>> import tempfile
    >>> from gem_data.testing import tiny_schema, tiny_table
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     schema = write_dataset(f"{parent}/tiny", tiny_schema(), {"train": tiny_table(rows=10, seed=0)})
    >>> [(file.path, file.rows) for file in schema.files]
    [('train-00000.parquet', 10)]
    """
    if not isinstance(schema, Schema):
        schema = schema_from_dict(schema, source="schema")
    check_schema(schema, source="schema")
    local_only(directory, "write_dataset")
    target = Path(directory)
    if table_groups and rows_per_group is not None:
        raise ValueError(f"rows_per_group: expected None with table_groups, came {rows_per_group}")
    _check_arguments(target, tables, rows_per_file, rows_per_group, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name}.writing-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        files: list[FileInfo] = []
        for split in SPLITS:
            if split in tables:
                groups = _groups(schema, split, tables[split], rows_per_group, table_groups)
                files += _write_split(draft, schema, split, groups, rows_per_file)
        written = dataclasses.replace(schema, files=tuple(files))
        _write_text(draft / SCHEMA_FILE, json.dumps(schema_to_dict(written), indent=2) + "\n")
        _swap_in(draft, target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return written


def _write_split(
    draft: Path,
    schema: Schema,
    split: str,
    groups: Iterable[pa.Table],
    rows_per_file: int,
) -> list[FileInfo]:
    files: list[FileInfo] = []
    writer: pq.ParquetWriter | None = None
    rows, start, path = 0, 0, ""
    try:
        for group in groups:
            where = Where(file=f"{split} table", first_row=start)
            check_values(schema, decode(schema, group, where), where)
            if writer is None:
                path, rows = f"{split}-{len(files):05d}.parquet", 0
                writer = _writer(draft / path, _arrow_schema(schema, nullable=False))
            writer.write_table(group.cast(writer.schema), row_group_size=group.num_rows)
            rows, start = rows + group.num_rows, start + group.num_rows
            if rows >= rows_per_file:
                files.append(_close(writer, draft, FileInfo(path=path, split=split, rows=rows)))
                writer = None
        if writer is not None:
            files.append(_close(writer, draft, FileInfo(path=path, split=split, rows=rows)))
            writer = None
    finally:
        if writer is not None:
            writer.close()
    if not files:
        raise DataError(f'split "{split}": expected at least one row, came none. Leave the split out.')
    return files


def _groups(
    schema: Schema,
    split: str,
    tables: pa.Table | Iterable[pa.Table],
    rows_per_group: int | None,
    table_groups: bool,
) -> Iterator[pa.Table]:
    """The rows of `tables` in tables of `rows_per_group` rows, or as they are cut (table_groups), with the columns in
    order and types checked.
    """
    wanted = _arrow_schema(schema, nullable=True)
    pending: list[pa.Table] = []
    held, start = 0, 0
    for table in [tables] if isinstance(tables, pa.Table) else tables:
        where = Where(file=f"{split} table", first_row=start)
        _check_columns(table, wanted, where)
        check_types(schema, table.schema, where)
        start += table.num_rows
        if rows_per_group is None and table.num_rows and not table_groups:
            rows_per_group = _group_rows(table)
        # Only names of list elements and nullability differ between what may come and what is written.
        table = table.select(wanted.names).cast(wanted)
        if table_groups:
            if table.num_rows:
                yield table
            continue
        pending.append(table)
        held += table.num_rows
        if rows_per_group is None or held < rows_per_group:
            continue
        joined = pa.concat_tables(pending)
        whole = held - held % rows_per_group
        for first in range(0, whole, rows_per_group):
            yield joined.slice(first, rows_per_group)
        pending, held = [joined.slice(whole)], held - whole
    if held:
        yield pa.concat_tables(pending)


def _arrow_schema(schema: Schema, *, nullable: bool) -> pa.Schema:
    return pa.schema([pa.field(c.name, arrow_type(c, nullable=nullable), nullable=nullable) for c in columns(schema)])


def _group_rows(table: pa.Table) -> int:
    rows = _TARGET_GROUP_BYTES * int(table.num_rows) // max(int(table.nbytes), 1)
    return max(_MIN_GROUP_ROWS, min(_MAX_GROUP_ROWS, rows))


def _writer(path: Path, arrow_schema: pa.Schema) -> pq.ParquetWriter:
    return pq.ParquetWriter(path, arrow_schema, compression="zstd", write_page_checksum=True, write_statistics=True)


def _close(writer: pq.ParquetWriter, draft: Path, info: FileInfo) -> FileInfo:
    """`info` with the hashes of the closed and flushed file, of its footer and of its row groups."""
    writer.close()
    _flush(draft / info.path)
    path = draft / info.path
    return dataclasses.replace(info, xxh3=file_hash(path), blocks_xxh3=block_hashes(path))


def _check_columns(table: pa.Table, wanted: pa.Schema, where: Where) -> None:
    for name in table.column_names:
        if name not in wanted.names:
            raise where.error(
                column=name,
                expected="only columns that the schema names",
                came=f"another one{did_you_mean(name, wanted.names)}",
                todo="Add the feature to the schema, or drop the column.",
            )


def _check_arguments(
    target: Path, tables: Mapping[str, Any], rows_per_file: int, rows_per_group: int | None, overwrite: bool
) -> None:
    for split in tables:
        if split not in SPLITS:
            raise ValueError(f'tables: expected splits "train" and "eval", came "{split}"{did_you_mean(split, SPLITS)}')
    if not tables:
        raise ValueError("tables: expected at least one split, came none")
    for name, value in {"rows_per_file": rows_per_file, "rows_per_group": rows_per_group}.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, came {value}")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target}: expected a directory, came a file")
    if target.exists() and any(target.iterdir()):
        if not overwrite:
            raise ValueError(f"{target}: expected no such directory or an empty one; pass overwrite=True to replace it")
        if not (target / SCHEMA_FILE).exists():
            raise ValueError(f"{target}: has no {SCHEMA_FILE}, so it is no data set and will not be overwritten")


def _swap_in(draft: Path, target: Path) -> None:
    _flush(draft)
    if target.exists():
        old = target.parent / f".{target.name}.replaced-{os.getpid()}"
        os.rename(target, old)
        os.rename(draft, target)
        shutil.rmtree(old)
    else:
        os.rename(draft, target)
    _flush(target.parent)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    """fsync a file or directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
