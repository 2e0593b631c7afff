"""The hidden truth behind `synthetic`: who likes what, and the events that show it.

Every effect on the click probability is a function of columns that the data set contains, so the planted probability
is the best that any model can reach and no hidden noise blurs the bound. The effects are few and low-dimensional on
purpose: the number of samples a model needs grows with the number of free parameters behind the truth.

    hidden type of a user     one of 4, given by the user's profile (16 visible profiles)
    hidden type of an item    one of 4, given by the item's campaign (visible, items / 40 campaigns)
    affinity                  4 x 4 matrix of rank 2 between the two
    item bias                 normal, deviation 0.15, visible only through the id (power law: heads can be learned)
    interest                  per stream: tanh(sum over kept events of [event topic = item topic]
                              * sum of the weights of its action bits / (1 + age / half-life))
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gem_datasets.history import EventLog, Spans
from gem_datasets.prepared import Floats, Ints

TYPES, PROFILES, TOPICS, PLACEMENTS = 4, 16, 8, 4
DAY_S = 86400
HISTORY_DAYS = 14


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """One kind of user events: the action bits and their planted weights, how many events, how fast they fade."""

    name: str
    actions: tuple[str, ...]
    action_rates: tuple[float, ...]
    action_weights: tuple[float, ...]
    mean_events: float
    half_life_days: float
    click_weight: float


# Bit 0 is always set (the event happened). An ad that was only seen says nothing: the mask must be read.
STREAMS = (
    StreamSpec(
        name="organic",
        actions=("view", "like", "comment", "share"),
        action_rates=(1.0, 0.25, 0.08, 0.05),
        action_weights=(0.15, 0.5, 0.5, 0.8),
        mean_events=24.0,
        half_life_days=3.0,
        click_weight=0.8,
    ),
    StreamSpec(
        name="ads",
        actions=("impression", "click", "conversion"),
        action_rates=(1.0, 0.2, 0.04),
        action_weights=(0.0, 1.2, 0.5),
        mean_events=16.0,
        half_life_days=5.0,
        click_weight=0.6,
    ),
    StreamSpec(
        name="search",
        actions=("query", "result_click"),
        action_rates=(1.0, 0.5),
        action_weights=(0.4, 0.4),
        mean_events=10.0,
        half_life_days=1.0,
        click_weight=0.6,
    ),
    StreamSpec(
        name="pages",
        actions=("visit", "follow"),
        action_rates=(1.0, 0.1),
        action_weights=(0.2, 0.8),
        mean_events=16.0,
        half_life_days=7.0,
        click_weight=0.4,
    ),
)


@dataclass(frozen=True, kw_only=True)
class World:
    """Hidden and visible properties; index u is a user, i an item (both 0-based, ids in columns are + 1)."""

    user_profile: Ints
    user_topic_cdf: Floats
    user_activity: Floats
    item_campaign: Ints
    item_topic: Ints
    item_popularity_cdf: Floats
    item_bias: Floats
    profile_type: Ints
    campaign_type: Ints
    click_affinity: Floats
    conversion_affinity: Floats
    placement_bias: Floats


def make_world(users: int, items: int, rng: np.random.Generator) -> World:
    """Draw the hidden truth. User activity and item popularity follow power laws (exponents 0.8 and 1.0)."""
    campaigns = max(items // 40, 1)
    return World(
        user_profile=draw_power_law(PROFILES, 0.5, users, rng),
        user_topic_cdf=np.cumsum(rng.dirichlet(np.full(TOPICS, 0.3), size=users), axis=1),
        user_activity=rng.permutation(power_law(users, 0.8)),
        item_campaign=rng.integers(0, campaigns, items),
        item_topic=rng.integers(0, TOPICS, items),
        item_popularity_cdf=np.cumsum(rng.permutation(power_law(items, 1.0))),
        item_bias=rng.normal(0.0, 0.15, items),
        profile_type=rng.integers(0, TYPES, PROFILES),
        campaign_type=rng.integers(0, TYPES, campaigns),
        click_affinity=_low_rank(rng, deviation=0.8),
        conversion_affinity=_low_rank(rng, deviation=0.6),
        placement_bias=rng.normal(0.0, 0.4, PLACEMENTS),
    )


def _low_rank(rng: np.random.Generator, *, deviation: float) -> Floats:
    matrix = rng.normal(size=(TYPES, 2)) @ rng.normal(size=(2, TYPES))
    return deviation * (matrix - matrix.mean()) / matrix.std()


def power_law(count: int, exponent: float) -> Floats:
    """Probabilities proportional to rank^-exponent, rank 1..count."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum()


