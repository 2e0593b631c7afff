"""Read the three files of MovieLens-100K in RecBole's layout into arrays: events in time order, joined with side ids.

The layout: tab separated, header cells `name:type`, lists separated by spaces, quotation marks are text. Ids 1.. are
the files' own for users and items, and ranks in the sorted vocabulary elsewhere; 0 is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from gem_datasets.prepared import DatasetError, Ints, Ragged

AGE_EDGES = (18, 25, 35, 45, 50, 56)
DAY_S = 86400
FIRST_YEAR = 1900


@dataclass(frozen=True, kw_only=True)
class Events:
    """All events in time order, joined with their user's and item's side ids."""

    line: Ints
    user: Ints
    item: Ints
    rating: Ints
    time: Ints
    age_years: Ints
    side: dict[str, Ints]
    genres: Ragged
    title: Ragged
    rows: dict[str, int]

    @property
    def like(self) -> Ints:
        return (self.rating >= 4).astype(np.int64)

    @property
    def action(self) -> Ints:
        return self.like | ((self.rating == 5) << 1) | ((self.rating <= 2) << 2)


def read_events(folder: Path) -> Events:
    """All events of ml-100k.{inter,user,item} in `folder`; DatasetError names the file and what is wrong with it."""
    inter = _read_table(folder / "ml-100k.inter", ("user_id", "item_id", "rating", "timestamp"))
    users = _read_table(folder / "ml-100k.user", ("user_id", "age", "gender", "occupation", "zip_code"))
    items = _read_table(folder / "ml-100k.item", ("item_id", "movie_title", "release_year", "class"))
    time = _numbers(inter, "timestamp", folder / "ml-100k.inter")
    order = np.argsort(time, kind="stable")
    user = _numbers(inter, "user_id", folder / "ml-100k.inter")[order]
    item = _numbers(inter, "item_id", folder / "ml-100k.inter")[order]
    rating = _numbers(inter, "rating", folder / "ml-100k.inter")[order]
    if rating.min() < 1 or rating.max() > 5:
        raise DatasetError(f"{folder / 'ml-100k.inter'}: ratings {rating.min()}..{rating.max()}, expected 1..5")
    user_row = _join(user, _numbers(users, "user_id", folder / "ml-100k.user"), "user", folder)
    item_row = _join(item, _numbers(items, "item_id", folder / "ml-100k.item"), "item", folder)
    side, rows, age_years = _user_side(users, folder)
    side = {name: values[user_row] for name, values in side.items()}
    item_side, item_rows, genres, title = _item_side(items)
    side |= {name: values[item_row] for name, values in item_side.items()}
    side |= {"hour": time[order] // 3600 % 24 + 1, "weekday": (time[order] // DAY_S + 3) % 7 + 1}
    rows |= item_rows | {"hour": 25, "weekday": 8, "rating": 6}
    rows |= {"user": int(user.max()) + 1, "item": int(item.max()) + 1}
    return Events(
        line=order,
        user=user,
        item=item,
        rating=rating,
        time=time[order],
        age_years=age_years[user_row],
        side=side,
        genres=_take(genres, item_row),
        title=_take(title, item_row),
        rows=rows,
    )


def _user_side(users: pa.Table, folder: Path) -> tuple[dict[str, Ints], dict[str, int], Ints]:
    """Per user: gender, age bucket, occupation, first zip character, gender x age; the tables' rows; the age."""
    age_years = _numbers(users, "age", folder / "ml-100k.user")
    gender, genders = _encode(users["gender"].to_pylist())
    occupation, occupations = _encode(users["occupation"].to_pylist())
    zip_code, zips = _encode([code[:1].upper() for code in users["zip_code"].to_pylist()])
    age = np.digitize(age_years, AGE_EDGES) + 1
    ages = len(AGE_EDGES) + 2
    side = {"gender": gender, "age": age, "occupation": occupation, "zip": zip_code, "profile": gender * ages + age}
    rows = {"gender": genders, "age": ages, "occupation": occupations, "zip": zips, "profile": genders * ages}
    return side, rows, age_years


