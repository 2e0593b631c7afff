"""GEM-like ads data with a planted truth: power-law users, items and lengths, several event streams, a delayed label.

The click probability of every row is a known function of the row's own columns (synthetic_world.py), so the best
possible NE on the evaluation rows is known and stands in the schema's facts beside the entropy floor; a model's NE can
be read against it. Same options, same bytes.

    logit(click) = intercept + affinity[type(profile), type(campaign)] + item bias + placement bias
                   + sum over streams of weight * interest + 0.4 price - 0.3 quality^2 + 0.4 bid
                   + 0.3 cos(2 pi (hour - 20) / 24)

`conversion` is a second, delayed label: it can only follow a click, its delay is exponential, and it counts when it
arrives within `window_hours`. Training data is frozen at the first evaluation second: rows whose window is still open
then have weight 0 for `conversion`, all of them, clicked or not, converted or not, since leaving out only the undecided
ones would bias the rate. Evaluation labels are collected until their windows have closed: weight 1.

Columns (all tables: id 0 = unknown, not drawn):

    label.click label.conversion weight.conversion
    id.user                  only with `user_ids`: a user's id says nothing that the profile does not say, so it can
                             only be overfitted; it is there for tables of any size
    id.profile id.item id.campaign id.topic id.placement id.hour
    ids.interests            the user's three most likely topics (table topic; no effect beyond the streams)
    dense.price quality bid  standard normal; dense.noise: no effect; dense.events: log count of kept events,
                             standardized, no effect
    stream.<s>.item topic    latest `max_length` events before the row; `ads` shares table item, the others have
                             tables <s>_item of their own

With `impressions` above 1 consecutive rows are shown together: one user, one second, one history, and items, placements
and dense features of their own. `requests` writes such rows as one, the lists of its impressions in IMPRESSION columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gem_datasets.history import Spans
from gem_datasets.prepared import (
    CREATED_BY,
    DatasetError,
    Floats,
    Ints,
    PreparedData,
    Ragged,
    build,
    feature,
    split_rows,
    standardize,
    stream,
)
from gem_datasets.scores import auc, binary_entropy, normalized_entropy
from gem_datasets.synthetic_world import (
    DAY_S,
    HISTORY_DAYS,
    PLACEMENTS,
    PROFILES,
    STREAMS,
    TOPICS,
    Events,
    World,
    draw_cdf,
    draw_preferred,
    interest,
    make_events,
    make_world,
)

IMPRESSION = (
    "id.item",
    "id.campaign",
    "id.topic",
    "id.placement",
    "dense.price",
    "dense.quality",
    "dense.bid",
    "dense.noise",
)
"""Features that differ between the impressions of a request."""
START_TIME = 1_767_225_600  # 2026-01-01 00:00 UTC


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions:
    """Options of `load("synthetic")`.

    rows             impressions, both splits together
    users, items     sizes of the id spaces
    user_ids         add the scalar id.user
    streams          event streams, 1 to 4: organic, ads, search, pages
    max_length       latest events kept per stream
    seed             everything is drawn from it
    train_fraction   share of rows, by time, that are training data
    days             time span of the impressions
    click_rate       mean planted click probability
    conversion_rate  mean planted probability that a click converts at all
    delay_hours      mean delay of a conversion
    window_hours     a conversion counts if it comes within this time
    impressions      mean impressions a request: requests have 1 to 2 * impressions - 1
    requests         write a request as one row, instead of a row for each impression
    """

    rows: int = 250_000
    users: int = 10_000
    items: int = 1_000
    user_ids: bool = False
    streams: int = 3
    max_length: int = 32
    seed: int = 0
    train_fraction: float = 0.8
    days: int = 14
    click_rate: float = 0.2
    conversion_rate: float = 0.25
    delay_hours: float = 8.0
    window_hours: float = 24.0
    impressions: int = 1
    requests: bool = False

    def __post_init__(self) -> None:
        least_of = {"rows": 100, "users": 1, "items": 1, "max_length": 1, "seed": 0, "days": 1, "impressions": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise DatasetError(f"synthetic: {name} must be at least {least}, got {getattr(self, name)}")
        if not 1 <= self.streams <= len(STREAMS):
            raise DatasetError(f"synthetic: streams must lie in 1..{len(STREAMS)}, got {self.streams}")
        for name in ("train_fraction", "click_rate", "conversion_rate"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise DatasetError(f"synthetic: {name} must lie in (0, 1), got {getattr(self, name)}")
        for name in ("delay_hours", "window_hours"):
            if getattr(self, name) <= 0.0:
                raise DatasetError(f"synthetic: {name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Impressions:
    """Rows in time order, 0-based indices; `interests` is (streams, rows); `first`: rows that begin a request."""

    first: Ints
    user: Ints
    item: Ints
    placement: Ints
    time: Ints
    dense: dict[str, Floats]
    spans: tuple[Spans, ...]
    interests: Floats


@dataclass(frozen=True, kw_only=True)
class Planted:
    """The truth per row: probabilities of a click, and of a click that converts within the window."""

    click: Floats
    conversion: Floats


def prepare(options: SyntheticOptions) -> PreparedData:
    """Generate the data set `options` describes."""
    world = make_world(options.users, options.items, _rng(options, 0))
    stop = START_TIME + options.days * DAY_S
    events = [
        make_events(world, spec, START_TIME - HISTORY_DAYS * DAY_S, stop, _rng(options, 10 + number))
        for number, spec in enumerate(STREAMS[: options.streams])
    ]
    rows = _impressions(world, events, options)
    planted = plant(world, rows, options)
    cut = split_rows(rows.time, options.train_fraction)
    labels = _labels(rows, planted, cut, options)
    columns = _columns(world, events, rows, cut, options) | labels
    facts = _facts(options, planted, labels, rows, cut)
    return build(_schema(options, world, events, facts), columns, cut, first=rows.first if options.requests else None)


def _rng(options: SyntheticOptions, purpose: int) -> np.random.Generator:
    """An independent generator per purpose: one more stream changes no impression."""
    return np.random.default_rng([options.seed, purpose])


def _impressions(world: World, events: list[Events], options: SyntheticOptions) -> Impressions:
    rng = _rng(options, 1)
    count = options.rows
    first = _first_rows(options)
    owner = np.repeat(first, np.diff(np.append(first, count)))
    user = draw_cdf(np.cumsum(world.user_activity), rng.random(count))[owner]
    # Half of the traffic is targeted at the user's topics, half follows global popularity.
    popular = draw_cdf(world.item_popularity_cdf, rng.random(count))
    item = np.where(rng.random(count) < 0.5, draw_preferred(world, user, rng)[0], popular)
    # Three quarters of the traffic spread evenly, one quarter around 20:00.
    peak = (rng.normal(20.0, 3.0, count) % 24.0) * 3600.0
    second = np.where(rng.random(count) < 0.25, peak, rng.random(count) * DAY_S).astype(np.int64)
    time = np.sort(START_TIME + rng.integers(0, options.days, count) * DAY_S + np.minimum(second, DAY_S - 1))[owner]
    dense = {name: rng.normal(size=count) for name in ("price", "quality", "bid", "noise")}
    spans = tuple(e.log.earlier(user, time, max_length=options.max_length) for e in events)
    topic = world.item_topic[item]
    interests = np.stack([interest(e, s, topic, time) for e, s in zip(events, spans, strict=True)])
    placement = rng.integers(0, PLACEMENTS, count)
    return Impressions(
        first=first, user=user, item=item, placement=placement, time=time, dense=dense, spans=spans, interests=interests
    )


def _first_rows(options: SyntheticOptions) -> Ints:
    """The rows that begin a request: all of them where requests have one impression."""
    if options.impressions == 1:
        return np.arange(options.rows)
    sizes = _rng(options, 3).integers(1, 2 * options.impressions, options.rows)
    starts = np.cumsum(sizes) - sizes
    return starts[starts < options.rows]


def plant(world: World, rows: Impressions, options: SyntheticOptions) -> Planted:
    """Planted probabilities of every row (formula in the module docstring)."""
    kind_u = world.profile_type[world.user_profile[rows.user]]
    kind_i = world.campaign_type[world.item_campaign[rows.item]]
    weights = np.array([spec.click_weight for spec in STREAMS[: options.streams]])
    hour = rows.time % DAY_S / 3600.0
    price, quality, bid = (rows.dense[name] for name in ("price", "quality", "bid"))
    click = (
        world.click_affinity[kind_u, kind_i]
        + world.item_bias[rows.item]
        + world.placement_bias[rows.placement]
        + weights @ rows.interests
        + 0.4 * price
        - 0.3 * quality**2
        + 0.4 * bid
        + 0.3 * np.cos(2.0 * np.pi * (hour - 20.0) / 24.0)
    )
    convert = world.conversion_affinity[kind_u, kind_i] - 0.4 * price + 0.5 * rows.interests[-1]
    in_window = -np.expm1(-options.window_hours / options.delay_hours)
    p_click = _sigmoid_with_mean(click, options.click_rate)
    return Planted(click=p_click, conversion=p_click * _sigmoid_with_mean(convert, options.conversion_rate) * in_window)


def _sigmoid_with_mean(logit: Floats, mean: float) -> Floats:
    """sigmoid(logit + c) with c such that the mean is `mean` (bisection: c is found to 1e-12)."""
    low, high = -40.0 - logit.max(), 40.0 - logit.min()
    while high - low > 1e-12 * max(1.0, abs(low)):
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        if (1.0 / (1.0 + np.exp(-(logit + middle)))).mean() < mean:
            low = middle
        else:
            high = middle
    return 1.0 / (1.0 + np.exp(-(logit + (low + high) / 2.0)))


def _labels(rows: Impressions, planted: Planted, cut: int, options: SyntheticOptions) -> dict[str, Any]:
    """Drawn labels. Conversion given a click has probability planted.conversion / planted.click."""
    rng = _rng(options, 2)
    click = rng.random(options.rows) < planted.click
    conversion = click & (rng.random(options.rows) < planted.conversion / planted.click)
    open_window = rows.time[:cut] + options.window_hours * 3600.0 > rows.time[cut]
    weight = np.ones(options.rows)
    weight[:cut][open_window] = 0.0
    conversion[:cut][open_window] = False  # not known yet
    return {"label.click": click, "label.conversion": conversion, "weight.conversion": weight}


def _columns(
    world: World, events: list[Events], rows: Impressions, cut: int, options: SyntheticOptions
) -> dict[str, Any]:
    kept = np.sum([spans.lengths() for spans in rows.spans], axis=0)
    dense = rows.dense | {"events": standardize(np.log1p(kept), cut)[0]}
    likely = np.argsort(-np.diff(world.user_topic_cdf, axis=1, prepend=0.0), axis=1, kind="stable")[:, :3]
    columns: dict[str, Any] = {
        "sample_id": np.arange(len(rows.time)),
        "user_id": rows.user + 1,
        "timestamp": rows.time,
        "id.profile": world.user_profile[rows.user] + 1,
        "id.item": rows.item + 1,
        "id.campaign": world.item_campaign[rows.item] + 1,
        "id.topic": world.item_topic[rows.item] + 1,
        "id.placement": rows.placement + 1,
        "id.hour": rows.time % DAY_S // 3600 + 1,
        "ids.interests": Ragged(
            values=(likely[rows.user] + 1).ravel(), offsets=np.arange(0, 3 * len(rows.time) + 1, 3)
        ),
    }
    if options.user_ids:
        columns["id.user"] = rows.user + 1
    columns |= {f"dense.{name}": values for name, values in dense.items()}
    for stream_events, spans in zip(events, rows.spans, strict=True):
        index = spans.index()
        fields = {"item": stream_events.item + 1, "topic": stream_events.topic + 1}
        fields |= {"action": stream_events.action, "time": stream_events.time}
        for name, values in fields.items():
            packed = Ragged(values=values[index.values], offsets=index.offsets)
            columns[f"stream.{stream_events.spec.name}.{name}"] = packed
    return columns


def _schema(options: SyntheticOptions, world: World, events: list[Events], facts: dict[str, Any]) -> dict[str, Any]:
    rows = {"user": options.users + 1} if options.user_ids else {}
    rows |= {
        "profile": PROFILES + 1,
        "item": options.items + 1,
        "campaign": len(world.campaign_type) + 1,
        "topic": TOPICS + 1,
        "placement": PLACEMENTS + 1,
        "hour": 25,
    }
    tables = {e.spec.name: "item" if e.spec.name == "ads" else f"{e.spec.name}_item" for e in events}
    scalars = [feature(name) for name in rows]
    rows |= dict.fromkeys(tables.values(), options.items + 1)
    return {
        "name": "synthetic",
        "created_by": CREATED_BY,
        "tables": [{"name": name, "rows": count} for name, count in rows.items()],
        "labels": [{"name": "click", "weighted": False}, {"name": "conversion", "weighted": True}],
        "scalars": scalars,
        "lists": [feature("interests", "topic")],
        "dense": ["price", "quality", "bid", "noise", "events"],
        "streams": [
            stream(
                e.spec.name,
                [feature("item", tables[e.spec.name]), feature("topic")],
                action_bits=len(e.spec.actions),
                max_length=options.max_length,
            )
            for e in events
        ],
        "facts": facts,
    } | ({"impression": list(IMPRESSION)} if options.requests else {})


def _facts(
    options: SyntheticOptions, planted: Planted, labels: dict[str, Any], rows: Impressions, cut: int
) -> dict[str, Any]:
    """What is known about the evaluation rows: the planted probabilities' own scores, per label.

    best_ne            NE of the planted probabilities on the drawn labels: what a model is compared with
    expected_best_ne   mean entropy of the planted probabilities / entropy of their mean: best_ne without the luck
    entropy_floor      mean entropy of the planted probabilities, nats
    """
    facts: dict[str, Any] = {name: {} for name in ("best_ne", "best_auc", "expected_best_ne", "entropy_floor_nats")}
    for name, truth in (("click", planted.click), ("conversion", planted.conversion)):
        p, label = truth[cut:], labels[f"label.{name}"][cut:].astype(np.float64)
        floor = float(binary_entropy(p).mean())
        facts["best_ne"][name] = normalized_entropy(label, p)
        facts["best_auc"][name] = auc(label, p)
        facts["expected_best_ne"][name] = floor / float(binary_entropy(np.array([p.mean()]))[0])
        facts["entropy_floor_nats"][name] = floor
    return facts | {
        "source": "generated",
        "options": {
            name: getattr(options, name)
            for name, field in options.__dataclass_fields__.items()
            # what concerns requests is named where it says something: other data sets are the bytes they were before
            if name not in ("impressions", "requests") or getattr(options, name) != field.default
        },
        "split": {"train_rows": cut, "eval_rows": options.rows - cut, "first_eval_time": int(rows.time[cut])},
        "conversion_rows_open_at_freeze": int((labels["weight.conversion"][:cut] == 0).sum()),
        "actions": {spec.name: list(spec.actions) for spec in STREAMS[: options.streams]},
    }
