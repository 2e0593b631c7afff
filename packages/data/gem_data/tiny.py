"""A tiny seeded data set with every kind of column, for tests and examples (public through gem_data.testing)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa

from gem_data.interface import IdFeature, LabelInfo, Schema, StreamInfo, TableInfo
from gem_data.rows import ARROW_TYPES, arrow_type
from gem_data.schema import columns
from gem_data.writing import write_dataset

TINY_START = 1_000_000


def tiny_schema() -> Schema:
    """Two tasks (the second weighted), two scalars, one bag, two dense, two streams that share the item table."""
    return Schema(
        name="tiny",
        created_by="gem_data.testing",
        tables=(
            TableInfo(name="user", rows=20),
            TableInfo(name="item", rows=50),
            TableInfo(name="genre", rows=7),
        ),
        labels=(LabelInfo(name="click"), LabelInfo(name="like", weighted=True)),
        scalars=(IdFeature(name="user", table="user"), IdFeature(name="item", table="item")),
        lists=(IdFeature(name="genres", table="genre"),),
        dense=("price", "hour"),
        streams=(
            StreamInfo(
                name="views",
                fields=(IdFeature(name="item", table="item"), IdFeature(name="genre", table="genre")),
                action_bits=3,
                max_length=12,
            ),
            StreamInfo(name="buys", fields=(IdFeature(name="item", table="item"),), action_bits=1, max_length=5),
        ),
        facts={"best_ne": None},
    )


def tiny_table(*, rows: int, seed: int, first_sample: int = 0, start: int = TINY_START) -> pa.Table:
    """`rows` random valid rows of `tiny_schema`: sample ids count from `first_sample`, timestamps rise from `start`.

    Event lists have 0 to 15 events (more than the schema's max_length of 12), equal times among them.
    """
    rng = np.random.default_rng((seed, first_sample))
    timestamps = start + 10 * np.arange(rows)
    data: dict[str, object] = {
        "sample_id": np.arange(first_sample, first_sample + rows),
        "user_id": rng.integers(1, 20, rows),
        "timestamp": timestamps,
        "label.click": rng.integers(0, 2, rows).astype(np.float32),
        "label.like": rng.integers(0, 2, rows).astype(np.float32),
        "weight.like": rng.random(rows, np.float32),
        "id.user": rng.integers(0, 20, rows),
        "id.item": rng.integers(0, 50, rows),
        "ids.genres": [rng.integers(0, 7, n) for n in rng.integers(0, 4, rows)],
        "dense.price": rng.standard_normal(rows, np.float32),
        "dense.hour": rng.random(rows, np.float32),
    }
    for stream in tiny_schema().streams:
        lengths = rng.integers(0, 16, rows)
        for field in stream.fields:
            limit = tiny_schema().table_rows()[field.table]
            data[f"stream.{stream.name}.{field.name}"] = [rng.integers(0, limit, n) for n in lengths]
        data[f"stream.{stream.name}.action"] = [rng.integers(0, 1 << stream.action_bits, n) for n in lengths]
        data[f"stream.{stream.name}.time"] = [
            np.sort(rng.integers(1, 30, n)) + stamp - 40 for n, stamp in zip(lengths, timestamps, strict=True)
        ]
    kinds = {column.name: ARROW_TYPES[column.kind] for column in columns(tiny_schema())}
    return pa.table({name: pa.array(data[name], kind) for name, kind in kinds.items()})


def write_tiny(
    directory: str | Path,
    *,
    train_rows: int = 100,
    eval_rows: int = 30,
    seed: int = 0,
    rows_per_file: int = 40,
    rows_per_group: int = 9,
) -> Schema:
    """Write a tiny data set: train, then eval (strictly later). Many small files and row groups by default."""
    tables = {"train": tiny_table(rows=train_rows, seed=seed)}
    if eval_rows:
        later = TINY_START + 10 * train_rows
        tables["eval"] = tiny_table(rows=eval_rows, seed=seed, first_sample=train_rows, start=later)
    return write_dataset(directory, tiny_schema(), tables, rows_per_file=rows_per_file, rows_per_group=rows_per_group)


def tiny_request_schema() -> Schema:
    """tiny_schema with requests as rows: each impression has its item, genres and price; a second bag is the user's."""
    plain = tiny_schema()
    return dataclasses.replace(
        plain,
        name="tiny-requests",
        lists=(*plain.lists, IdFeature(name="tastes", table="genre")),
        impression=("id.item", "ids.genres", "dense.price"),
    )


def tiny_request_table(*, rows: int, seed: int, first_sample: int = 0, start: int = TINY_START) -> pa.Table:
    """`rows` random valid requests of `tiny_request_schema`, of 1 to 4 impressions."""
    rng = np.random.default_rng((seed, first_sample, 1))
    counts = rng.integers(1, 5, rows)
    users = tiny_table(rows=rows, seed=seed, first_sample=first_sample, start=start)
    own = tiny_table(rows=int(counts.sum()), seed=seed + 1, first_sample=first_sample, start=start)
    bounds = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    arrays = {}
    for column in columns(tiny_request_schema()):
        if column.name == "ids.tastes":
            array = pa.array([rng.integers(0, 7, n) for n in rng.integers(0, 3, rows)], arrow_type(column))
        elif column.each:
            inner = own.column(column.name).combine_chunks()
            array = pa.ListArray.from_arrays(bounds, inner).cast(arrow_type(column))
        else:
            array = users.column(column.name)
        arrays[column.name] = array
    return pa.table(arrays)


def write_tiny_requests(
    directory: str | Path,
    *,
    train_rows: int = 60,
    eval_rows: int = 20,
    seed: int = 0,
    rows_per_file: int = 40,
    rows_per_group: int = 9,
) -> Schema:
    """Like write_tiny, of requests; sample ids of eval follow those of train."""
    train = tiny_request_table(rows=train_rows, seed=seed)
    tables = {"train": train}
    if eval_rows:
        first = sum(len(ids) for ids in train.column("sample_id").to_pylist())
        later = TINY_START + 10 * train_rows
        tables["eval"] = tiny_request_table(rows=eval_rows, seed=seed, first_sample=first, start=later)
    return write_dataset(
        directory, tiny_request_schema(), tables, rows_per_file=rows_per_file, rows_per_group=rows_per_group
    )
