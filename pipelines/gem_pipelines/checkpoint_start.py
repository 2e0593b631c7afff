"""Starting a new run from the weights of another one's checkpoint (`train.init_from`), whole or, on request, in part.

Taken are dense parameters and buffers, and tables with their momenta. Not taken: step, loader position, moments of the
dense optimizer, metrics: it is a new run. Whole (the default): every difference in names, shapes and dtypes is listed
and nothing is applied. Partial (`train.init_partial`): what fits is taken, and every tensor that keeps its start value
and every stored one that is not used is named. A table is taken with its momentum or not at all.

Cost: the checkpoint is read and hashed whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from gem_pipelines.checkpoint import expected_tensors
from gem_pipelines.checkpoint_format import Checkpoint
from gem_pipelines.checkpoint_incremental import read_whole
from gem_pipelines.errors import CheckpointError
from gem_pipelines.trainer import Trainer

_TAKEN = ("dense.", "tables.")


def start_from(directory: Path, trainer: Trainer, *, partial: bool, say: Callable[[str], None]) -> None:
    """Put the weights of the checkpoint `directory` into a fresh trainer. A collective.

    Raises CheckpointError listing every difference, with nothing applied, unless partial; then only where nothing fits.
    """
    checkpoint = read_whole(directory)
    fits, differences = compare(checkpoint, trainer)
    if differences and not partial:
        raise CheckpointError(
            f"{directory} does not fit this model; nothing was loaded (train.init_partial takes what fits):\n  "
            + "\n  ".join(differences)
        )
    if not fits:
        raise CheckpointError(f"{directory} and this model have no tensor in common; nothing was loaded")
    for difference in differences:
        say(f"start from {directory}: {difference}")
    dense = trainer.parallel.dense_state()
    tables = trainer.parallel.tables.table_state()
    for key in fits:
        group, name = key.split(".", 1)
        if group == "dense":
            dense[name] = checkpoint.tensors[key]
        else:
            table, part = name.rsplit(".", 1)
            tables[table][part] = checkpoint.tensors[key]
    trainer.parallel.tables.load_table_state(tables)
    trainer.parallel.load_dense_state({name: value.clone() for name, value in dense.items()})
    say(f"start from {directory}: {len(fits)} tensors taken, {len(differences)} differences")


def compare(checkpoint: Checkpoint, trainer: Trainer) -> tuple[list[str], list[str]]:
    """(keys that can be taken, one line for each difference)."""
    expected = {k: v for k, v in expected_tensors(trainer).items() if k.startswith(_TAKEN)}
    stored = {k: v for k, v in checkpoint.tensors.items() if k.startswith(_TAKEN)}
    same = {key for key in expected.keys() & stored.keys() if _described(stored[key]) == expected[key]}
    same -= {key for key in same if key.startswith("tables.") and _partner(key) not in same}
    lines = []
    for key in sorted(expected.keys() - same):
        if key not in stored:
            lines.append(f"tensor {key}: keeps its start value, it is not stored")
        elif _described(stored[key]) != expected[key]:
            (shape, dtype), (now, kind) = _described(stored[key]), expected[key]
            lines.append(f"tensor {key}: keeps its start value, stored {shape} {dtype}, expected {now} {kind}")
        else:
            lines.append(f"tensor {key}: keeps its start value, as {_partner(key)} does")
    lines += [f"tensor {key}: stored, but not used" for key in sorted(stored.keys() - expected.keys())]
    return sorted(same), lines


def _described(tensor: Tensor) -> tuple[tuple[int, ...], object]:
    return tuple(tensor.shape), tensor.dtype


def _partner(key: str) -> str:
    table, part = key.rsplit(".", 1)
    return f"{table}.{'momentum' if part == 'weight' else 'weight'}"
