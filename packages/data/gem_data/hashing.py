"""What a file contains, as 16 hexadecimal digits: xxh3-64 of its bytes.

write_dataset puts it into schema.json, loader states carry it, and verify_dataset compares it with the file. It tells
other data of equal path, size and rows apart; it is no protection against someone who wants two files to agree.

Why one read after writing and not hashing on the way: a Parquet writer may seek, and what is hashed here is what a
reader will get. Cost: one pass over bytes that are still in the page cache, several GB/s on one core.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from gem_data.remote import RemotePath

_CHUNK_BYTES = 1 << 22


def file_hash(path: Path | RemotePath) -> str:
    """xxh3-64 of the bytes of `path`, 16 lower-case hexadecimal digits. OSError where it cannot be read."""
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()
