"""Opens the Parquet files of one split and decodes row groups.

`Shards` reads every footer once, at start, and checks there that the files have the columns, types and rows that
schema.json promises, so that a missing column is an error before the first step. A row group is then read by opening
its file again with the footer already known: no handle stays open between reads, however many files there are.

Nothing damaged reaches the decoder of this process. Where schema.json has the hashes of footer and row groups, the
bytes are compared first (blocks.py); page checksums would find nothing more there, and cost a tenth of the decoding.
All other files are decoded in a process of their own (isolated.py), which may crash, with page checksums verified,
which pyarrow leaves off by default: without it a flipped bit in a page of ids passes unnoticed. pyarrow's errors name
neither column nor row group, so a row group that does not decode is read once more column by column, in the other
process, to say which one is broken.

Decoding runs on the calling thread only (`use_threads=False`): the loader's reading thread must not take the cores
that the training step computes with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gem_data.blocks import Block, as_arrow_file, chunks_of, hash_bytes, parse_footer, read_footer, timestamp_bounds
from gem_data.interface import DataError, FileInfo, Schema
from gem_data.isolated import ReaderProcess, shared_reader
from gem_data.remote import ReadError, RemotePath, data_path, is_unread
from gem_data.rows import Rows, Where, check_types, decode
from gem_data.schema import SCHEMA_FILE, columns
from gem_data.validation import check_open_ids, check_values

_READ_ERRORS = (pa.ArrowException, OSError, EOFError, ValueError)
_DAMAGED = "The file is damaged or was changed after it was written: restore it, or prepare the data set again."


@dataclass(frozen=True, kw_only=True)
class Footer:
    """What one file's footer says: `index` into Schema.files, size in bytes, rows of every row group.

    metadata  None where another process read it
    told_seconds  first and last second of every row group, where another process read the footer
    """

    index: int
    info: FileInfo
    bytes: int
    group_rows: tuple[int, ...]
    metadata: pq.FileMetaData | None
    told_seconds: tuple[tuple[int, int] | None, ...] = ()

    def seconds(self, row_group: int) -> tuple[int, int] | None:
        """First and last second of a row group, by its statistics; None where the file has none."""
        return self.told_seconds[row_group] if self.metadata is None else timestamp_bounds(self.metadata, row_group)


class Shards:
    """The files of one split. Holds no open file and no cache, so any thread may read.

    footers  one Footer per file of the split, in schema.json's order
    """

    def __init__(
        self,
        directory: str | Path | RemotePath,
        schema: Schema,
        split: str,
        *,
        open_ids: Collection[str] = (),
        compare: bool = True,
        reader: ReaderProcess | None = None,
    ) -> None:
        """Read and check every footer. Raises DataError for absent, damaged or unfitting files, ReadError where one
        cannot be read.

        open_ids  features whose ids may lie outside their tables; ValueError where the data have no such feature
        compare   False: decode here whatever is there, for a program that lists what is wrong (verify_dataset)
        reader    the process that decodes files without hashes; None: the one that this process's loaders share
        """
        check_open_ids(open_ids, schema)
        self._open_ids = frozenset(open_ids)
        self._compare = compare
        self._reader = shared_reader() if reader is None else reader
        self.directory = data_path(directory)
        self.schema = schema
        self.footers = tuple(
            self._footer(index, info) for index, info in enumerate(schema.files) if info.split == split
        )
        self._by_index = {footer.index: footer for footer in self.footers}
        self._columns = [column.name for column in columns(schema)]
        if not self.footers:
            known = sorted({info.split for info in schema.files})
            raise DataError(
                f'{self.directory / SCHEMA_FILE}: expected files of split "{split}", came files of {known}. '
                "Name another split, or prepare the data set again.",
                file=SCHEMA_FILE,
            )

    def footer(self, file_index: int) -> Footer:
        """What the footer of one file says."""
        return self._by_index[file_index]

    def read_table(self, file_index: int, row_group: int) -> pa.Table:
        """The Arrow columns of one row group. Raises DataError naming file, row group and column, and ReadError,
        which names file and row group, where they cannot be read: that is no damage.
        """
        footer = self._by_index[file_index]
        where = Where(file=footer.info.path, row_group=row_group)
        try:
            self._check_unchanged(footer, where)
            table = self._read_columns(footer, row_group, self._columns)
        except DataError:
            raise
        except _READ_ERRORS as error:
            if is_unread(error):
                raise self._unread(error, where) from error
            raise self._broken_column(footer, row_group, where, error) from error
        if table.num_rows != footer.group_rows[row_group]:
            raise where.error(expected=f"{footer.group_rows[row_group]} rows", came=f"{table.num_rows}", todo=_DAMAGED)
        return table

    def read(self, file_index: int, row_group: int) -> Rows:
        """Decode and check one row group. Raises DataError naming file, row group, row and column."""
        footer = self._by_index[file_index]
        where = Where(file=footer.info.path, row_group=row_group)
        rows = self.read_unchecked(file_index, row_group)
        check_values(self.schema, rows, where, open_ids=self._open_ids)
        return rows

    def read_unchecked(self, file_index: int, row_group: int) -> Rows:
        """Like `read`, without the checks of values (nulls and unequal lists still raise)."""
        where = Where(file=self._by_index[file_index].info.path, row_group=row_group)
        return decode(self.schema, self.read_table(file_index, row_group), where, file_index=file_index)

    def _footer(self, index: int, info: FileInfo) -> Footer:
        where = Where(file=info.path)
        try:
            footer, arrow_schema, rows = self._read_footer(index, info)
        except DataError:
            raise
        except FileNotFoundError:
            raise where.error(
                expected=f"the file {self.directory / info.path}",
                came="no such file",
                todo=f"Restore it, or prepare the data set again; {SCHEMA_FILE} lists it.",
            ) from None
        except _READ_ERRORS as error:
            if is_unread(error):
                raise self._unread(error, where) from error
            raise where.error(
                expected="a Parquet file", came=f"an unreadable one ({_one_line(error)})", todo=_DAMAGED
            ) from error
        check_types(self.schema, arrow_schema, where)
        if rows != info.rows or sum(footer.group_rows) != info.rows:
            raise where.error(
                expected=f"{info.rows} rows ({SCHEMA_FILE})",
                came=f"{rows} rows in {len(footer.group_rows)} row groups of {sum(footer.group_rows)}",
                todo=_DAMAGED,
            )
        return footer

    def _read_footer(self, index: int, info: FileInfo) -> tuple[Footer, pa.Schema, int]:
        """The footer of one file, its Arrow schema and its rows: hashed and parsed, or parsed by the other process."""
        path = self.directory / info.path
        if self._compare and not info.blocks_xxh3:
            if isinstance(path, RemotePath):
                raise Where(file=info.path).error(
                    expected=f"hashes in {SCHEMA_FILE} (blocks_xxh3), without which nothing from {path} is decoded",
                    came="none",
                    todo="Copy the data set to this machine, where a process of its own reads such files, or write it "
                    "anew with write_dataset.",
                )
            told = self._reader.footer(path)
            footer = Footer(
                index=index,
                info=info,
                bytes=told.bytes,
                group_rows=told.group_rows,
                metadata=None,
                told_seconds=told.seconds,
            )
            return footer, told.arrow_schema, told.rows
        size, data = path.stat().st_size, read_footer(path)
        if self._compare and hash_bytes(data) != info.blocks_xxh3[0]:
            raise ValueError(f"its footer has xxh3 {hash_bytes(data)}, {SCHEMA_FILE} says {info.blocks_xxh3[0]}")
        with parse_footer(data) as file:
            metadata, arrow_schema = file.metadata, file.schema_arrow
        groups = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        footer = Footer(index=index, info=info, bytes=size, group_rows=groups, metadata=metadata)
        blocks = 1 + len(groups) * metadata.num_columns
        if self._compare and len(info.blocks_xxh3) != blocks:
            raise ValueError(f"it has {blocks} blocks, {SCHEMA_FILE} hashes of {len(info.blocks_xxh3)}")
        return footer, arrow_schema, metadata.num_rows

    def _read_columns(self, footer: Footer, row_group: int, names: list[str]) -> pa.Table:
        path = self.directory / footer.info.path
        if footer.metadata is None:
            assert isinstance(path, Path)  # others have hashes, or were refused
            return self._reader.group(path, row_group, names)
        with contextlib.ExitStack() as held:
            source: Any = path
            if self._compare:
                source = as_arrow_file(self.sound_block(footer, row_group, names))
            elif isinstance(path, RemotePath):
                source = held.enter_context(path.open())
            return self._decode(footer, row_group, names, source)

    def _decode(self, footer: Footer, row_group: int, names: list[str], source: Any) -> pa.Table:
        with pq.ParquetFile(
            source,
            metadata=footer.metadata,
            pre_buffer=False,  # it would join reads over columns that are not here
            page_checksum_verification=not self._compare,  # the hashes of these very bytes were compared
            arrow_extensions_enabled=False,
        ) as file:
            return file.read_row_group(row_group, columns=names, use_threads=False)

    def sound_block(self, footer: Footer, row_group: int, names: Collection[str]) -> Block:
        """The bytes of these columns of a row group, each as it was written. DataError names the first that is not."""
        every = chunks_of(footer.metadata, row_group)
        written = footer.info.blocks_xxh3[1 + row_group * len(every) :][: len(every)]
        pairs = [pair for pair in zip(every, written, strict=True) if pair[0].column in names]
        block = Block(self.directory / footer.info.path, [chunk for chunk, _ in pairs], size_bytes=footer.bytes)
        changed = block.changed([chunk for chunk, _ in pairs], [digest for _, digest in pairs])
        if changed is not None:
            chunk, found, written = changed
            raise Where(file=footer.info.path, row_group=row_group).error(
                column=chunk.column,
                expected=f"bytes {chunk.start}..{chunk.stop} with xxh3 {written} ({SCHEMA_FILE})",
                came=f"{found}, another checksum",
                todo=_DAMAGED,
            )
        return block

    def _check_unchanged(self, footer: Footer, where: Where) -> None:
        try:
            size = (self.directory / footer.info.path).stat().st_size
        except OSError as error:
            if is_unread(error):
                raise
            raise where.error(
                expected="the file that was there at start", came=_one_line(error), todo="Restore it."
            ) from error
        if size != footer.bytes:
            raise where.error(expected=f"{footer.bytes} bytes as at start", came=f"{size} bytes", todo=_DAMAGED)

    def _unread(self, error: Exception, where: Where) -> ReadError:
        place = where.file if where.row_group is None else f"{where.file}, row group {where.row_group}"
        return ReadError(
            f"{place}: cannot be read from {self.directory}: {_one_line(error)}. Nothing says that it is damaged: see "
            "that it can be reached, and read again.",
            file=where.file,
            row_group=where.row_group,
        )

    def _broken_column(self, footer: Footer, row_group: int, where: Where, error: Exception) -> DataError:
        """Which column is damaged, found out in the other process, where a crash is an answer too. Raises ReadError."""
        broken, reason, path = None, error, self.directory / footer.info.path
        for name in () if isinstance(path, RemotePath) else self._columns:  # the other process reads local files
            try:
                self._reader.group(path, row_group, [name])
            except _READ_ERRORS as single:
                if is_unread(single):
                    raise self._unread(single, where) from single
                broken, reason = name, single
                break
        return where.error(
            column=broken,
            expected="the bytes that were written: pages that decode and match their checksums",
            came=_one_line(reason),
            todo=_DAMAGED,
        )


def groups_of(footers: Sequence[Footer]) -> list[tuple[int, int, int]]:
    """(file index, row group, rows) of every row group, in file order."""
    return [(footer.index, group, rows) for footer in footers for group, rows in enumerate(footer.group_rows)]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