def _item_side(items: pa.Table) -> tuple[dict[str, Ints], dict[str, int], Ragged, Ragged]:
    """Per item: release year, genre set; the tables' rows; genres and frequent title words."""
    year = np.array([int(y) - FIRST_YEAR + 1 if y.isdigit() else 0 for y in items["release_year"].to_pylist()])
    genre_set, sets = _encode(items["class"].to_pylist())
    genres, genre_count = _encode_words([cell.split() for cell in items["class"].to_pylist()], least=1)
    words = [_words(title) for title in items["movie_title"].to_pylist()]
    title, word_count = _encode_words(words, least=2)
    rows = {"year": int(year.max()) + 1, "genre_set": sets, "genre": genre_count, "word": word_count}
    return {"year": year, "genre_set": genre_set}, rows, genres, title


def _words(title: str) -> list[str]:
    cleaned = "".join(c if c.isalnum() else " " for c in title.lower())
    return list(dict.fromkeys(cleaned.split()))


def _encode(tokens: list[str]) -> tuple[Ints, int]:
    """Tokens to ids 1.. in sorted order (0 stays unknown), and the rows of their table."""
    vocabulary, ids = np.unique(np.array(tokens, dtype=str), return_inverse=True)
    return ids.astype(np.int64) + 1, len(vocabulary) + 1


def _encode_words(rows: list[list[str]], *, least: int) -> tuple[Ragged, int]:
    """Lists of words to lists of ids 1.., leaving out words in fewer than `least` rows."""
    counts: dict[str, int] = {}
    for row in rows:
        for word in row:
            counts[word] = counts.get(word, 0) + 1
    ids = {word: i + 1 for i, word in enumerate(sorted(word for word, count in counts.items() if count >= least))}
    lists = [[ids[word] for word in row if word in ids] for row in rows]
    offsets = np.cumsum([0, *(len(row) for row in lists)])
    return Ragged(values=np.array([i for row in lists for i in row], dtype=np.int64), offsets=offsets), len(ids) + 1


def _take(lists: Ragged, index: Ints) -> Ragged:
    lengths = np.diff(lists.offsets)[index]
    offsets = np.zeros(len(index) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    positions = np.arange(offsets[-1]) + np.repeat(lists.offsets[index] - offsets[:-1], lengths)
    return Ragged(values=lists.values[positions], offsets=offsets)


def _join(keys: Ints, table_keys: Ints, what: str, folder: Path) -> Ints:
    row_of = np.full(int(max(keys.max(), table_keys.max())) + 1, -1, dtype=np.int64)
    row_of[table_keys] = np.arange(len(table_keys))
    rows = row_of[keys]
    if (rows < 0).any():
        raise DatasetError(f"{folder}: {what} {int(keys[rows < 0][0])} occurs in ml-100k.inter, not in ml-100k.{what}")
    return rows


def _read_table(path: Path, columns: tuple[str, ...]) -> pa.Table:
    """A RecBole file: tab separated, header cells `name:type`; all columns as text."""
    if not path.exists():
        raise DatasetError(f"{path} does not exist; expected a tab-separated file with columns {', '.join(columns)}")
    header = path.open(encoding="utf-8").readline().rstrip("\n").split("\t")
    if [cell.split(":")[0] for cell in header] != list(columns):
        raise DatasetError(f"{path}: header {header}, expected {' '.join(columns)} (each as name:type)")
    # Titles contain quotation marks that are text.
    parse = pa.csv.ParseOptions(delimiter="\t", quote_char=False)
    convert = pa.csv.ConvertOptions(column_types={cell: pa.string() for cell in header}, strings_can_be_null=False)
    try:
        table = pa.csv.read_csv(path, parse_options=parse, convert_options=convert)
    except pa.ArrowInvalid as error:
        raise DatasetError(f"{path}: not a tab-separated table with {len(columns)} columns: {error}") from None
    if table.num_rows == 0:
        raise DatasetError(f"{path} has no rows")
    return table.rename_columns(list(columns))


def _numbers(table: pa.Table, column: str, path: Path) -> Ints:
    try:
        return table[column].cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise DatasetError(f"{path}: column {column} must hold integers: {error}") from None
