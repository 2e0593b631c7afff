"""Rows that are requests: the layout's rules, the batch, plain samples into requests and back, and what they weigh."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gem_data.api import (
    batch_from_dicts,
    batch_from_table,
    cost_from_dict,
    cost_to_dict,
    expand_batch,
    expand_requests,
    expanded_schema,
    fit_cost,
    group_requests,
    read_schema,
    request_schema,
    row_costs,
    schema_from_dict,
    schema_to_dict,
    select,
    to_impressions,
    to_requests,
    verify_dataset,
    write_dataset,
)
from gem_data.cost import Observation
from gem_data.damage import rewrite, set_value
from gem_data.exchange import pack_rows, row_bytes, rows_of_batch, take_rows, unpack_rows
from gem_data.interface import Batch, CostModel, CostTerm, DataError, LoaderConfig, Schema
from gem_data.packing import move_batch, pack_batch
from gem_data.reference_balance import reference_load
from gem_data.streaming import StreamingLoader, time_windows
from gem_data.testing import (
    batch_difference,
    tiny_request_schema,
    tiny_request_table,
    tiny_schema,
    tiny_table,
    write_tiny_requests,
)
from hypothesis import given, settings
from hypothesis import strategies as st

SCHEMA = tiny_request_schema()


def tiny_batch(rows: int = 9, seed: int = 0) -> Batch:
    return batch_from_table(SCHEMA, tiny_request_table(rows=rows, seed=seed), step=4)


# ------------------------------------------------------------------------------------------------ schema


def test_a_plain_schema_is_written_as_before() -> None:
    assert "impression" not in schema_to_dict(tiny_schema())
    written = schema_to_dict(SCHEMA)
    assert written["impression"] == ["id.item", "ids.genres", "dense.price"]
    assert schema_from_dict(written) == SCHEMA
    assert tiny_schema().request_keys() == ()
    assert SCHEMA.request_keys() == ("user", "tastes", "views.item", "views.genre", "buys.item")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["id.itme"], 'did you mean "id.item"'),
        (["id.item", "id.item"], "comes twice"),
        (["stream.views"], "streams are the user's"),
        (["label.click", "id.item"], "always belong to impressions"),
    ],
)
def test_wrong_names_of_what_impressions_have(names: list[str], says: str) -> None:
    with pytest.raises(DataError, match=says):
        schema_from_dict({**schema_to_dict(SCHEMA), "impression": names})


def test_selecting_features_keeps_the_levels_and_something_to_tell_impressions_apart() -> None:
    few = select(SCHEMA, features=["id.user", "id.item", "stream.buys"], labels=["click"])
    assert few.impression == ("id.item",)
    with pytest.raises(ValueError, match="at least one that each impression"):
        select(SCHEMA, features=["id.user", "stream.buys"])


# ------------------------------------------------------------------------------------------------ batch


def test_the_worked_example_of_the_batch() -> None:
    schema = select(SCHEMA, features=["id.user", "id.item"], labels=["click"])
    batch = batch_from_dicts(
        schema,
        [
            {"timestamp": 9, "id.user": 5, "id.item": [1, 2]},
            {"timestamp": 9, "id.user": 6, "id.item": [3]},
        ],
        scoring=True,
    )
    assert batch.requests is not None
    assert batch.requests.tolist() == [0, 2, 3]
    assert batch.ids.values().tolist() == [5, 6, 1, 2, 3]
    assert (batch.ids.lengths().tolist(), batch.ids.stride()) == ([1, 0, 1, 1, 1, 1], 3)
    assert (batch.rows, batch.sample_ids.tolist(), batch.labels.tolist()) == (2, [0, 1, 2], [[0.0]] * 3)
    plain = expand_batch(schema, batch)
    assert plain.ids.values().tolist() == [5, 5, 6, 1, 2, 3]
    assert plain.requests is None


def test_an_expanded_batch_is_the_batch_of_the_expanded_table() -> None:
    table = tiny_request_table(rows=9, seed=3)
    plain = batch_from_table(expanded_schema(SCHEMA), to_impressions(SCHEMA, table))
    came = expand_batch(SCHEMA, batch_from_table(SCHEMA, table))
    # a plain table's rows are numbered themselves, a request's impressions share its number
    assert batch_difference(dataclasses.replace(came, row_index=plain.row_index), plain) is None


ONE_LEVEL_WITHOUT_IDS = [
    select(SCHEMA, features=["id.user", "ids.tastes", "stream.views", "stream.buys", "dense.hour", "dense.price"]),
    select(SCHEMA, features=["dense.hour", "id.item"]),
    select(SCHEMA, features=["dense.hour", "dense.price"]),
]


@pytest.mark.parametrize("rows", [0, 1, 6])
@pytest.mark.parametrize("schema", [SCHEMA, *ONE_LEVEL_WITHOUT_IDS], ids=["both", "impression", "request", "neither"])
def test_packed_moved_and_exchanged_requests_are_the_same(schema: Schema, rows: int) -> None:
    whole = batch_from_table(schema, tiny_request_table(rows=6, seed=0), step=4)
    batch = take_rows(schema, whole, np.arange(rows))
    packed = pack_batch(batch)
    assert batch_difference(packed.batch, batch) is None
    assert batch_difference(move_batch(packed, "cpu").batch, batch) is None
    held, sizes = rows_of_batch(schema, batch), row_bytes(schema, batch)
    cut = rows // 2
    takes = [np.arange(cut, rows), np.arange(cut)]
    chunks = [pack_rows(schema, held, take) for take in takes]
    assert [chunk.numel() for chunk in chunks] == [int(sizes[take].sum()) for take in takes]
    counts = [len(take) for take in takes]
    came = unpack_rows(schema, chunks, counts, global_rows=batch.global_rows, step=batch.step)
    assert batch_difference(came, take_rows(schema, batch, np.concatenate(takes))) is None
    if rows == 6:
        assert batch_difference(take_rows(schema, came, np.array([3, 4, 5, 0, 1, 2])), batch) is None


def test_rows_in_memory_name_row_and_impression() -> None:
    rows = tiny_request_table(rows=3, seed=2).to_pylist()
    at = next(number for number, row in enumerate(rows) if len(row["sample_id"]) > 1)
    count = len(rows[at]["sample_id"])

    def came(**changes: Any) -> DataError:
        with pytest.raises(DataError) as caught:
            batch_from_dicts(SCHEMA, [*rows[:at], {**rows[at], **changes}, *rows[at + 1 :]])
        assert caught.value.row == at
        return caught.value

    error = came(**{"label.click": [0.0] * (count - 1) + [3.0]})
    assert f"impression {count - 1} of {count}" in str(error)
    assert error.column == "label.click"
    assert f"as long as sample_id ({count} impressions)" in str(came(**{"dense.price": [1.0]}))
    assert came(**{"id.item": 3}).column == "id.item"


# ------------------------------------------------------------------------------------------------ data sets


def test_verify_counts_impressions_and_finds_repeated_ones(tmp_path: Path) -> None:
    write_tiny_requests(tmp_path / "good")
    report = verify_dataset(tmp_path / "good")
    assert report.ok
    assert (report.rows["train"], report.impressions["train"]) == (60, 141)
    assert "60 train, 20 eval rows (141 train" in str(report)
    table = tiny_request_table(rows=20, seed=0)
    ids = table.column("sample_id").to_pylist()
    spoilt = set_value(table, 15, "sample_id", [ids[3][0], *ids[15][1:]])
    write_dataset(tmp_path / "bad", SCHEMA, {"train": spoilt}, rows_per_group=6)
    (problem,) = verify_dataset(tmp_path / "bad").problems
    assert (problem.row_group, problem.row, problem.column) == (2, 3, "sample_id")
    assert "row group 0, row 3 has too" in str(problem)


def test_writing_refuses_what_reading_would(tmp_path: Path) -> None:
    table = set_value(tiny_request_table(rows=5, seed=0), 4, "label.like", lambda values: [*values, 1.0])
    with pytest.raises(DataError, match=r"row 4.*label\.like.*as long as sample_id"):
        write_dataset(tmp_path / "bad", SCHEMA, {"train": table})
    assert not (tmp_path / "bad").exists()


def plain_groups(rows: list[dict[str, Any]], own: tuple[str, ...]) -> list[list[int]]:
    """Sample ids of neighbouring samples that agree in everything but what is an impression's."""
    groups: list[list[int]] = []
    for number, row in enumerate(rows):
        before = rows[number - 1] if number else None
        same = before is not None and all(row[name] == before[name] for name in row if name not in own)
        groups.append([row["sample_id"]]) if not same else groups[-1].append(row["sample_id"])
    return groups


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(0, 9), st.integers(1, 12))
def test_grouping_joins_equal_neighbours_wherever_tables_are_cut(data: st.DataObject, seed: int, cut: int) -> None:
    base = tiny_table(rows=4, seed=seed)
    picks = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    table = base.take(picks)
    count = len(picks)
    changes = {"sample_id": pa.array(range(count), pa.int64()), "id.item": pa.array([n % 50 for n in range(count)])}
    changes["label.click"] = pa.array([float(n % 2) for n in range(count)], pa.float32())
    for name, array in changes.items():
        table = table.set_column(table.column_names.index(name), name, array)
    schema = request_schema(tiny_schema(), ["id.item"])
    own = ("sample_id", "label.click", "label.like", "weight.like", "id.item")
    parts = [table.slice(start, cut) for start in range(0, count, cut)]
    grouped = pa.concat_tables(list(to_requests(schema, parts)))
    assert grouped.column("sample_id").to_pylist() == plain_groups(table.to_pylist(), own)
    assert to_impressions(schema, grouped).to_pylist() == table.to_pylist()


