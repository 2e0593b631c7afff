"""Where a data set lies: a directory, or a URL that fsspec reads ("s3://bucket/log", "gs://...", "memory://...").

Reading asks little of a path: join, open, size. `RemotePath` is that little over an fsspec filesystem, so that the code
that reads, hashes and compares is one and the same for both, and what comes over a network is compared with the hashes
in schema.json before it is decoded, as what comes from a disk. fsspec and the package of the protocol (s3fs, gcsfs)
are needed for URLs alone.

Reads are exact ranges: one for a footer's length, one for the footer, and one for each run of columns that touch. No
block cache stands between: a row group is read once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

# user:password@ behind the "://" of any URL of a chain ("simplecache::https://..."), whose "::" is no such colon. A
# password may hold "/" and "@", where urlsplit finds none: refused is what could be one, a port before a later "@" too.
_PASSWORD = re.compile(r"://(?:(?!::)[^/])*:(?!:)[^@]*@")


@dataclass(frozen=True, kw_only=True)
class _Size:
    """As much of os.stat_result as there is."""

    st_size: int


class RemotePath:
    """The part of pathlib.Path that reading uses, on an fsspec filesystem. OSError where something cannot be read."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._filesystem, f"{self._path.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return str(self._filesystem.unstrip_protocol(self._path))

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def open(self, mode: str = "rb") -> Any:
        """A file of bytes, for reading."""
        if mode != "rb":
            raise ValueError(f"{self}: mode {mode!r}; expected 'rb': data at a URL are read, never written")
        return self._filesystem.open(self._path, "rb", cache_type="none")

    def stat(self) -> _Size:
        """Its size now."""
        self._filesystem.invalidate_cache(self._path)
        found = self._filesystem.info(self._path)
        if found["type"] != "file" or found["size"] is None:
            raise OSError(f"{self} is no file with a size")
        return _Size(st_size=int(found["size"]))

    def read_text(self, encoding: str = "utf-8") -> str:
        """All of it."""
        with self.open() as file:
            text: str = file.read().decode(encoding)
        return text

    def is_file(self) -> bool:
        """Whether there is such a file."""
        return bool(self._filesystem.isfile(self._path))

    def files_below(self, suffix: str) -> Iterator[str]:
        """Paths, relative to this one, of all files below that end so."""
        root = PurePosixPath(self._path)
        for path in self._filesystem.find(self._path):
            if path.endswith(suffix):
                yield PurePosixPath(path).relative_to(root).as_posix()


DataPath = Path | RemotePath
"""Where a data set lies."""


def is_url(directory: object) -> bool:
    """Whether `directory` is a URL and not a path of this machine."""
    return isinstance(directory, str) and "://" in directory


def _refuse_password(url: str) -> None:
    """Raise ValueError, which repeats nothing but the first protocol, where any URL of a chain has a password."""
    if _PASSWORD.search(url):
        raise ValueError(
            f"data at {url.partition('://')[0]}://: the URL has a password in it (user:password@), which would be "
            "written into the files of every run that reads it: leave it out, and give it by the environment"
        )


def data_path(directory: str | os.PathLike[str] | RemotePath) -> DataPath:
    """The path of a data set: a Path, or for a URL a RemotePath.

    Raises ValueError where fsspec, or what it needs for the protocol, is missing, or where the URL has a password.
    """
    if isinstance(directory, RemotePath):
        return directory
    if not is_url(directory):
        return Path(directory)
    url = str(directory)
    _refuse_password(url)
    try:
        import fsspec
    except ImportError:
        raise ValueError(
            f"{url}: data at a URL are read through fsspec, which is not installed: pip install fsspec"
        ) from None
    try:
        filesystem, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as problem:
        raise ValueError(f"{url}: fsspec cannot read it: {problem}") from None
    return RemotePath(filesystem, path)


def local_only(directory: object, what: str) -> None:
    """Raise ValueError where a URL came and `what` needs a directory of this machine."""
    if is_url(directory):
        _refuse_password(str(directory))
    if is_url(directory) or isinstance(directory, RemotePath):
        raise ValueError(f"{what}: expected a directory of this machine, came {directory}")
