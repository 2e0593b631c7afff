"""MovieLens-100K: 100,000 ratings as impressions with real histories; label `like` = rating >= 4.

Source: the files `.inter`, `.user` and `.item` that travel inside the wheel recbole==1.2.1, fetched through pip at run
time and never shipped (GroupLens terms: research use, no redistribution).

Every input of a row is from events strictly before the row's second: histories, counts and rates. About half of a
user's events share their second with another one, so "the rows above" would leak a session into itself. Evaluation is
the last 20 % of events by time; most of its users never occur in training, which makes the set a test of histories,
item knowledge and profile rather than of memorized users.

Columns (all tables: id 0 = unknown):

    label.like                  rating >= 4
    id.user                     the user, 0 until `known_after` strictly earlier training events: so id 0 is trained as
                                "new user", which is what evaluation mostly asks for
    id.item id.gender id.age (7 buckets) id.occupation id.zip (first character) id.year id.genre_set id.hour id.weekday
    ids.genres ids.title        genres; title words that occur in at least two titles
    dense.*                     standardized with the training rows' mean and deviation, see `_dense`
    stream.history              the user's latest events: item, rating, genre_set; bits: 0 rating >= 4, 1 rating 5,
                                2 rating <= 2
    stream.audience             the item's latest events (absent if audience_length is 0): user, rating, profile
                                (gender x age); same bits
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gem_datasets.fetch import Member, Source, fetch
from gem_datasets.history import EventLog, Spans, smoothed_rate
from gem_datasets.ml_100k_files import FIRST_YEAR, Events, read_events
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

_FOLDER = "recbole/dataset_example/ml-100k/"
SOURCE = Source(
    requirement="recbole==1.2.1",
    folder="ml-100k-recbole-1.2.1",
    members=(
        Member(
            archive_name=_FOLDER + "ml-100k.inter",
            name="ml-100k.inter",
            size_bytes=1979230,
            sha256="4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
        ),
        Member(
            archive_name=_FOLDER + "ml-100k.user",
            name="ml-100k.user",
            size_bytes=22697,
            sha256="4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
        ),
        Member(
            archive_name=_FOLDER + "ml-100k.item",
            name="ml-100k.item",
            size_bytes=66632,
            sha256="51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
        ),
    ),
)
ACTIONS = ("rating >= 4", "rating = 5", "rating <= 2")
DAY_S = 86400
_SCALARS = ("gender", "age", "occupation", "zip", "year", "genre_set", "hour", "weekday")


@dataclass(frozen=True, kw_only=True)
class MovieLensOptions:
    """Options of `load("ml-100k")`.

    cache_dir        where fetched files are kept; None = the user's cache folder
    source_dir       read ml-100k.{inter,user,item} from here instead (nothing is fetched, no SHA-256 is checked)
    train_fraction   share of events, by time, that are training data
    max_length       latest events kept in stream `history`
    audience_length  latest events kept in stream `audience`; 0 leaves the stream out
    known_after      strictly earlier training events after which a row names its user (id.user is 0 before)
    """

    cache_dir: str | Path | None = None
    source_dir: str | Path | None = None
    train_fraction: float = 0.8
    max_length: int = 200
    audience_length: int = 50
    known_after: int = 10

    def __post_init__(self) -> None:
        if not 0.0 < self.train_fraction < 1.0:
            raise DatasetError(f"ml-100k: train_fraction must lie in (0, 1), got {self.train_fraction}")
        for name, least in (("max_length", 1), ("audience_length", 0), ("known_after", 0)):
            if getattr(self, name) < least:
                raise DatasetError(f"ml-100k: {name} must be at least {least}, got {getattr(self, name)}")


def prepare(options: MovieLensOptions) -> PreparedData:
    """Fetch (or read), parse and convert; about two seconds after the download."""
    source_dir = options.source_dir
    folder = fetch(SOURCE, _path(options.cache_dir)) if source_dir is None else Path(source_dir)
    events = read_events(folder)
    cut = split_rows(events.time, options.train_fraction)
    by_user = EventLog.of(events.user, events.time)
    by_item = EventLog.of(events.item, events.time)
    dense, scaling = _dense(events, by_user, by_item, cut)
    columns: dict[str, Any] = {
        "sample_id": events.line,
        "user_id": events.user,
        "timestamp": events.time,
        "label.like": events.like,
        "id.user": _known_users(events, cut, options.known_after),
        "id.item": events.item,
        **{f"id.{name}": events.side[name] for name in _SCALARS},
        "ids.genres": events.genres,
        "ids.title": events.title,
        **dense,
    }
    history = by_user.earlier(events.user, events.time, max_length=options.max_length)
    columns |= _stream_columns("history", history, events, ("item", "rating", "genre_set"))
    streams = [
        stream(
            "history",
            [feature("item"), feature("rating"), feature("genre_set")],
            action_bits=len(ACTIONS),
            max_length=options.max_length,
        )
    ]
    if options.audience_length:
        audience = by_item.earlier(events.item, events.time, max_length=options.audience_length)
        columns |= _stream_columns("audience", audience, events, ("user", "rating", "profile"))
        fields = [feature("user"), feature("rating"), feature("profile")]
        streams.append(stream("audience", fields, action_bits=len(ACTIONS), max_length=options.audience_length))
    facts = _facts(events, cut, scaling, options)
    return build(_schema(events.rows, list(dense), streams, facts), columns, cut)


def _schema(
    rows: dict[str, int], dense: list[str], streams: list[dict[str, Any]], facts: dict[str, Any]
) -> dict[str, Any]:
    scalars = [feature(name) for name in ("user", "item", *_SCALARS)]
    lists = [feature("genres", "genre"), feature("title", "word")]
    used = {entry["table"] for entry in (*scalars, *lists, *(f for s in streams for f in s["fields"]))}
    return {
        "name": "ml-100k",
        "created_by": CREATED_BY,
        "tables": [{"name": name, "rows": count} for name, count in rows.items() if name in used],
        "labels": [{"name": "like", "weighted": False}],
        "scalars": scalars,
        "lists": lists,
        "dense": [name.removeprefix("dense.") for name in dense],
        "streams": streams,
        "facts": facts,
    }


def _facts(events: Events, cut: int, scaling: dict[str, list[float]], options: MovieLensOptions) -> dict[str, Any]:
    return {
        "source": "MovieLens-100K (GroupLens), files inside the wheel recbole==1.2.1",
        "licence": "GroupLens terms: research use, no redistribution; fetched at run time",
        "label": "like = rating >= 4",
        "split": {
            "rule": "stable sort by time; events of one second stay on one side, the nearer one to the wanted count",
            "wanted_train_rows": round(len(events.time) * options.train_fraction),
            "train_rows": cut,
            "eval_rows": len(events.time) - cut,
            "first_eval_time": int(events.time[cut]),
            "eval_rows_of_training_users": float(np.isin(events.user[cut:], events.user[:cut]).mean()),
        },
        "dense_mean_std": scaling,
        "action_bits": list(ACTIONS),
    }


def _known_users(events: Events, cut: int, known_after: int) -> Ints:
    """id.user: the user where at least `known_after` (and one) strictly earlier training events name it, else 0."""
    train = EventLog.of(events.user[:cut], events.time[:cut])
    earlier = train.earlier(events.user, events.time).lengths()
    return np.where(earlier >= max(known_after, 1), events.user, 0)


def _stream_columns(name: str, spans: Spans, events: Events, fields: tuple[str, ...]) -> dict[str, Ragged]:
    index = spans.index()
    sources = {"item": events.item, "user": events.user, "rating": events.rating, **events.side}
    columns = {field: sources[field] for field in fields} | {"action": events.action, "time": events.time}
    return {
        f"stream.{name}.{column}": Ragged(values=values[index.values], offsets=index.offsets)
        for column, values in columns.items()
    }


def _dense(
    events: Events, by_user: EventLog, by_item: EventLog, cut: int
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Dense columns (float32, standardized) and their [mean, std]; every one from strictly earlier events.

    user_like_rate, item_like_rate      smoothed towards the like-rate of all earlier events, strength 5
    user_mean_rating, item_mean_rating  the same with ratings
    user_genre_rate                     the user's like-rate in each of the row's genres, smoothed towards the user's
                                        rate with strength 5, mean over the genres
    item_profile_rate                   like-rate of the item among the row's gender x age, smoothed towards the item's
    user_log_count, item_log_count      log(1 + earlier events)
    user_log_gap, item_log_gap          log(1 + days since the latest earlier event); 0 events: since the first of all
    age                                 years; item_age: years from release year to the event
    """
    everyone = EventLog.of(np.zeros_like(events.user), events.time).earlier(np.zeros_like(events.user), events.time)
    users = by_user.earlier(events.user, events.time)
    items = by_item.earlier(events.item, events.time)
    like, rating = events.like, events.rating
    base_rate = (everyone.sum(like) + 1.0) / (everyone.lengths() + 2.0)
    base_rating = (everyone.sum(rating) + 3.0) / (everyone.lengths() + 1.0)
    user_rate = smoothed_rate(users, like, prior=base_rate, strength=5.0)
    item_rate = smoothed_rate(items, like, prior=base_rate, strength=5.0)
    profile_group = events.item * events.rows["profile"] + events.side["profile"]
    profiles = EventLog.of(profile_group, events.time).earlier(profile_group, events.time)
    year = events.time / (365.25 * DAY_S) + 1970.0
    released = np.where(events.side["year"] > 0, events.side["year"] + FIRST_YEAR - 1, year.mean())
    values = {
        "user_like_rate": user_rate,
        "item_like_rate": item_rate,
        "user_mean_rating": smoothed_rate(users, rating, prior=base_rating, strength=5.0),
        "item_mean_rating": smoothed_rate(items, rating, prior=base_rating, strength=5.0),
        "user_genre_rate": _genre_rate(events, user_rate),
        "item_profile_rate": smoothed_rate(profiles, like, prior=item_rate, strength=5.0),
        "user_log_count": np.log1p(users.lengths()),
        "item_log_count": np.log1p(items.lengths()),
        "user_log_gap": _log_gap_days(users, events.time),
        "item_log_gap": _log_gap_days(items, events.time),
        "age": events.age_years.astype(np.float64),
        "item_age": np.log1p(np.maximum(year - released, 0.0)),
    }
    scaled = {name: standardize(column, cut) for name, column in values.items()}
    return {f"dense.{name}": pair[0] for name, pair in scaled.items()}, {name: pair[1] for name, pair in scaled.items()}


def _genre_rate(events: Events, user_rate: Floats) -> Floats:
    """Mean over the row's genres of the user's smoothed like-rate in that genre."""
    counts = np.diff(events.genres.offsets)
    row = np.repeat(np.arange(len(counts)), counts)
    group = events.user[row] * events.rows["genre"] + events.genres.values
    spans = EventLog.of(group, events.time[row]).earlier(group, events.time[row])
    rate = smoothed_rate(spans, events.like[row], prior=user_rate[row], strength=5.0)
    return np.bincount(row, weights=rate, minlength=len(counts)) / counts


def _log_gap_days(spans: Spans, time: Ints) -> Floats:
    latest = time[spans.log.order[np.maximum(spans.stop - 1, 0)]]
    latest = np.where(spans.lengths() > 0, latest, time.min())
    return np.log1p((time - latest) / DAY_S)


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)