@pytest.mark.parametrize(
    "column", ["user_id", "timestamp", "id.user", "ids.genres", "dense.hour", "stream.views.genre", "stream.buys.time"]
)
def test_one_difference_in_the_users_part_is_another_request(column: str) -> None:
    row = {
        **tiny_table(rows=1, seed=0).to_pylist()[0],
        "ids.genres": [1, 2],
        "stream.views.item": [1, 2],
        "stream.views.genre": [1, 2],
        "stream.views.action": [0, 1],
        "stream.views.time": [5, 6],
        "stream.buys.item": [1],
        "stream.buys.action": [0],
        "stream.buys.time": [5],
    }
    value = row[column]
    other = [*value[:-1], value[-1] - 1] if isinstance(value, list) else value + 1
    kinds = tiny_table(rows=1, seed=0).schema
    table = pa.Table.from_pylist([row, row, {**row, column: other}, row], schema=kinds)
    (grouped,) = to_requests(request_schema(tiny_schema(), ["id.item"]), table.slice(0, 2))
    assert grouped.num_rows == 1
    grouped = pa.concat_tables(list(to_requests(request_schema(tiny_schema(), ["id.item"]), table)))
    assert [len(ids) for ids in grouped.column("sample_id").to_pylist()] == [2, 1, 1]


