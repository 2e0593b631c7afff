"""Open Bandit: impressions with position, true propensity and hashed user features; label `click` (about 0.5 %).

Source: six CSV files of 10,000 impressions (campaigns all, men, women; policies random, bts) inside the sdist
obp==0.5.7, fetched through pip at run time (Apache-2.0). About 290 clicks in 60,000 rows: good for calibration,
imbalance and off-policy checks, too few to rank models.

Files of both policies cover the same week; rows are merged by time and the last 20 % of them are evaluation data. The
data names no users: `user_id` and the stream are those of a profile, the tuple of the four hashed user features.
Times are cut to seconds, and what a row sees is from strictly earlier seconds.

Columns (all tables: id 0 = unknown):

    label.click
    id.item (campaigns have item spaces of their own, laid end to end) id.campaign id.policy id.position id.hour
    id.user_feature_0 .. 3, id.item_feature_1 .. 3
    ids.affinity             items that the user has an affinity count for
    dense.*                  standardized with the training rows' mean and deviation, see `_dense`
    stream.profile           latest impressions shown to the same profile: item, position; bit 0 click
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gem_datasets.fetch import Member, Source, fetch
from gem_datasets.history import EventLog, smoothed_rate
from gem_datasets.openbandit_files import CAMPAIGNS, POLICIES, Impressions, read_impressions
from gem_datasets.prepared import (
    CREATED_BY,
    DatasetError,
    PreparedData,
    Ragged,
    build,
    feature,
    split_rows,
    standardize,
    stream,
)

_FILES = (
    ("random/all/all.csv", 5039451, "7168295b6e0a9eabcf3392320a5dd434e542b68e705d5cd9491499af589812f1"),
    ("random/all/item_context.csv", 10041, "eba04cc23d5f130a93ff174c5392986882b94c3839433cb8143870eaa6221358"),
    ("random/men/men.csv", 3336811, "ede6d08c6877f99cd3770f7d09e26c738e6aa6de4445ccccfb1356ba5d06b1eb"),
    ("random/men/item_context.csv", 4287, "6d855c2b7e917d0448d71bbe62c023147495882c0fdc8c41e86fef86abf9fe09"),
    ("random/women/women.csv", 3817771, "e65f3bd3beb17664fa69cc129bf7bf852a775f8ffa630506e505fc905315bb34"),
    ("random/women/item_context.csv", 5792, "b1ca4905f97703d196004f2ad4552c1e90c2afad8b50688d333b0d2dc0b33147"),
    ("bts/all/all.csv", 5084456, "0ad874e4dbf6902f0845dd478ad8dde5ef6903583d3ffaace78411bdad064106"),
    ("bts/all/item_context.csv", 10041, "5d4359ba1cfa3ae88f0f1bae66bd633859fe6323817183632ee57b83539d9153"),
    ("bts/men/men.csv", 3240432, "db6d1f7ed2d591ba521533e45286d4c1fba7fe57a8ad2e80342210335f43c527"),
    ("bts/men/item_context.csv", 4287, "3b411ed6b0471316321a6b93f4f756bb25888eac6218cd71d0b603d41d85732d"),
    ("bts/women/women.csv", 3722697, "e5d1b49a39b608585a2f3014a3f54970430cd37a495c1b73fceb85cdf428a5b8"),
    ("bts/women/item_context.csv", 5792, "a56295bad066a558eb783055afd9279f5f4e209a4776eafc22151c53f0ac89d4"),
)
SOURCE = Source(
    requirement="obp==0.5.7",
    folder="open-bandit-obp-0.5.7",
    # The package states an upper Python version and has no wheel; only its files are wanted, nothing is built.
    pip_flags=("--no-binary", ":all:", "--ignore-requires-python"),
    members=tuple(
        Member(archive_name=f"obp-0.5.7/obp/dataset/obd/{name}", name=name, size_bytes=size, sha256=digest)
        for name, size, digest in _FILES
    ),
)


@dataclass(frozen=True, kw_only=True)
class OpenBanditOptions:
    """Options of `load("openbandit")`.

    cache_dir       where fetched files are kept; None = the user's cache folder
    source_dir      read <policy>/<campaign>/{<campaign>,item_context}.csv from here instead (nothing is fetched, no
                    SHA-256 is checked)
    campaign        all, men, women, or every
    policy          random, bts, or every
    train_fraction  share of impressions, by time, that are training data
    max_length      latest impressions kept in stream `profile`
    """

    cache_dir: str | Path | None = None
    source_dir: str | Path | None = None
    campaign: str = "every"
    policy: str = "every"
    train_fraction: float = 0.8
    max_length: int = 20

    def __post_init__(self) -> None:
        for name, known in (("campaign", CAMPAIGNS), ("policy", POLICIES)):
            if getattr(self, name) not in (*known, "every"):
                raise DatasetError(
                    f"openbandit: {name} must be one of {', '.join(known)} or every, got {getattr(self, name)!r}"
                )
        if not 0.0 < self.train_fraction < 1.0:
            raise DatasetError(f"openbandit: train_fraction must lie in (0, 1), got {self.train_fraction}")
        if self.max_length < 1:
            raise DatasetError(f"openbandit: max_length must be at least 1, got {self.max_length}")


def prepare(options: OpenBanditOptions) -> PreparedData:
    """Fetch (or read), parse and convert."""
    if options.source_dir is None:
        folder = fetch(SOURCE, None if options.cache_dir is None else Path(options.cache_dir))
    else:
        folder = Path(options.source_dir)
    campaigns = CAMPAIGNS if options.campaign == "every" else (options.campaign,)
    policies = POLICIES if options.policy == "every" else (options.policy,)
    rows = read_impressions(folder, campaigns, policies)
    cut = split_rows(rows.time, options.train_fraction)
    dense, scaling = _dense(rows, cut)
    index = EventLog.of(rows.profile, rows.time).earlier(rows.profile, rows.time, max_length=options.max_length).index()
    events = {"item": rows.item, "position": rows.side["position"], "action": rows.click, "time": rows.time}
    columns: dict[str, Any] = {
        "sample_id": rows.sample,
        "user_id": rows.profile,
        "timestamp": rows.time,
        "label.click": rows.click,
        "id.item": rows.item,
        **{f"id.{name}": values for name, values in rows.side.items()},
        "ids.affinity": rows.affinity_items,
        **dense,
    }
    columns |= {
        f"stream.profile.{name}": Ragged(values=values[index.values], offsets=index.offsets)
        for name, values in events.items()
    }
    facts = {
        "source": "Open Bandit, files inside the sdist obp==0.5.7",
        "licence": "Apache-2.0",
        "campaigns": list(campaigns),
        "policies": list(policies),
        "split": {"train_rows": cut, "eval_rows": len(rows.time) - cut, "first_eval_time": int(rows.time[cut])},
        "dense_mean_std": scaling,
        "action_bits": ["click"],
    }
    return build(_schema(rows, list(dense), options.max_length, facts), columns, cut)


def _schema(rows: Impressions, dense: list[str], max_length: int, facts: dict[str, Any]) -> dict[str, Any]:
    fields = [feature("item"), feature("position")]
    return {
        "name": "openbandit",
        "created_by": CREATED_BY,
        "tables": [{"name": name, "rows": count} for name, count in rows.rows.items()],
        "labels": [{"name": "click", "weighted": False}],
        "scalars": [feature(name) for name in ("item", *rows.side)],
        "lists": [feature("affinity", "item")],
        "dense": [name.removeprefix("dense.") for name in dense],
        "streams": [stream("profile", fields, action_bits=1, max_length=max_length)],
        "facts": facts,
    }


def _dense(rows: Impressions, cut: int) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Dense columns (float32, standardized) and their [mean, std].

    log_propensity   log of the logging policy's probability of this item at this position
    affinity_shown   log(1 + affinity count of the shown item); affinity_total: of all items of the campaign
    item_value       item_feature_0 as it is
    item_rate        the item's click rate over strictly earlier rows, smoothed towards the rate of all of them with
                     strength 200; item_log_count: log(1 + earlier rows)
    """
    everyone = EventLog.of(np.zeros_like(rows.time), rows.time).earlier(np.zeros_like(rows.time), rows.time)
    items = EventLog.of(rows.item, rows.time).earlier(rows.item, rows.time)
    base = (everyone.sum(rows.click) + 1.0) / (everyone.lengths() + 200.0)
    values = {
        "log_propensity": np.log(rows.propensity),
        "affinity_shown": np.log1p(rows.affinity_shown),
        "affinity_total": np.log1p(rows.affinity_total),
        "item_value": rows.item_value,
        "item_rate": smoothed_rate(items, rows.click, prior=base, strength=200.0),
        "item_log_count": np.log1p(items.lengths()),
    }
    # Nearly all affinities are 0: their own deviation would turn a count of 15 into a hundred deviations.
    least = {"affinity_shown": 0.25, "affinity_total": 0.25}
    scaled = {name: standardize(column, cut, least_std=least.get(name, 0.0)) for name, column in values.items()}
    return {f"dense.{name}": pair[0] for name, pair in scaled.items()}, {name: pair[1] for name, pair in scaled.items()}
