"""The manifest of a checkpoint, and finding out whether the bytes beside it are the ones that were written.

Why our own and not torch's formats: `torch.save` and the metadata of DCP are pickles (code runs on load), and neither
notices a flipped bit. Why hashes per block of 1 MiB: a fault is named by byte range, and a partial read can be checked.
Why canonical JSON: any changed byte of the manifest, white space included, is found, because the file must equal the
serialisation of its content. The SHA-256 guards against accidents, not against someone who rewrites it; what such a
manifest could do is bounded by its types, by plain file names and by the sizes of the real files.

Cost: xxh3 runs at several GB/s per core; SHA-256 only over the manifest (about 30 bytes a MiB).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from gem_pipelines.config_codec import check_types, from_json, to_json
from gem_pipelines.errors import CheckpointError, ConfigError

FORMAT = "gemline-checkpoint"
FORMAT_VERSION = (1, 1)
BLOCK_BYTES = 1 << 20
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}\.(json|safetensors)")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file beside the manifest: plain name, size, xxh3-64 of each block in hexadecimal."""

    name: str
    bytes: int
    xxh3_64: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows [start, stop) of a tensor: in `file`, under `name`."""

    file: str
    name: str
    rows: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A tensor by its whole shape, and the pieces that it is put together from, in order."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Base:
    """The full checkpoint beside this one that an incremental one builds on: its step, and its manifest's SHA-256."""

    step: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """manifest.json without its own hash. `about`: time, run, versions; not part of the training state.

    base: None for a full checkpoint, which is complete by itself.
    """

    format: str = FORMAT
    format_version: tuple[int, int] = FORMAT_VERSION
    block_bytes: int = BLOCK_BYTES
    files: tuple[FileEntry, ...]
    tensors: dict[str, TensorEntry]
    about: dict[str, Any]
    base: Base | None = None

    def to_bytes(self) -> bytes:
        """The content of manifest.json."""
        body = _body(self)
        return canonical_json({**body, "sha256": hashlib.sha256(canonical_json(body)).hexdigest()})


def _body(manifest: Manifest) -> dict[str, Any]:
    """As 1.0 wrote it where there is no base: manifests of both versions keep their hashes."""
    body: dict[str, Any] = to_json(manifest)
    return body if manifest.base is not None else {key: body[key] for key in body if key != "base"}


def manifest_sha256(manifest: Manifest) -> str:
    """The hash that stands in manifest.json."""
    return hashlib.sha256(canonical_json(_body(manifest))).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One fault found by `find_damage`: file, byte range [start, stop) or None, and what is wrong."""

    file: str
    start: int | None = None
    stop: int | None = None
    what: str

    def __str__(self) -> str:
        where = "" if self.start is None else f" bytes {self.start}..{self.stop}"
        return f"{self.file}{where}: {self.what}"


def canonical_json(value: Any) -> bytes:
    """The one serialisation of `value`. NaN and infinity are refused (ValueError)."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def block_hashes(data: bytes, block_bytes: int = BLOCK_BYTES) -> tuple[str, ...]:
    """xxh3-64 of every block."""
    view = memoryview(data)
    return tuple(xxhash.xxh3_64_hexdigest(view[i : i + block_bytes]) for i in range(0, len(data), block_bytes))


def read_manifest(directory: Path) -> Manifest:
    """The manifest, checked against its own SHA-256, its types and this version. Raises CheckpointError."""
    path = directory / MANIFEST
    manifest = _decode(path, _read_regular_file(path, limit=MAX_MANIFEST_BYTES))
    if manifest.format != FORMAT:
        raise CheckpointError(f"{path}: format is {manifest.format!r}, expected {FORMAT!r}")
    if manifest.format_version[0] != FORMAT_VERSION[0]:
        raise CheckpointError(
            f"{path}: format version is {list(manifest.format_version)}, this version reads {list(FORMAT_VERSION)}; "
            "use the version of gemline that wrote it"
        )
    for entry in manifest.files:
        if not _FILE_NAME.fullmatch(entry.name):
            raise CheckpointError(f"{path}: file name {entry.name!r} is not allowed in a checkpoint")
    return manifest


