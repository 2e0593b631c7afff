"""Incremental checkpoints: of every table only the rows that differ from a full checkpoint, lossless.

    step-00000100/   full                                     the base
    step-00000200/   changed rows since 100, and all the rest  base: step 100 and its manifest's SHA-256
    step-00000300/   changed rows since 100, and all the rest  (not since 200: losing 200 loses nothing of 300)

Tensors of an incremental checkpoint, for a table "item":

    changed.item.rows      (n,) int64, ascending: rows of which any bit of weight or momentum differs
    changed.item.weight    (n, dim)
    changed.item.momentum  (n,)

Dense parameters, optimizer state and state.json are whole in every checkpoint. Which rows changed is found by
comparing bits with the base, read back and verified, and not by noting the ids that were looked up: whatever changes a
row (a policy that hashes ids, an average over copies, a repair by hand) is in it. Where more than half of the bytes of
the tables changed, a full checkpoint is written instead and becomes the next base.

Cost: writing reads the base once and compares; rank 0 holds the tables twice meanwhile. Example: a table of 1,000,000
rows of 64 float32 with 10,000 rows touched takes 10,000 * (8 + 256 + 4) bytes = 2.7 MB instead of 260 MB.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gem_pipelines.checkpoint_format import (
    Checkpoint,
    WriteStats,
    needed_bytes,
    read_checkpoint,
    step_directory,
    write_checkpoint,
)
from gem_pipelines.checkpoint_manifest import Base, manifest_sha256, read_manifest
from gem_pipelines.errors import CheckpointError

PARTS = ("weight", "momentum")


class Chain:
    """Decides which checkpoints are full: the first of a process, then one of `full_every`."""

    def __init__(self, *, full_every: int = 1) -> None:
        self.full_every = full_every
        self._base: Base | None = None
        self._since = 0

    def write(self, directory: Path, checkpoint: Checkpoint) -> tuple[WriteStats, bool]:
        """Write `checkpoint` as a full or incremental one; returns what it took, and whether it is incremental."""
        reduced = self._reduced(directory.parent, checkpoint)
        if reduced is not None:
            self._since += 1
            return write_checkpoint(directory, reduced, base=self._base), True
        stats = write_checkpoint(directory, checkpoint)
        if self.full_every > 1:
            sha256 = manifest_sha256(read_manifest(directory))
            self._base, self._since = Base(step=int(directory.name.rpartition("-")[2]), sha256=sha256), 0
        return stats, False

    def _reduced(self, checkpoints: Path, checkpoint: Checkpoint) -> Checkpoint | None:
        """The incremental form; None where a full one is due, or is the better choice."""
        if self._base is None or self._since + 1 >= self.full_every:
            return None
        try:
            base = _read_base(checkpoints, self._base)
        except CheckpointError:  # damaged meanwhile: nothing may be built on it
            return None
        reduced = reduce_to_changes(checkpoint, base)
        tables = sum(_bytes(tensor) for key, tensor in checkpoint.tensors.items() if key.startswith("tables."))
        saved = needed_bytes(checkpoint) - needed_bytes(reduced)
        return reduced if saved >= tables / 2 else None


def reduce_to_changes(checkpoint: Checkpoint, base: Checkpoint) -> Checkpoint:
    """`checkpoint` with each table as its rows that differ from `base`. The tables must be the same ones."""
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if not key.startswith("tables.")}
    for table in table_names(checkpoint):
        now = {part: checkpoint.tensors[f"tables.{table}.{part}"] for part in PARTS}
        before = {part: base.tensors[f"tables.{table}.{part}"] for part in PARTS}
        changed = _differs(now["weight"], before["weight"]) | _differs(now["momentum"], before["momentum"])
        rows = changed.nonzero().squeeze(1)
        tensors[f"changed.{table}.rows"] = rows
        tensors |= {f"changed.{table}.{part}": now[part][rows] for part in PARTS}
    return replace(checkpoint, tensors=tensors)


def restore_changes(reduced: Checkpoint, base: Checkpoint) -> Checkpoint:
    """Inverse of `reduce_to_changes`. Raises CheckpointError where the changes do not fit the base."""
    tensors = {key: tensor for key, tensor in reduced.tensors.items() if not key.startswith("changed.")}
    for table in table_names(base):
        found = [reduced.tensors.get(f"changed.{table}.{part}") for part in ("rows", *PARTS)]
        whole = {part: base.tensors[f"tables.{table}.{part}"] for part in PARTS}
        rows = found[0]
        if rows is None or any(part is None for part in found):
            raise CheckpointError(f"the incremental checkpoint lacks the changes of table {table!r}")
        total = whole["weight"].shape[0]
        if rows.dtype != torch.int64 or (rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < total):
            raise CheckpointError(f"changed rows of table {table!r} are not rows of the base, which has {total}")
        for part in PARTS:
            values = reduced.tensors[f"changed.{table}.{part}"]
            if values.shape != (len(rows), *whole[part].shape[1:]) or values.dtype != whole[part].dtype:
                raise CheckpointError(
                    f"changed {part} of table {table!r} is {tuple(values.shape)} {values.dtype}, expected "
                    f"{(len(rows), *whole[part].shape[1:])} {whole[part].dtype}"
                )
            tensors[f"tables.{table}.{part}"] = whole[part].index_copy(0, rows, values)
    return replace(reduced, tensors=tensors)


def read_whole(directory: Path) -> Checkpoint:
    """Read and verify a checkpoint, and its base where it is incremental. Raises CheckpointError naming all faults."""
    checkpoint = read_checkpoint(directory)
    base = read_manifest(directory).base
    return checkpoint if base is None else restore_changes(checkpoint, _read_base(directory.parent, base))


def table_names(checkpoint: Checkpoint) -> list[str]:
    """Tables of a full checkpoint."""
    matches = (re.fullmatch(r"tables\.(.+)\.weight", key) for key in checkpoint.tensors)
    return sorted(match.group(1) for match in matches if match)


def _read_base(checkpoints: Path, base: Base) -> Checkpoint:
    directory = step_directory(checkpoints, base.step)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is missing: an incremental checkpoint builds on it")
    manifest = read_manifest(directory)
    if manifest_sha256(manifest) != base.sha256 or manifest.base is not None:
        raise CheckpointError(f"{directory} is not the checkpoint that an incremental one builds on: other manifest")
    return read_checkpoint(directory)


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """(rows,) bool: any bit of the row differs. -0.0 differs from 0.0, and a NaN from another NaN."""
    unlike = a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)
    return unlike if unlike.ndim == 1 else unlike.any(dim=1)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
