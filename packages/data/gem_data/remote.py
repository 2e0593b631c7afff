"""Where a data set lies: a directory, or a URL that fsspec reads ("s3://bucket/log", "gs://...", "memory://...").

Reading asks little of a path: join, open, size. `RemotePath` is that little over an fsspec filesystem, so that the code
that reads, hashes and compares is one and the same for both, and what comes over a network is compared with the hashes
in schema.json before it is decoded, as what comes from a disk. fsspec and the package of the protocol (s3fs, gcsfs)
are needed for URLs alone.

Reads are exact ranges: one for a footer's length, one for the footer, and one for each run of columns that touch. No
block cache stands between, unless the URL asks for one (blockcache::): a row group is read once.

A store that does not answer says nothing of what is in the data. So every access is tried again after WAITS_S, whatever
a library of a protocol raises (many have errors that are no OSError), and then ends in a ReadError, which is no
DataError: rows are left out of training for damage, never for a network. No attempt begins later than LAST_ATTEMPT_S
after the first: libraries try again and wait on their own, and several times that would outlive the job's watchdog,
which tells nothing of the store.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

Answer = TypeVar("Answer")

WAITS_S = (0.5, 2.0, 5.0)
"""Between one attempt and the next; after the last of them there is one more."""

LAST_ATTEMPT_S = 15.0
"""No attempt begins later than this after the first. One that began takes as long as its library lets it."""

# Facts about the data, and mistakes in the program: no attempt will change them.
_FACTS = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_OURS = (TypeError, AttributeError, NameError, NotImplementedError, ImportError, MemoryError)
_FACT_NUMBERS = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)

# user:password@ behind the "://" of any URL of a chain ("simplecache::https://..."), whose "::" is no such colon. A
# password may hold "/" and "@", where urlsplit finds none: refused is what could be one, a port before a later "@" too.
_PASSWORD = re.compile(r"://(?:(?!::)[^/])*:(?!:)[^@]*@")


@dataclass(frozen=True, kw_only=True)
class _Size:
    """As much of os.stat_result as there is."""

    st_size: int


class ReadError(OSError):
    """Data that could not be read where they lie: no answer, no access. Of what is in them nothing is known.

    file, row_group  as in DataError
    """

    def __init__(self, message: str, *, file: str | None = None, row_group: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.row_group = row_group


def is_unread(error: Exception) -> bool:
    """Whether `error` is one of reading, not of what was read. pyarrow's OSErrors of damaged pages have no number."""
    if isinstance(error, ReadError):
        return True
    return isinstance(error, OSError) and error.errno is not None and error.errno not in _FACT_NUMBERS


def _patiently(place: object, action: Callable[[], Answer]) -> Answer:
    """What `action` gives, after several attempts where it takes them. Raises ReadError, or FileNotFoundError at once.

    place: for the message
    """
    began = time.monotonic()
    for attempt, wait in enumerate((*WAITS_S, None), start=1):
        try:
            return action()
        except (*_FACTS, *_OURS):
            raise
        except Exception as error:
            took_s = time.monotonic() - began
            lasting = isinstance(error, PermissionError)
            if wait is None or lasting or took_s + wait > LAST_ATTEMPT_S:
                count = "" if lasting else f" ({attempt} attempt{'s' * (attempt > 1)}, {took_s:.0f} s)"
                raise ReadError(f"{place}: {type(error).__name__}: {error}{count}") from error
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


class Positioned:
    """What files for reading have in common: a place in so many bytes."""

    _size: int
    _position: int

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + position
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


class _PatientFile(Positioned, io.RawIOBase):
    """A file for reading, which is opened again where a read fails, or gives less than there is."""

    def __init__(self, place: object, reopen: Callable[[], Any]) -> None:
        self._place, self._reopen, self._position = place, reopen, 0
        self._file: Any = None
        self._size = _patiently(place, self._open)

    def _open(self) -> int:
        self._file = self._reopen()
        return int(self._file.seek(0, os.SEEK_END))

    def read(self, count: int | None = -1) -> bytes:
        left = max(self._size - self._position, 0)
        wanted = left if count is None or count < 0 else min(count, left)
        data = _patiently(self._place, lambda: self._read_once(wanted)) if wanted else b""
        self._position += wanted
        return data

    def _read_once(self, wanted: int) -> bytes:
        try:
            if self._file is None:
                self._file = self._reopen()
            self._file.seek(self._position)
            data: bytes = self._file.read(wanted)
            if len(data) != wanted:
                raise EOFError(f"{len(data)} of {wanted} bytes came from byte {self._position} on")
        except Exception:
            self._file = None  # its connection may be what broke
            raise
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):  # what was read is here: an end that fails loses nothing
                file.close()
        super().close()


class RemotePath:
    """The part of pathlib.Path that reading uses, on an fsspec filesystem. FileNotFoundError where there is nothing,
    ReadError where it cannot be read.
    """

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
        filesystem, path = self._filesystem, self._path
        # That of blockcache:: reads without a cache below its own, and takes no word on it.
        blocks = "blockcache" in type(filesystem).protocol
        options = {} if blocks else {"cache_type": "none"}
        return _PatientFile(self, lambda: filesystem.open(path, "rb", **options))

    def stat(self) -> _Size:
        """Its size now."""
        found = _patiently(self, self._info)
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
        try:
            return bool(_patiently(self, self._info)["type"] == "file")
        except _FACTS:
            return False

    def _info(self) -> dict[str, Any]:
        self._filesystem.invalidate_cache(self._path)
        found: dict[str, Any] = self._filesystem.info(self._path)
        return found

    def files_below(self, suffix: str) -> Iterator[str]:
        """Paths, relative to this one, of all files below that end so."""
        root = PurePosixPath(self._path)
        for path in _patiently(self, lambda: list(self._filesystem.find(self._path))):
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
