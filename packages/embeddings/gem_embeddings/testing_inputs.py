"""What the conformance suite feeds to tables: specs, batches, and a step of training (public through testing.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from gem_embeddings.interface import Prepared, RowWiseAdagrad, Tables, TableSpec

# Shared tables, two dims without pooling, both poolings; few rows, so that ids repeat within a batch.
SPECS = (
    TableSpec(name="item", rows=23, dim=8, features=("item", "s.item")),
    TableSpec(name="shop", rows=7, dim=4, features=("shop",), init_std=0.5),
    TableSpec(name="tag", rows=11, dim=8, features=("tags", "more_tags"), pooling="sum"),
    TableSpec(name="word", rows=13, dim=4, features=("words",), pooling="mean", init_std=1.0),
)
KEYS = ("item", "shop", "tags", "more_tags", "words", "s.item")
# The same tables with bags that are weighted, and features that look up two of them: "tags" and "more_tags".
_CHANGES: dict[str, dict[str, object]] = {
    "item": {"features": ("item", "s.item", "more_tags")},
    "tag": {"weighted": True},
    "word": {"features": ("words", "tags")},
}
SHARED_SPECS = tuple(dataclasses.replace(spec, **_CHANGES.get(spec.name, {})) for spec in SPECS)  # type: ignore[arg-type]
OPTIMIZER = RowWiseAdagrad(lr=0.1, eps=1e-6)
SEED = 3


def outputs_of(specs: Sequence[TableSpec]) -> dict[str, tuple[TableSpec, str]]:
    """Name of an output -> (its table, the feature that is looked up). Example: "tags@word" is "tags" in "word"."""
    features = [feature for spec in specs for feature in spec.features]
    return {
        f"{feature}@{spec.name}" if features.count(feature) > 1 else feature: (spec, feature)
        for spec in specs
        for feature in spec.features
    }


def make_ids(
    rows: int, *, seed: int, keys: Sequence[str] = KEYS, empty: bool = False, weighted: bool = False
) -> KeyedJaggedTensor:
    """A batch for SPECS: scalars of length 1, bags and sequences of 0 to 5 ids (all empty when `empty`).

    weighted: for SHARED_SPECS, with weights of either sign.
    """
    generator = torch.Generator().manual_seed(seed)
    rows_of = {feature: spec.rows for spec in SPECS for feature in spec.features}
    values, lengths = {}, {}
    for key in KEYS:
        scalar = key in ("item", "shop")
        lengths[key] = torch.randint(0, 6, (rows,), generator=generator)
        if scalar or empty:
            lengths[key] = torch.full_like(lengths[key], int(scalar))
        values[key] = torch.randint(0, rows_of[key], (int(lengths[key].sum()),), generator=generator)
    joined = torch.cat([values[key] for key in keys])
    return KeyedJaggedTensor(
        keys=list(keys),
        values=joined,
        lengths=torch.cat([lengths[key] for key in keys]),
        weights=torch.rand(joined.numel(), generator=generator) * 2 - 0.5 if weighted else None,
    )


def part_of(ids: KeyedJaggedTensor, start: int, stop: int) -> KeyedJaggedTensor:
    """Rows start:stop of a batch. (KeyedJaggedTensor.to_dict does not work for zero rows.)"""
    keys, rows = ids.keys(), ids.stride()
    lengths_KB = ids.lengths().view(len(keys), rows)
    ends_KB = lengths_KB.cumsum(1)
    first = ids.offset_per_key()
    spans = []
    for key in range(len(keys)):
        inside = [int(ends_KB[key, row - 1]) if row else 0 for row in (start, stop)]
        spans.append(slice(first[key] + inside[0], first[key] + inside[1]))
    weights = ids.weights_or_none()
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([ids.values()[span] for span in spans]),
        lengths=lengths_KB[:, start:stop].flatten(),
        weights=None if weights is None else torch.cat([weights[span] for span in spans]),
    )


def train_step(
    tables: Tables,
    ids: KeyedJaggedTensor,
    *,
    first_row: int = 0,
    scale: float = 1.0,
    prepared: Prepared | None = None,
    ahead: KeyedJaggedTensor | None = None,
) -> Prepared | None:
    """One backward of a loss whose gradients depend on the vectors and on the row's number in the global batch.

    prepared: what `tables.prepare(ids)` gave; ahead: ids to prepare between forward and backward, returned.
    """
    out = tables(ids) if prepared is None else tables.look_up(prepared)
    coming = None if ahead is None else tables.prepare(ahead)
    keys, outputs = ids.keys(), outputs_of(SPECS) | outputs_of(SHARED_SPECS)
    loss = torch.zeros((), dtype=next(iter(out.values())).dtype)
    for name, vectors in out.items():
        spec, feature = outputs[name]
        lengths = ids.lengths().view(len(keys), -1)[keys.index(feature)] if ids.stride() else ids.lengths()
        # made on the CPU, so that an oracle there sees the same numbers
        weight_B = torch.cos(torch.arange(first_row, first_row + lengths.numel(), dtype=vectors.dtype))
        weight_B = weight_B.to(lengths.device)
        weights = weight_B.repeat_interleave(lengths) if spec.pooling == "none" else weight_B
        loss = loss + (weights.to(vectors.device)[:, None] * (vectors - 0.3).square()).sum().to(loss.device)
    (loss * scale).backward()
    return coming
