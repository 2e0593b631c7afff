"""The checkpoint directory: what its bytes mean, how it is written, verified and read. Knows tensors and JSON, no
training.

    step-00000100/
        manifest.json            written last; canonical JSON; its own SHA-256 inside
        state.json               everything that is not a tensor
        tensors-00000.safetensors, tensors-00001.safetensors, ...

The manifest lists every file with its size and one xxh3-64 per block of 1 MiB, and every tensor with dtype, shape and
pieces. A piece is a range of rows (of dim 0) in one file, so that a table may be cut into several files, and later be
written by several ranks, without changing the format. Keys are canonical names and say nothing of the sharding.

Why not torch's own formats: `torch.save` and the metadata of DCP are pickles (code runs on load), and neither notices
a flipped bit. Why 1 MiB blocks: a fault is named by byte range, and a partial read can be checked. Why canonical
JSON: any changed byte of the manifest, white space included, is found, because the file must equal the serialisation
of its content.

Writing: everything goes to a hidden sibling directory, each file is fsynced, then the directory, then one rename
publishes it and the parent directory is fsynced. A directory named step-NNNNNNNN is therefore complete or damaged
afterwards, never half written. No file says which checkpoint is the latest: that is derived from the valid manifests.

Cost: xxh3 runs at several GB/s per core; SHA-256 only over the manifest (about 100 bytes a MiB).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from gem_pipelines.errors import CheckpointError

FORMAT = "gemline-checkpoint"
FORMAT_VERSION = (1, 0)
BLOCK_BYTES = 1 << 20
SHARD_BYTES = 256 << 20
MANIFEST = "manifest.json"
STATE = "state.json"
MAX_MANIFEST_BYTES = 256 << 20

_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}\.(json|safetensors)")
_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (
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
class Damage:
    """One fault found by `find_damage`: file, byte range [start, stop) or None, and what is wrong."""

    file: str
    start: int | None
    stop: int | None
    what: str

    def __str__(self) -> str:
        where = "" if self.start is None else f" bytes {self.start}..{self.stop}"
        return f"{self.file}{where}: {self.what}"


def canonical_json(value: Any) -> bytes:
    """The one serialisation of `value`. NaN and infinity are refused."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def write_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Publish `checkpoint` as `directory`, all or nothing. The parent must exist and `directory` must not."""
    if directory.exists():
        raise CheckpointError(f"{directory} exists already; a checkpoint is never overwritten")
    temporary = directory.parent / f".tmp-{directory.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write_files(temporary, checkpoint)
        _sync_directory(temporary)
        os.rename(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_directory(directory.parent)


def _write_files(temporary: Path, checkpoint: Checkpoint) -> None:
    files, tensors = [], {key: _describe(tensor) for key, tensor in checkpoint.tensors.items()}
    for number, shard in enumerate(_shards(checkpoint.tensors)):
        name = f"tensors-{number:05d}.safetensors"
        named = {}
        for key, start, stop, piece in shard:
            inside = key if stop - start == _rows(checkpoint.tensors[key]) else f"{key}@{start}"
            named[inside] = piece
            tensors[key]["pieces"].append({"file": name, "name": inside, "rows": [start, stop]})
        files.append(_write_file(temporary, name, save_safetensors(named)))
    files.append(_write_file(temporary, STATE, canonical_json(checkpoint.state)))
    manifest = {
        "format": FORMAT,
        "format_version": list(FORMAT_VERSION),
        "block_bytes": BLOCK_BYTES,
        "files": files,
        "tensors": tensors,
        "about": checkpoint.about,
    }
    manifest["sha256"] = hashlib.sha256(canonical_json(manifest)).hexdigest()
    _write_file(temporary, MANIFEST, canonical_json(manifest))


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def _describe(tensor: Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    assert dtype in _DTYPES, f"checkpoints do not hold {dtype}"
    return {"dtype": dtype, "shape": list(tensor.shape), "pieces": []}


def _shards(tensors: dict[str, Tensor]) -> Iterator[list[tuple[str, int, int, Tensor]]]:
    """Groups of (key, first row, end row, rows) of at most SHARD_BYTES each, in the order of the sorted keys."""
    shard: list[tuple[str, int, int, Tensor]] = []
    room = SHARD_BYTES
    for key in sorted(tensors):
        tensor = tensors[key].detach().cpu().contiguous()
        rows, start = _rows(tensor), 0
        row_bytes = max(1, tensor.numel() * tensor.element_size() // max(1, rows))
        while True:
            stop = min(rows, start + max(1, room // row_bytes))
            piece = tensor[start:stop].contiguous() if tensor.ndim else tensor
            if shard and piece.numel() * piece.element_size() > room:
                yield shard
                shard, room = [], SHARD_BYTES
                continue
            shard.append((key, start, stop, piece))
            room -= piece.numel() * piece.element_size()
            start = stop
            if start >= rows:
                break
            yield shard
            shard, room = [], SHARD_BYTES
    if shard:
        yield shard


def _write_file(directory: Path, name: str, data: bytes) -> dict[str, Any]:
    with open(directory / name, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"name": name, "bytes": len(data), "xxh3_64": _block_hashes(data)}


def _block_hashes(data: bytes) -> list[str]:
    view = memoryview(data)
    return [xxhash.xxh3_64_hexdigest(view[i : i + BLOCK_BYTES]) for i in range(0, len(data), BLOCK_BYTES)]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, checked against its own SHA-256 and its structure. Raises CheckpointError."""
    raw = _read_regular_file(directory / MANIFEST, limit=MAX_MANIFEST_BYTES)
    try:
        manifest = json.loads(raw)
        sound = isinstance(manifest, dict) and canonical_json(manifest) == raw
    except (ValueError, RecursionError):
        sound = False
    if sound:
        body = {key: value for key, value in manifest.items() if key != "sha256"}
        sound = manifest.get("sha256") == hashlib.sha256(canonical_json(body)).hexdigest()
    if not sound:
        raise CheckpointError(f"{directory / MANIFEST} is damaged: its content does not match its SHA-256")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{directory / MANIFEST}: format is {manifest.get('format')!r}, expected {FORMAT!r}")
    if manifest["format_version"][0] != FORMAT_VERSION[0]:
        raise CheckpointError(
            f"{directory}: checkpoint format {manifest['format_version']}, this version reads {list(FORMAT_VERSION)}; "
            "use the version of gemline that wrote it"
        )
    for entry in manifest["files"]:
        if not _FILE_NAME.fullmatch(entry["name"]):
            raise CheckpointError(f"{directory / MANIFEST}: file name {entry['name']!r} is not allowed in a checkpoint")
    return manifest


def _read_regular_file(path: Path, *, limit: int) -> bytes:
    """The bytes of a regular file (no link) of at most `limit` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise CheckpointError(f"{path} has {size} bytes, expected at most {limit}")
        return file.read(limit + 1)


def _check_file(directory: Path, entry: dict[str, Any], block_bytes: int) -> tuple[bytes, list[Damage]]:
    """Bytes of one listed file, and where they differ from the manifest."""
    name, expected = entry["name"], entry["bytes"]
    try:
        data = _read_regular_file(directory / name, limit=max(expected * 2, expected + BLOCK_BYTES))
    except CheckpointError as error:
        return b"", [Damage(file=name, start=None, stop=None, what=str(error))]
    damages = []
    if len(data) != expected:
        damages.append(
            Damage(
                file=name,
                start=min(len(data), expected),
                stop=max(len(data), expected),
                what=f"has {len(data)} bytes, expected {expected}",
            )
        )
    view = memoryview(data)
    for number, expected_hash in enumerate(entry["xxh3_64"]):
        start = number * block_bytes
        stop = min(start + block_bytes, expected)
        found = xxhash.xxh3_64_hexdigest(view[start:stop])
        if found != expected_hash and start < len(data):
            damages.append(Damage(file=name, start=start, stop=stop, what=f"xxh3 is {found}, expected {expected_hash}"))
    return data, damages


def find_damage(directory: Path) -> list[Damage]:
    """Every fault of a checkpoint's bytes; empty where it is sound. Reads all files once.

    Covers: manifest, missing, extra, truncated or changed files, links.
    """
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        return [Damage(file=MANIFEST, start=None, stop=None, what=str(error))]
    listed = {entry["name"] for entry in manifest["files"]} | {MANIFEST}
    damages = [
        Damage(file=path.name, start=None, stop=None, what="is not listed in the manifest")
        for path in sorted(directory.iterdir())
        if path.name not in listed
    ]
    for entry in manifest["files"]:
        damages += _check_file(directory, entry, manifest["block_bytes"])[1]
    return damages


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read and verify in one pass: every byte that becomes a tensor was hashed. Raises CheckpointError naming all
    faults.
    """
    manifest = read_manifest(directory)
    listed = {entry["name"] for entry in manifest["files"]} | {MANIFEST}
    damages = [
        Damage(file=path.name, start=None, stop=None, what="is not listed in the manifest")
        for path in sorted(directory.iterdir())
        if path.name not in listed
    ]
    contents: dict[str, bytes] = {}
    for entry in manifest["files"]:
        data, found = _check_file(directory, entry, manifest["block_bytes"])
        damages += found
        contents[entry["name"]] = data
    if damages:
        raise CheckpointError(f"{directory} is damaged:\n  " + "\n  ".join(map(str, damages)))
    state = json.loads(contents.pop(STATE))
    loaded = {name: load_safetensors(data) for name, data in contents.items()}
    tensors = {key: _assemble(directory, key, entry, loaded) for key, entry in manifest["tensors"].items()}
    return Checkpoint(tensors=tensors, state=state, about=manifest["about"])


def _assemble(directory: Path, key: str, entry: dict[str, Any], loaded: dict[str, dict[str, Tensor]]) -> Tensor:
    """One tensor from its pieces, which must cover its rows in order, without gap or overlap."""
    pieces, row = [], 0
    for piece in entry["pieces"]:
        start, stop = piece["rows"]
        tensor = loaded.get(piece["file"], {}).get(piece["name"])
        if tensor is None or start != row:
            raise CheckpointError(f"{directory}: piece {piece} of tensor {key!r} is missing or out of order")
        pieces.append(tensor)
        row = stop
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if list(whole.shape) != entry["shape"] or whole.dtype != _DTYPES.get(entry["dtype"]):
        raise CheckpointError(
            f"{directory}: tensor {key!r} is {list(whole.shape)} {whole.dtype}, "
            f"the manifest says {entry['shape']} {entry['dtype']}"
        )
    return whole


def state_digest(manifest: dict[str, Any]) -> str:
    """SHA-256 over the training state (tensors and state.json), equal for two runs that stand at the same bits.

    Leaves out `about`: time, run id and directory differ between equal runs.
    """
    return hashlib.sha256(canonical_json([manifest["files"], manifest["tensors"]])).hexdigest()


def step_directory(checkpoints: Path, step: int) -> Path:
    """Directory of the checkpoint of `step`."""
    return checkpoints / f"step-{step:08d}"


def list_steps(checkpoints: Path) -> list[int]:
    """Steps of all published checkpoint directories, ascending, sound or not."""
    if not checkpoints.is_dir():
        return []
    matches = (re.fullmatch(r"step-(\d{8,})", path.name) for path in checkpoints.iterdir() if path.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)
