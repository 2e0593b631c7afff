"""The bytes of a row group, read once, compared with the hash in schema.json, and only then given to the decoder.

Page checksums cover the pages' content. They do not cover page headers, nor the footer, and they are compared in the
middle of decoding, by the same code that a damaged length may have led astray. A hash of the footer and one of every
row group's bytes (FileInfo.blocks_xxh3, written by write_dataset) settle it before a byte is interpreted: what the
decoder sees is what the writer wrote, so a flipped bit can neither pass nor crash it. It is no protection against
someone who rewrites schema.json too; isolated.py is.

Cost: the bytes are read in one piece, which a decoder reads anyway, and hashed at several GB/s.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

_MAGIC = b"PAR1"
_TAIL_BYTES = 8
MAX_FOOTER_BYTES = 64 << 20


def read_footer(path: Path) -> bytes:
    """The footer with its length and the magic number: the last bytes of a Parquet file. ValueError if it has none."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
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


def hash_bytes(data: Any) -> str:
    """xxh3-64, 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def group_range(metadata: pq.FileMetaData, group: int) -> tuple[int, int]:
    """First byte and end of a row group: all pages of all its columns, dictionaries included."""
    row_group = metadata.row_group(group)
    starts, stops = [], []
    for index in range(row_group.num_columns):
        chunk = row_group.column(index)
        start = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        starts.append(start)
        stops.append(start + chunk.total_compressed_size)
    return (min(starts), max(stops)) if starts else (0, 0)


def block_hashes(path: Path) -> tuple[str, ...]:
    """Hash of the footer, then of every row group, of a file that was just written."""
    metadata = pq.read_metadata(path)
    found = [hash_bytes(read_footer(path))]
    with path.open("rb") as file:
        for group in range(metadata.num_row_groups):
            start, stop = group_range(metadata, group)
            file.seek(start)
            found.append(hash_bytes(file.read(stop - start)))
    return tuple(found)


class Block:
    """Bytes start..stop of a file, in memory, as a file that pyarrow reads; whatever lies outside reads as nothing.

    size_bytes  of the whole file, which the decoder asks for
    """

    closed = False

    def __init__(self, path: Path, *, start: int, stop: int, size_bytes: int) -> None:
        with path.open("rb") as file:
            file.seek(start)
            self.data = file.read(stop - start)
        self._view = memoryview(self.data)
        self._start, self._size, self._position = start, size_bytes, 0

    def read(self, count: int = -1) -> memoryview:
        first = max(self._position - self._start, 0)
        stop = len(self._view) if count < 0 else max(self._position - self._start + count, 0)
        piece = self._view[first:stop]
        self._position += len(piece)
        return piece

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + position
        return self._position

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        """The memory lives as long as the decoder needs it."""


def as_arrow_file(block: Block) -> pa.PythonFile:
    """`block` for pyarrow."""
    return pa.PythonFile(block, mode="r")