def groups_of(directory: Path) -> list[list[int]]:
    """Of every row group of the training files: its samples."""
    found = []
    for file in read_schema(directory).files:
        if file.split == "train":
            with pq.ParquetFile(directory / file.path) as opened:
                for group in range(opened.num_row_groups):
                    ids = opened.read_row_group(group, columns=["sample_id"]).column("sample_id").to_pylist()
                    found.append([i for one in ids for i in (one if isinstance(one, list) else [one])])
    return found


def test_conversions_keep_row_groups(tmp_path: Path) -> None:
    """Time windows are made of them. A request is in the row group in which its first sample was."""
    write_dataset(tmp_path / "first", SCHEMA, {"train": tiny_request_table(rows=60, seed=2)}, rows_per_group=10)
    wanted = groups_of(tmp_path / "first")
    assert len(wanted) == 6
    expand_requests(tmp_path / "first", tmp_path / "plain")
    assert groups_of(tmp_path / "plain") == wanted
    group_requests(tmp_path / "plain", tmp_path / "again", impression=SCHEMA.impression)
    assert groups_of(tmp_path / "again") == wanted
    windows = [time_windows(tmp_path / name, seconds=100) for name in ("first", "plain", "again")]
    assert [[(w.first, w.last) for w in found] for found in windows[1:]] == [
        [(w.first, w.last) for w in windows[0]]
    ] * 2
    expand_requests(tmp_path / "first", tmp_path / "small", rows_per_group=7)
    assert {len(ids) for ids in groups_of(tmp_path / "small")[:-1]} == {7}
    group_requests(tmp_path / "plain", tmp_path / "other", impression=SCHEMA.impression, rows_per_group=30)
    assert [sum(map(len, wanted[:3])), sum(map(len, wanted[3:]))] == [len(g) for g in groups_of(tmp_path / "other")]


