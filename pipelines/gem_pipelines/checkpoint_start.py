"""Starting a new run from the weights of another one's checkpoint (`train.init_from`), whole or, on request, in part.

Taken are dense parameters and buffers, and tables with their momenta. Not taken: step, loader position, moments of the
dense optimizer, metrics: it is a new run. Whole (the default): every difference in names, shapes and dtypes is listed
and nothing is applied. Partial (`train.init_partial`): what fits is taken, and every tensor that keeps its start value
and every stored one that is not used is named. A table is taken with its momentum, and with the map of its ids where
they earn their rows, or not at all.

Cost: the checkpoint is read and hashed whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from gem_pipelines.checkpoint import by_table, expected_tensors, interface_differences, is_as_expected
from gem_pipelines.checkpoint_format import Checkpoint
from gem_pipelines.checkpoint_incremental import read_whole
from gem_pipelines.errors import CheckpointError
from gem_pipelines.trainer import Trainer

_TAKEN = ("dense.", "tables.", "ids.")


def start_from(directory: Path, trainer: Trainer, *, partial: bool, say: Callable[[str], None]) -> None:
    """Put the weights of the checkpoint `directory` into a fresh trainer. A collective.

    Raises CheckpointError listing every difference, with nothing applied, unless partial; then only where nothing fits.
    Interface versions that differ are said.
    """
    checkpoint = read_whole(directory)
    forbidding, others = interface_differences(checkpoint)
    for line in (*forbidding, *others):
        say(f"start from {directory}: {line}")
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
    maps = trainer.parallel.tables.id_state()
    maps |= by_table({key.removeprefix("ids."): checkpoint.tensors[key] for key in fits if key.startswith("ids.")})
    for key in fits:
        group, name = key.split(".", 1)
        if group == "dense":
            dense[name] = checkpoint.tensors[key]
        elif group == "tables":
            table, part = name.rsplit(".", 1)
            tables[table][part] = checkpoint.tensors[key]
    trainer.parallel.tables.load_table_state(tables)
    trainer.parallel.tables.load_id_state(maps)
    trainer.parallel.load_dense_state({name: value.clone() for name, value in dense.items()})
    say(f"start from {directory}: {len(fits)} tensors taken, {len(differences)} differences")


def compare(checkpoint: Checkpoint, trainer: Trainer) -> tuple[list[str], list[str]]:
    """(keys that can be taken, one line for each difference)."""
    expected = {k: v for k, v in expected_tensors(trainer).items() if k.startswith(_TAKEN)}
    stored = {k: v for k, v in checkpoint.tensors.items() if k.startswith(_TAKEN)}
    same = {key for key in expected.keys() & stored.keys() if is_as_expected(stored[key], expected[key])}
    apart = {_table_of(key) for key in (expected.keys() | stored.keys()) - same} - {None}
    same -= {key for key in same if _table_of(key) in apart}
    lines = []
    for key in sorted(expected.keys() - same):
        if key not in stored:
            lines.append(f"tensor {key}: keeps its start value, it is not stored")
        elif not is_as_expected(stored[key], expected[key]):
            (shape, dtype), (now, kind) = _described(stored[key]), expected[key]
            lines.append(f"tensor {key}: keeps its start value, stored {shape} {dtype}, expected {now} {kind}")
        else:
            lines.append(f"tensor {key}: keeps its start value, as others of its table do")
    lines += [f"tensor {key}: stored, but not used" for key in sorted(stored.keys() - expected.keys())]
    return sorted(same), lines


def _described(tensor: Tensor) -> tuple[tuple[int, ...], object]:
    return tuple(tensor.shape), tensor.dtype


def _table_of(key: str) -> str | None:
    """The table that a tensor belongs to, weights and ids alike."""
    group, name = key.split(".", 1)
    return name.rsplit(".", 1)[0] if group in ("tables", "ids") else None
