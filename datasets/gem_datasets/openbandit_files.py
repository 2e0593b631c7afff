"""Read Open Bandit CSV files into arrays: rows of all campaigns and policies in time order.

Every campaign numbers its items from 0; here they get one id space, laid end to end from id 1. Hashes become ranks in
the sorted vocabulary, from 1; 0 is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv

from gem_datasets.prepared import DatasetError, Floats, Ints, Ragged

CAMPAIGNS = ("all", "men", "women")
POLICIES = ("random", "bts")
USER_FEATURES = tuple(f"user_feature_{i}" for i in range(4))
ITEM_FEATURES = tuple(f"item_feature_{i}" for i in range(1, 4))


@dataclass(frozen=True, kw_only=True)
class Impressions:
    """All rows in time order. `side` are id columns by name, `rows` the tables, `affinity` (item ids, counts)."""

    sample: Ints
    time: Ints
    click: Ints
    item: Ints
    profile: Ints
    propensity: Floats
    item_value: Floats
    affinity_items: Ragged
    affinity_total: Floats
    affinity_shown: Floats
    side: dict[str, Ints]
    rows: dict[str, int]


def read_impressions(folder: Path, campaigns: tuple[str, ...], policies: tuple[str, ...]) -> Impressions:
    """All rows of <policy>/<campaign>/ in time order; DatasetError names the file and what is wrong with it."""
    parts: list[dict[str, npt.NDArray[Any]]] = []
    first_item, values, hashes = {}, [np.zeros(1)], {name: [""] for name in ITEM_FEATURES}
    for campaign in campaigns:
        # Policies hash item features differently but group the items alike: the first policy's hashes serve both.
        context = _read_csv(folder / policies[0] / campaign / "item_context.csv", ("item_feature_0", *ITEM_FEATURES))
        first_item[campaign] = sum(map(len, values))
        values.append(context["item_feature_0"].cast(pa.float64()).to_numpy())
        for name in ITEM_FEATURES:
            hashes[name] += [f"{campaign} {value}" for value in context[name].to_pylist()]
    item_count = sum(map(len, values))
    for policy in policies:
        for campaign in campaigns:
            parts.append(_read_part(folder, campaign, policy, first_item[campaign], item_count))
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns["time"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    item = columns["item"]
    side = {name: columns[name].astype(np.int64) for name in ("campaign", "policy", "position", "hour")}
    rows = {"item": item_count, "campaign": len(CAMPAIGNS) + 1, "policy": len(POLICIES) + 1, "position": 4, "hour": 25}
    for name in USER_FEATURES:
        known, ids = np.unique(columns[name].astype(str), return_inverse=True)
        side[name], rows[name] = ids.astype(np.int64) + 1, len(known) + 1
    for name in ITEM_FEATURES:
        known, ids = np.unique(np.array(hashes[name]), return_inverse=True)  # "" of item 0 sorts first: id 0
        side[name], rows[name] = ids.astype(np.int64)[item], len(known)
    profile = np.unique(np.stack([side[name] for name in USER_FEATURES], axis=1), axis=0, return_inverse=True)[1]
    affinity = columns["affinity"]
    return Impressions(
        sample=columns["sample"],
        time=columns["time"],
        click=columns["click"],
        item=item,
        profile=profile.ravel().astype(np.int64) + 1,
        propensity=columns["propensity"],
        item_value=np.concatenate(values)[item],
        affinity_items=_nonzero(affinity),
        affinity_total=affinity.sum(axis=1),
        affinity_shown=affinity[np.arange(len(item)), item],
        side=side,
        rows=rows,
    )


def _nonzero(counts: Floats) -> Ragged:
    """Column indices of the non-zero cells of each row: the ids, since column i is item i."""
    row, item = np.nonzero(counts)
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(np.bincount(row, minlength=len(counts)), out=offsets[1:])
    return Ragged(values=item.astype(np.int64), offsets=offsets)


def _read_part(
    folder: Path, campaign: str, policy: str, first_item: int, item_count: int
) -> dict[str, npt.NDArray[Any]]:
    """One CSV file as arrays; affinities are spread over the item space of all campaigns."""
    path = folder / policy / campaign / f"{campaign}.csv"
    plain = ("timestamp", "item_id", "position", "click", "propensity_score", *USER_FEATURES)
    table = _read_csv(path, plain)
    names = sorted(
        (name for name in table.column_names if name.startswith("user-item_affinity_")),
        key=lambda name: int(name.rpartition("_")[2]),
    )
    count = table.num_rows
    try:
        seconds = pa.compute.floor_temporal(table["timestamp"].cast(pa.timestamp("us", "UTC")), unit="second")
        time = seconds.cast(pa.timestamp("s", "UTC")).cast(pa.int64()).to_numpy()
        numbers = {name: table[name].cast(pa.int64()).to_numpy() for name in ("item_id", "position", "click")}
        propensity = table["propensity_score"].cast(pa.float64()).to_numpy()
        affinity = np.zeros((count, item_count))
        for offset, name in enumerate(names):
            affinity[:, first_item + offset] = table[name].cast(pa.float64()).to_numpy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DatasetError(f"{path}: a column has the wrong type: {error}") from None
    for name, low, high in (("item_id", 0, len(names) - 1), ("position", 1, 3), ("click", 0, 1)):
        if numbers[name].min() < low or numbers[name].max() > high:
            raise DatasetError(f"{path}: {name} {numbers[name].min()}..{numbers[name].max()}, expected {low}..{high}")
    if not (propensity > 0).all():
        raise DatasetError(f"{path}: propensity_score must be positive, got {propensity.min()}")
    number = POLICIES.index(policy) * len(CAMPAIGNS) + CAMPAIGNS.index(campaign)
    return {
        "sample": number * 1_000_000 + np.arange(count),
        "time": time,
        "item": numbers["item_id"] + first_item,
        "position": numbers["position"],
        "click": numbers["click"],
        "propensity": propensity,
        "campaign": np.full(count, CAMPAIGNS.index(campaign) + 1),
        "policy": np.full(count, POLICIES.index(policy) + 1),
        "hour": time % 86400 // 3600 + 1,
        "affinity": affinity,
        **{name: np.array(table[name].to_pylist(), dtype=object) for name in USER_FEATURES},
    }


def _read_csv(path: Path, columns: tuple[str, ...]) -> pa.Table:
    if not path.exists():
        raise DatasetError(f"{path} does not exist; expected a CSV file with columns {', '.join(columns)}")
    try:
        table = pa.csv.read_csv(path)
    except pa.ArrowInvalid as error:
        raise DatasetError(f"{path}: not a CSV table: {error}") from None
    missing = [column for column in columns if column not in table.column_names]
    if missing or table.num_rows == 0:
        raise DatasetError(f"{path}: {table.num_rows} rows, missing columns: {', '.join(missing) or 'none'}")
    return table
