"""The bytes of a row group, read once, compared with the hashes in schema.json, and only then given to the decoder.

Page checksums cover the pages' content. They do not cover page headers, nor the footer, and they are compared in the
middle of decoding, by the same code that a damaged length may have led astray. A hash of the footer and one of the
bytes of every column of every row group (FileInfo.blocks_xxh3, written by write_dataset) settle it before a byte is
interpreted: what the decoder sees is what the writer wrote, so a flipped bit can neither pass nor crash it, and its
column is known. It is no protection against someone who rewrites schema.json too; isolated.py is.

Cost: the bytes are read in one piece, which a decoder reads anyway, and hashed at several GB/s; about 20 bytes of
schema.json for a column of a row group.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from gem_data.remote import Positioned, RemotePath

_MAGIC = b"PAR1"
_TAIL_BYTES = 8
MAX_FOOTER_BYTES = 64 << 20


def read_footer(path: Path | RemotePath) -> bytes:
    """The footer with its length and the magic number: the last bytes of a Parquet file. ValueError if it has none."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < _TAIL_BYTES + len(_MAGIC):
            raise ValueError(f"{size} bytes, fewer than a Parquet file has")
        file.seek(size - _TAIL_BYTES)
        tail = file.read(_TAIL_BYTES)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != _MAGIC:
            raise ValueError(f"it ends with {tail[4:]!r}, a Parquet file with {_MAGIC!r}")
        if length > min(size - _TAIL_BYTES - len(_MAGIC), MAX_FOOTER_BYTES):
            raise ValueError(f"its footer would have {length} bytes, the file has {size}")
        file.seek(size - _TAIL_BYTES - length)
        return file.read(length + _TAIL_BYTES)


def parse_footer(footer: bytes) -> pq.ParquetFile:
    """Metadata and schema of what `read_footer` returned, without opening the file again."""
    return pq.ParquetFile(pa.BufferReader(_MAGIC + footer), arrow_extensions_enabled=False)


def hash_bytes(data: Any) -> str:
    """xxh3-64, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The bytes start..stop of one column of a row group: all its pages, the dictionary included."""

    column: str
    start: int
    stop: int


def chunks_of(metadata: pq.FileMetaData, group: int) -> list[Chunk]:
    """The columns of a row group, in the file's order. Lists are named by their column."""
    row_group, found = metadata.row_group(group), []
    for index in range(row_group.num_columns):
        chunk = row_group.column(index)
        start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        column = chunk.path_in_schema.replace(".list.element", "")  # twice for a list of lists
        found.append(Chunk(column=column, start=start, stop=start + chunk.total_compressed_size))
    return found


def timestamp_bounds(metadata: pq.FileMetaData, group: int) -> tuple[int, int] | None:
    """First and last second of a row group, as its statistics say; None where it has none."""
    row_group = metadata.row_group(group)
    for index in range(row_group.num_columns):
        column = row_group.column(index)
        if column.path_in_schema == "timestamp":
            statistics = column.statistics
            known = statistics is not None and statistics.has_min_max and type(statistics.min) is int
            return (statistics.min, statistics.max) if known else None
    return None


def block_hashes(path: Path) -> tuple[str, ...]:
    """Hash of the footer, then of every column of every row group, of a file that was just written."""
    footer = read_footer(path)
    found = [hash_bytes(footer)]
    with parse_footer(footer) as file:
        metadata = file.metadata
    with path.open("rb") as file:
        for group in range(metadata.num_row_groups):
            for chunk in chunks_of(metadata, group):
                file.seek(chunk.start)
                found.append(hash_bytes(file.read(chunk.stop - chunk.start)))
    return tuple(found)


class Block(Positioned):
    """The bytes of some columns, in memory, as a file that pyarrow reads; there is nothing outside of them.

    Columns that touch are read in one piece; what lies between others is not read.

    size_bytes  of the whole file, which the decoder asks for
    """

    closed = False

    def __init__(self, path: Path | RemotePath, chunks: Sequence[Chunk], *, size_bytes: int) -> None:
        self._starts: list[int] = []
        self._pieces: list[memoryview] = []
        remote = isinstance(path, RemotePath)
        with path.open("rb") as file:
            for start, stop in _spans(chunks):
                file.seek(start)
                self._starts.append(start)
                piece = memoryview(file.read(stop - start)) if remote else _read_into_pool(file, stop - start)
                self._pieces.append(piece)
        self._size, self._position = size_bytes, 0

    @property
    def bytes_read(self) -> int:
        """How much of the file is here."""
        return sum(len(piece) for piece in self._pieces)

    def changed(self, chunks: Sequence[Chunk], written: Sequence[str]) -> tuple[Chunk, str, str] | None:
        """The first of `chunks` whose hash is not the written one, with the hash that came and the written one."""
        for chunk, digest in zip(chunks, written, strict=True):
            found = hash_bytes(self._at(chunk.start)[: chunk.stop - chunk.start])
            if found != digest:
                return chunk, found, digest
        return None

    def read(self, count: int = -1) -> memoryview:
        piece = self._at(self._position)
        if count >= 0:
            piece = piece[:count]
        self._position += len(piece)
        return piece

    def _at(self, position: int) -> memoryview:
        """What is here from `position` on, to the end of its piece."""
        number = bisect.bisect_right(self._starts, position) - 1
        if number < 0 or position > self._starts[number] + len(self._pieces[number]):
            raise OSError(f"byte {position} lies outside the columns that were read")
        return self._pieces[number][position - self._starts[number] :]

    def size(self) -> int:
        return self._size

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        """The memory lives as long as the decoder needs it."""


def _read_into_pool(file: Any, count: int) -> memoryview:
    """Up to `count` bytes, in memory of Arrow's pool, which comes back with its pages in place; others must fault."""
    piece, done = memoryview(pa.allocate_buffer(count)).cast("B"), 0
    while done < count:
        came = file.readinto(piece[done:])
        if not came:
            break
        done += came
    return piece[:done]


def _spans(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Bytes to read, chunks that touch joined: 4..10 10..12 20..30 -> (4, 12) (20, 30)."""
    spans: list[tuple[int, int]] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.start):
        if spans and chunk.start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], chunk.stop))
        else:
            spans.append((chunk.start, chunk.stop))
    return spans


def as_arrow_file(block: Block) -> pa.PythonFile:
    """`block` for pyarrow."""
    return pa.PythonFile(block, mode="r")
