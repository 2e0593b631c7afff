"""The checkpoint directory: how it is written and read. Knows tensors and JSON, no training.

    step-00000100/
        manifest.json            written last; canonical JSON with its own SHA-256; see checkpoint_manifest.py
        state.json               everything that is not a tensor
        tensors-00000.safetensors, tensors-00001.safetensors, ...

The manifest lists every file with its size and one xxh3-64 per block of 1 MiB, and every tensor with dtype, shape and
pieces. A piece is a range of rows (of dim 0) in one file, so that a table may be cut into several files, and later be
written by several ranks, without changing the format. Keys are canonical names and say nothing of the sharding.

Writing: everything goes to a hidden sibling directory, each file is fsynced, then the directory, then one rename
publishes it and the parent directory is fsynced. A directory named step-NNNNNNNN is therefore complete or damaged
afterwards, never half written. No file says which checkpoint is the latest: that is derived from the valid manifests.

A write that fails names the path, the bytes it needs and the bytes that are free, and leaves nothing behind. The
names passed to failpoints.reach are where the tests kill it (tests/reliability/test_ckpt_kill.py).

Cost: while a file is written its bytes are in memory once more (at most SHARD_BYTES).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from gem_pipelines import failpoints
from gem_pipelines.checkpoint_manifest import (
    MANIFEST,
    Base,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    block_hashes,
    canonical_json,
    read_file,
    read_manifest,
    unlisted_files,
)
from gem_pipelines.errors import CheckpointError

SHARD_BYTES = 256 << 20
STATE = "state.json"

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint in memory: tensors by canonical key, `state` and `about` as JSON-able dictionaries.

    state  belongs to the training state and is compared when two runs are (loader, RNG, metrics, step)
    about  describes the writing (time, run, versions) and is not part of the training state
    """

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    about: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows [start, stop) of tensor `key`, on their way into a file. whole: these are all its rows."""

    key: str
    start: int
    stop: int
    whole: bool
    data: Tensor

    @property
    def name(self) -> str:
        return self.key if self.whole else f"{self.key}@{self.start}"

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(kw_only=True)
class WriteStats:
    """What writing one checkpoint took."""

    bytes: int = 0
    seconds: float = 0.0
    hash_seconds: float = 0.0
    sync_seconds: float = 0.0


def needed_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of its tensors: what a checkpoint takes on disk, up to some KB."""
    return sum(tensor.nbytes for tensor in checkpoint.tensors.values())


def check_space(parent: Path, needed: int) -> None:
    """Raise CheckpointError where `needed` bytes do not fit into the file system of `parent`."""
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise CheckpointError(
            f"{parent}: a checkpoint needs {needed} bytes and {free} are free: make room, keep fewer "
            "(train.keep_checkpoints) or choose another --run-dir"
        )