@pytest.mark.parametrize("rows_per_group", [1, 2, 3, 5, 8, 13])
def test_a_request_over_several_row_groups_is_where_it_began(tmp_path: Path, rows_per_group: int) -> None:
    """Requests of 1, 4, 2, 1, 3 and 2 samples, cut anywhere."""
    sizes = [1, 4, 2, 1, 3, 2]
    owner = np.repeat(np.arange(6), sizes)
    table = tiny_table(rows=6, seed=0).take(owner.tolist())
    table = table.set_column(table.column_names.index("sample_id"), "sample_id", pa.array(range(13), pa.int64()))
    write_dataset(tmp_path / "a", tiny_schema(), {"train": table}, rows_per_group=rows_per_group)
    group_requests(tmp_path / "a", tmp_path / "b", impression=["id.item"])
    group_of_sample = np.arange(13) // rows_per_group
    begins = group_of_sample[np.searchsorted(owner, np.arange(6))]
    wanted = [[i for i in range(13) if begins[owner[i]] == group] for group in np.unique(begins)]
    assert groups_of(tmp_path / "b") == wanted


def test_data_sets_there_and_back(tmp_path: Path) -> None:
    write_tiny_requests(tmp_path / "first")
    expand_requests(tmp_path / "first", tmp_path / "plain")
    schema = group_requests(tmp_path / "plain", tmp_path / "again", impression=SCHEMA.impression)
    assert [file.rows for file in schema.files] == [60, 20]

    def content(name: str) -> list[dict[str, Any]]:
        files = read_schema(tmp_path / name).files
        return [row for file in files for row in pq.read_table(tmp_path / name / file.path).to_pylist()]

    assert content("again") == content("first")
    assert len(content("plain")) == sum(len(row["sample_id"]) for row in content("first"))
    with pytest.raises(ValueError, match="are requests already"):
        group_requests(tmp_path / "first", tmp_path / "no", impression=["id.item"])
    with pytest.raises(ValueError, match="came plain samples"):
        expand_requests(tmp_path / "plain", tmp_path / "no")
    with pytest.raises(ValueError, match="came none"):
        group_requests(tmp_path / "plain", tmp_path / "no", impression=[])


def test_windows_of_time_are_read_request_by_request(tmp_path: Path) -> None:
    write_tiny_requests(tmp_path)
    config = LoaderConfig(global_batch_size=7, seed=3, window_groups=2)
    loader = StreamingLoader(tmp_path, seconds=200, config=config)
    seen: list[int] = []
    while batches := list(loader.epoch()):
        for batch in batches:
            assert batch.rows == batch.global_rows
            seen += batch.sample_ids.tolist()
            loader.mark_trained(batch)
    assert len(loader.windows) > 1
    assert sorted(seen) == list(range(141))


# ------------------------------------------------------------------------------------------------ cost

MODEL = CostModel(
    unit="flops",
    per_sample=3.0,
    per_impression=2.0,
    terms=(
        CostTerm(stream="views", coefficient=1.5, extra=1, targets=1),
        CostTerm(stream="views", coefficient=0.5, pairs=True, extra=1, targets=1),
        CostTerm(stream="buys", coefficient=0.25, pairs=True, window=3, extra=1, targets=1),
        CostTerm(stream="buys", coefficient=4.0, pairs=True, causal=False, repeated=True),
    ),
)


def test_the_load_of_a_request_is_that_of_the_reference() -> None:
    table = tiny_request_table(rows=12, seed=1)
    batch = batch_from_table(SCHEMA, table)
    assert batch.requests is not None
    lengths = {name: stream.offsets.diff().numpy() for name, stream in batch.streams.items()}
    came = row_costs(MODEL, lengths, batch.rows, batch.requests.diff().numpy())
    assert came.tolist() == [reference_load(SCHEMA, row, MODEL, None) for row in table.to_pylist()]


def test_costs_of_requests_travel_as_json_and_old_ones_read_as_before() -> None:
    assert cost_from_dict(cost_to_dict(MODEL), source="test") == MODEL
    plain = cost_to_dict(CostModel(unit="events", terms=(CostTerm(stream="views"),)))
    assert set(plain) == {"unit", "per_step", "per_sample", "terms"}
    assert set(plain["terms"][0]) == {"stream", "coefficient", "pairs", "causal", "window", "extra"}