def _decode(path: Path, raw: bytes) -> Manifest:
    """Bytes to Manifest; CheckpointError unless they are exactly what `Manifest.to_bytes` writes."""
    try:
        value = json.loads(raw)
        if not isinstance(value, dict) or canonical_json(value) != raw:
            raise ValueError("it is not in canonical form")
        written_hash = value.pop("sha256", None)
        if written_hash != hashlib.sha256(canonical_json(value)).hexdigest():
            raise ValueError("its content does not match its SHA-256")
        manifest = from_json(Manifest, value)
        check_types(manifest, "")
        if manifest.block_bytes < 1 or any(entry.bytes < 0 for entry in manifest.files):
            raise ConfigError("a size is negative")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error or type(error).__name__}") from None
    assert isinstance(manifest, Manifest)
    return manifest


def _read_regular_file(path: Path, *, limit: int) -> bytes:
    """The bytes of a regular file (no link) of at most `limit` bytes."""
    try:
        # Without O_NONBLOCK a pipe would wait for a writer that never comes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        size = found.st_size
        if size > limit:
            raise CheckpointError(f"{path} has {size} bytes, expected at most {limit}")
        try:
            return file.read(limit + 1)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def read_file(directory: Path, entry: FileEntry, block_bytes: int) -> tuple[bytes, list[Damage]]:
    """Bytes of one listed file, and where they differ from the manifest."""
    try:
        data = _read_regular_file(directory / entry.name, limit=2 * entry.bytes + BLOCK_BYTES)
    except CheckpointError as error:
        return b"", [Damage(file=entry.name, what=str(error))]
    damages = []
    if len(data) != entry.bytes:
        first, last = sorted((len(data), entry.bytes))
        what = f"has {len(data)} bytes, expected {entry.bytes}"
        damages.append(Damage(file=entry.name, start=first, stop=last, what=what))
    found = block_hashes(data[: entry.bytes], block_bytes)
    if len(data) == entry.bytes and len(found) != len(entry.xxh3_64):
        damages.append(Damage(file=entry.name, what=f"{len(entry.xxh3_64)} hashes for {len(found)} blocks"))
    for number, (mine, written) in enumerate(zip(found, entry.xxh3_64, strict=False)):
        if mine != written:
            start = number * block_bytes
            stop = min(start + block_bytes, entry.bytes)
            damages.append(Damage(file=entry.name, start=start, stop=stop, what=f"xxh3 is {mine}, expected {written}"))
    return data, damages


def unlisted_files(directory: Path, manifest: Manifest) -> list[Damage]:
    """Files that the manifest does not know."""
    listed = {entry.name for entry in manifest.files} | {MANIFEST}
    extra = sorted(path.name for path in directory.iterdir() if path.name not in listed)
    return [Damage(file=name, what="is not listed in the manifest") for name in extra]


def find_damage(directory: Path) -> list[Damage]:
    """Every fault of a checkpoint's bytes; empty where it is sound. Reads all files once.

    Covers: manifest, missing, extra, truncated or changed files, links.
    """
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        return [Damage(file=MANIFEST, what=str(error))]
    damages = unlisted_files(directory, manifest)
    for entry in manifest.files:
        damages += read_file(directory, entry, manifest.block_bytes)[1]
    return damages


def state_digest(manifest: Manifest) -> str:
    """SHA-256 over the training state (tensors and state.json), equal for two runs that stand at the same bits.

    Leaves out `about`: time, versions and directory differ between equal runs.
    """
    body = to_json(manifest)
    return hashlib.sha256(canonical_json([body["files"], body["tensors"]])).hexdigest()
