"""The planted-signal test: label = parity of the id of the last event's item.

Nothing else in a row says anything about the label, so a model reaches AUC > 0.95 only if the latest event of a stream
arrives at the head unharmed; a mean over the history, an order lost or a length cut at the wrong end stays near 0.5
(the last of many events is one vote among many). The best NE is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gem_datasets.prepared import CREATED_BY, DatasetError, PreparedData, Ragged, build, feature, split_rows, stream

START_TIME = 1_767_225_600


@dataclass(frozen=True, kw_only=True)
class ParityOptions:
    """Options of `load("parity")`: rows of both splits, ids of the item table, longest history, seed."""

    rows: int = 20_000
    items: int = 50
    max_length: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rows", 100), ("items", 2), ("max_length", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise DatasetError(f"parity: {name} must be at least {least}, got {getattr(self, name)}")


def prepare(options: ParityOptions) -> PreparedData:
    """Generate the data set: one impression every 60 s, histories of 1..max_length events (power law)."""
    rng = np.random.default_rng([options.seed, 0])
    rows = options.rows
    lengths = np.minimum(rng.zipf(1.3, rows), options.max_length)
    offsets = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    item = rng.integers(1, options.items + 1, offsets[-1])
    time = START_TIME + 60 * np.arange(rows)
    # The event k places before the end lies between k + 1 and k + 2 minutes before the impression.
    back = np.repeat(offsets[1:], lengths) - np.arange(offsets[-1])
    event_time = np.repeat(time, lengths) - 60 * back - rng.integers(0, 60, len(back))
    columns: dict[str, Any] = {
        "sample_id": np.arange(rows),
        "user_id": rng.integers(1, 501, rows),
        "timestamp": time,
        "label.parity": item[offsets[1:] - 1] % 2,
        "id.item": rng.integers(1, options.items + 1, rows),
        "dense.noise": rng.normal(size=rows),
        "stream.history.item": Ragged(values=item, offsets=offsets),
        "stream.history.action": Ragged(values=np.ones_like(item), offsets=offsets),
        "stream.history.time": Ragged(values=event_time, offsets=offsets),
    }
    cut = split_rows(time, 0.8)
    schema = {
        "name": "parity",
        "created_by": CREATED_BY,
        "tables": [{"name": "item", "rows": options.items + 1}],
        "labels": [{"name": "parity", "weighted": False}],
        "scalars": [feature("item")],
        "lists": [],
        "dense": ["noise"],
        "streams": [stream("history", [feature("item")], action_bits=1, max_length=options.max_length)],
        "facts": {
            "source": "generated",
            "best_ne": {"parity": 0.0},
            "best_auc": {"parity": 1.0},
            "options": {name: getattr(options, name) for name in options.__dataclass_fields__},
        },
    }
    return build(schema, columns, cut)
