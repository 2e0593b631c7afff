"""A checkpoint in the formats that other programs read: dense part as safetensors, tables as Parquet, facts as JSON.

    OUT/dense.safetensors          dense parameters and buffers, under their canonical names without "dense."
    OUT/tables/<table>.parquet     one row per table row: row int64, weight fixed_size_list<float>[dim], momentum float
                                   tables with dynamic ids (zch) also: id int64, which holds the row, null where none
                                   does (free rows, and the last, which all ids without a row of their own look up)
    OUT/export.json                where it is from: step, configuration, versions, digest of the training state

The checkpoint is read and verified whole first, an incremental one with its base. OUT appears all or nothing. The
optimizer state stays behind: an export is for serving and analysis, a checkpoint for going on.

Cost: the checkpoint in memory once; each table once more as Arrow.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from gem_pipelines.checkpoint_format import Checkpoint
from gem_pipelines.checkpoint_incremental import read_whole, table_names
from gem_pipelines.checkpoint_manifest import canonical_json, read_manifest, state_digest
from gem_pipelines.errors import CheckpointError

ROWS_PER_GROUP = 65_536


def export(directory: Path, out: Path) -> None:
    """Write the checkpoint `directory` as `out`, which must not exist. Raises CheckpointError; nothing is left then."""
    if out.exists():
        raise CheckpointError(f"{out} exists already; an export is never overwritten")
    checkpoint = read_whole(directory)
    temporary = out.parent / f".tmp-{out.name}-{os.getpid()}"
    try:
        (temporary / "tables").mkdir(parents=True)
        dense = {k.removeprefix("dense."): v for k, v in checkpoint.tensors.items() if k.startswith("dense.")}
        save_file({name: tensor.contiguous() for name, tensor in dense.items()}, temporary / "dense.safetensors")
        for table in table_names(checkpoint):
            _write_table(temporary / "tables" / f"{table}.parquet", checkpoint, table)
        about = {
            "from": str(directory),
            "position": checkpoint.state.get("position"),
            "state_digest": state_digest(read_manifest(directory)),
            "about": checkpoint.about,
        }
        (temporary / "export.json").write_bytes(canonical_json(about))
        os.rename(temporary, out)
    except OSError as error:
        raise CheckpointError(f"{error.filename or out}: {error.strerror or error}; nothing was exported") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_table(path: Path, checkpoint: Checkpoint, table: str) -> None:
    weight = checkpoint.tensors[f"tables.{table}.weight"]
    rows, dim = weight.shape
    momentum = checkpoint.tensors[f"tables.{table}.momentum"]
    moments = pa.array(momentum.reshape(-1).numpy())
    if momentum.ndim == 2:  # a moment for each part of the columns
        moments = pa.FixedSizeListArray.from_arrays(moments, momentum.shape[1])
    columns = {
        "row": pa.array(np.arange(rows, dtype=np.int64)),
        **_ids_of_rows(checkpoint, table),
        "weight": pa.FixedSizeListArray.from_arrays(pa.array(weight.reshape(-1).numpy()), dim),
        "momentum": moments,
    }
    pq.write_table(pa.table(columns), path, row_group_size=ROWS_PER_GROUP, write_page_checksum=True)


def _ids_of_rows(checkpoint: Checkpoint, table: str) -> dict[str, pa.Array]:
    """The column `id` of a table whose ids earn their rows, else nothing."""
    if f"ids.{table}.ids" not in checkpoint.tensors:
        return {}
    ids, rows = (checkpoint.tensors[f"ids.{table}.{part}"] for part in ("ids", "rows"))
    id_of_row = torch.empty_like(ids).index_copy_(0, rows, ids)
    free = id_of_row == torch.iinfo(torch.int64).max
    return {"id": pa.array(id_of_row.numpy(), mask=free.numpy())}