def test_a_fit_finds_what_impressions_cost() -> None:
    rng = np.random.default_rng(0)
    observations = []
    for _ in range(40):
        rows = int(rng.integers(1, 9))
        lengths = {name: rng.integers(0, 30, rows) for name in ("views", "buys")}
        counts = rng.integers(1, 6, rows)
        value = 7.0 + float(row_costs(MODEL, lengths, rows, counts).sum())
        observations.append(Observation(lengths=lengths, rows=rows, value=value, impressions=counts))
    terms = [dataclasses.replace(term, coefficient=1.0) for term in MODEL.terms]
    found, _, held_out = fit_cost(terms, observations, unit="flops")
    assert held_out.worst < 1e-9
    assert found.per_impression == pytest.approx(2.0, rel=1e-6)
    assert [term.coefficient for term in found.terms] == pytest.approx([1.5, 0.5, 0.25, 4.0], rel=1e-6)


def test_batches_move_to_a_device_with_their_requests() -> None:
    moved = tiny_batch().to("meta")
    assert moved.requests is not None
    assert moved.requests.device == torch.device("meta")


# -------------------------------------------------------------------------------------- what cannot be converted
@pytest.mark.parametrize(
    ("column", "change", "said"),
    [
        ("stream.views.item", lambda old: [*old, 1], r"expected a list as long as stream\.views\.item|events"),
        ("id.item", lambda old: 10**6, "id"),
        ("label.click", lambda old: None, "null"),
    ],
)
@pytest.mark.parametrize("back", [False, True])
def test_a_bad_row_is_named_by_its_place_in_its_file(
    tmp_path: Path, column: str, change, said: str, back: bool
) -> None:
    """Row 37 of the data, row 7 of row group 3; rows of the group before it are pending then."""
    if back:
        write_dataset(tmp_path / "a", SCHEMA, {"train": tiny_request_table(rows=60, seed=2)}, rows_per_group=10)
        each = column != "stream.views.item"
    else:
        write_dataset(tmp_path / "a", tiny_schema(), {"train": tiny_table(rows=60, seed=2)}, rows_per_group=10)
        each = False

    def spoil(table: pa.Table) -> pa.Table:
        old = table.column(column)[37].as_py()
        new = [*old[:-1], change(old[-1])] if each else change(old)
        return set_value(table, 37, column, new)

    rewrite(tmp_path / "a" / "train-00000.parquet", spoil)
    place = r"train-00000\.parquet, row group 3, row 7( |,).*" + said
    settings = {} if back else {"impression": ["id.item"]}
    with pytest.raises(DataError, match=place) as caught:
        (expand_requests if back else group_requests)(tmp_path / "a", tmp_path / "b", **settings)
    assert (caught.value.file, caught.value.row_group, caught.value.row) == ("train-00000.parquet", 3, 7)
    assert not (tmp_path / "b").exists()


def test_files_that_differ_in_what_may_be_null_are_grouped(tmp_path: Path) -> None:
    """As loaders read them; and with offsets of both widths."""
    table = tiny_table(rows=40, seed=2)
    write_dataset(tmp_path / "a", tiny_schema(), {"train": table}, rows_per_file=20, rows_per_group=10)
    wanted = group_requests(tmp_path / "a", tmp_path / "b", impression=["id.item"])
    rewrite(tmp_path / "a" / "train-00001.parquet", lambda changed: changed)  # every column may be null now
    found = group_requests(tmp_path / "a", tmp_path / "c", impression=["id.item"])
    assert [file.rows for file in found.files] == [file.rows for file in wanted.files]
    tables = [pq.read_table(tmp_path / name / "train-00000.parquet") for name in ("b", "c")]
    assert tables[0].equals(tables[1])
    wide = table.cast(
        pa.schema([f.with_type(pa.large_list(pa.int64())) if pa.types.is_list(f.type) else f for f in table.schema])
    )
    schema = request_schema(tiny_schema(), ["id.item"])
    mixed = pa.concat_tables(list(to_requests(schema, [table.slice(0, 15), wide.slice(15)])))
    assert mixed.to_pylist() == pa.concat_tables(list(to_requests(schema, table))).to_pylist()


def test_of_several_tables_the_bad_one_is_named() -> None:
    table = tiny_table(rows=20, seed=2)
    bad = set_value(table.slice(10), 4, "label.click", None)
    with pytest.raises(DataError, match=r"table 1, row 4.*column label\.click"):
        list(to_requests(request_schema(tiny_schema(), ["id.item"]), [table.slice(0, 10), bad]))