def write_checkpoint(directory: Path, checkpoint: Checkpoint, *, base: Base | None = None) -> WriteStats:
    """Publish `checkpoint` as `directory`, all or nothing. The parent must exist and `directory` must not.

    base  the full checkpoint that an incremental one builds on (checkpoint_incremental.py)

    Raises CheckpointError, with nothing left behind.
    """
    if directory.exists():
        raise CheckpointError(f"{directory} exists already; a checkpoint is never overwritten")
    begin, stats = time.perf_counter(), WriteStats()
    temporary = directory.parent / f".tmp-{directory.name}-{os.getpid()}"
    try:
        check_space(directory.parent, needed_bytes(checkpoint))
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write_files(temporary, checkpoint, base, stats)
        _sync_directory(temporary, stats)
        failpoints.reach("before_rename")
        os.rename(temporary, directory)
        failpoints.reach("before_dir_fsync")
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(directory.parent).free
        raise CheckpointError(
            f"{error.filename or temporary}: {error.strerror or error}; a checkpoint needs {needed_bytes(checkpoint)} "
            f"bytes, {free} are free"
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_directory(directory.parent, stats)
    stats.seconds = time.perf_counter() - begin
    return stats


def _write_files(temporary: Path, checkpoint: Checkpoint, base: Base | None, stats: WriteStats) -> None:
    files: list[FileEntry] = []
    pieces: dict[str, list[Piece]] = {key: [] for key in checkpoint.tensors}
    for number, shard in enumerate(_shards(checkpoint.tensors)):
        name = f"tensors-{number:05d}.safetensors"
        files.append(_write_file(temporary, name, save_safetensors({rows.name: rows.data for rows in shard}), stats))
        for rows in shard:
            pieces[rows.key].append(Piece(file=name, name=rows.name, rows=(rows.start, rows.stop)))
    files.append(_write_file(temporary, STATE, canonical_json(checkpoint.state), stats))
    tensors = {key: _describe(tensor, pieces[key]) for key, tensor in checkpoint.tensors.items()}
    manifest = Manifest(files=tuple(files), tensors=tensors, about=checkpoint.about, base=base)
    failpoints.reach("before_manifest")
    _write_file(temporary, MANIFEST, manifest.to_bytes(), stats)


def _describe(tensor: Tensor, pieces: list[Piece]) -> TensorEntry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    assert dtype in _DTYPES, f"checkpoints do not hold {dtype}"
    return TensorEntry(dtype=dtype, shape=tuple(tensor.shape), pieces=tuple(pieces))


def _shards(tensors: dict[str, Tensor]) -> Iterator[list[_Rows]]:
    """Rows for one file after the other, of at most SHARD_BYTES (or one row) each, in the order of the sorted keys."""
    shard: list[_Rows] = []
    room = SHARD_BYTES
    for key in sorted(tensors):
        for rows in _cut(key, tensors[key]):
            if shard and rows.bytes > room:
                yield shard
                shard, room = [], SHARD_BYTES
            shard.append(rows)
            room -= rows.bytes
    if shard:
        yield shard


def _cut(key: str, tensor: Tensor) -> Iterator[_Rows]:
    """A tensor in pieces of at most SHARD_BYTES, or of one row."""
    tensor = tensor.detach().cpu().contiguous()
    total = tensor.shape[0] if tensor.ndim else 1
    if tensor.ndim == 0 or tensor.numel() * tensor.element_size() <= SHARD_BYTES:
        yield _Rows(key=key, start=0, stop=total, whole=True, data=tensor)
        return
    rows = max(1, SHARD_BYTES * total // (tensor.numel() * tensor.element_size()))
    for start in range(0, total, rows):
        stop = min(start + rows, total)
        yield _Rows(key=key, start=start, stop=stop, whole=stop - start == total, data=tensor[start:stop])


def _write_file(directory: Path, name: str, data: bytes, stats: WriteStats) -> FileEntry:
    view = memoryview(data)
    with open(directory / name, "xb") as file:
        failpoints.reach("after_shard_open")
        file.write(view[: len(data) // 2])
        failpoints.reach("half_shard")
        file.write(view[len(data) // 2 :])
        file.flush()
        failpoints.reach("before_fsync")
        begin = time.perf_counter()
        os.fsync(file.fileno())
    synced = time.perf_counter()
    hashes = block_hashes(data)
    stats.bytes += len(data)
    stats.sync_seconds += synced - begin
    stats.hash_seconds += time.perf_counter() - synced
    return FileEntry(name=name, bytes=len(data), xxh3_64=hashes)


def _sync_directory(directory: Path, stats: WriteStats) -> None:
    begin = time.perf_counter()
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    stats.sync_seconds += time.perf_counter() - begin


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read and verify in one pass: every byte that becomes a tensor was hashed.

    Raises CheckpointError naming all faults.
    """
    manifest = read_manifest(directory)
    damages = unlisted_files(directory, manifest)
    contents: dict[str, bytes] = {}
    for entry in manifest.files:
        contents[entry.name], found = read_file(directory, entry, manifest.block_bytes)
        damages += found
    if damages:
        raise CheckpointError(f"{directory} is damaged:\n  " + "\n  ".join(map(str, damages)))
    try:
        state = json.loads(contents.pop(STATE))
        loaded = {name: load_safetensors(data) for name, data in contents.items()}
    except (KeyError, ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: a file is not what the manifest says: {error}") from None
    tensors = {key: _assemble(directory, key, entry, loaded) for key, entry in manifest.tensors.items()}
    return Checkpoint(tensors=tensors, state=state, about=manifest.about)


def _assemble(directory: Path, key: str, entry: TensorEntry, loaded: dict[str, dict[str, Tensor]]) -> Tensor:
    """One tensor from its pieces, which must cover its rows in order, without gap or overlap."""
    pieces, row = [], 0
    for piece in entry.pieces:
        tensor = loaded.get(piece.file, {}).get(piece.name)
        if tensor is None or piece.rows[0] != row or (tensor.ndim and tensor.shape[0] != piece.rows[1] - row):
            raise CheckpointError(f"{directory}: {piece} of tensor {key!r} is missing or out of order")
        pieces.append(tensor)
        row = piece.rows[1]
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else None
    if whole is None or tuple(whole.shape) != entry.shape or whole.dtype != _DTYPES.get(entry.dtype):
        found = "nothing" if whole is None else f"{tuple(whole.shape)} {whole.dtype}"
        raise CheckpointError(f"{directory}: tensor {key!r} is {found}, the manifest says {entry.shape} {entry.dtype}")
    return whole


def step_directory(checkpoints: Path, step: int) -> Path:
    """Directory of the checkpoint of `step`."""
    return checkpoints / f"step-{step:08d}"


def list_steps(checkpoints: Path) -> list[int]:
    """Steps of all published checkpoint directories, ascending, sound or not."""
    if not checkpoints.is_dir():
        return []
    matches = (re.fullmatch(r"step-(\d{8,})", path.name) for path in checkpoints.iterdir() if path.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)