def draw_power_law(count: int, exponent: float, size: int, rng: np.random.Generator) -> Ints:
    """`size` draws of 0..count-1 by `power_law`."""
    return draw_cdf(np.cumsum(power_law(count, exponent)), rng.random(size))


def draw_cdf(cdf: Floats, uniform: Floats) -> Ints:
    """Index drawn by a cumulative distribution; safe against a last value of 1 - rounding."""
    return np.minimum(np.searchsorted(cdf, uniform, side="right"), len(cdf) - 1)


@dataclass(frozen=True, kw_only=True)
class Events:
    """All events of one stream, sorted by user and time (`log.order` is the identity)."""

    spec: StreamSpec
    log: EventLog
    item: Ints
    topic: Ints
    action: Ints
    time: Ints


def make_events(world: World, spec: StreamSpec, start: int, stop: int, rng: np.random.Generator) -> Events:
    """Events of every user in [start, stop) seconds, in topics the user prefers.

    Their number per user is a Pareto variable (shape 1.5) times the root of the user's activity, at least one and at
    most 20 times the stream's mean.
    """
    users = len(world.user_profile)
    scale = (1.0 + rng.pareto(1.5, users)) * np.sqrt(world.user_activity * users)
    counts = np.clip(spec.mean_events * scale / scale.mean(), 1, 20 * spec.mean_events).astype(np.int64)
    user = np.repeat(np.arange(users), counts)
    time = rng.integers(start, stop, len(user))
    log = EventLog.of(user, time)
    time = time[log.order]
    item, topic = draw_preferred(world, user, rng)
    bits = rng.random((len(spec.actions), len(user))) < np.array(spec.action_rates)[:, None]
    action = (bits * (1 << np.arange(len(spec.actions)))[:, None]).sum(axis=0)
    order = np.arange(len(user))
    sorted_log = EventLog(order=order, key=log.key, span=log.span, first_time=log.first_time)
    return Events(spec=spec, log=sorted_log, item=item, topic=topic, action=action, time=time)


def draw_preferred(world: World, user: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """An item in a topic that the user prefers, for every entry of `user`, and the item's topic.

    The topic is drawn from the user's distribution: one binary search in all users' distributions laid end to end.
    Within a topic, popularity falls with the item's place in it: u^3 puts half of the draws on an eighth.
    """
    ends = (world.user_topic_cdf / world.user_topic_cdf[:, -1:]) + np.arange(len(world.user_topic_cdf))[:, None]
    flat = np.searchsorted(ends.ravel(), user + rng.random(len(user)), side="right")
    topic = np.clip(flat - user * TOPICS, 0, TOPICS - 1)
    by_topic = np.argsort(world.item_topic, kind="stable")
    sizes = np.bincount(world.item_topic, minlength=TOPICS)
    first = np.cumsum(sizes) - sizes
    place = (sizes[topic] * rng.random(len(user)) ** 3).astype(np.int64)
    # A topic without items (only in tiny worlds) gives item 0.
    item = np.where(sizes[topic] > 0, by_topic[np.minimum(first[topic] + place, len(by_topic) - 1)], 0)
    return item, world.item_topic[item]


def interest(events: Events, spans: Spans, topic: Ints, time: Ints) -> Floats:
    """tanh of the faded, action-weighted number of kept events in the row's topic; between -1 and 1.

    Topic 3 at time t, one `query` event (weight 0.4) in topic 3 one half-life earlier, one in topic 5: tanh(0.2).
    """
    index = spans.index()
    row = np.repeat(np.arange(len(topic)), spans.lengths())
    match = events.topic[index.values] == topic[row]
    kept, row = index.values[match], row[match]
    weight = action_value(events.action[kept], events.spec)
    age_days = (time[row] - events.time[kept]) / DAY_S
    faded = weight / (1.0 + age_days / events.spec.half_life_days)
    return np.tanh(np.bincount(row, weights=faded, minlength=len(topic)))


def action_value(action: Ints, spec: StreamSpec) -> npt.NDArray[np.float64]:
    """Sum of the planted weights of the bits set in `action`."""
    return sum(((action >> bit & 1) * weight for bit, weight in enumerate(spec.action_weights)), np.zeros(len(action)))
