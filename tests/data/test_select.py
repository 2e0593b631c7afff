"""Only the columns that are used are read, and stochastic length: against the reference, across ranks and resumes."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from gem_data import blocks, shards
from gem_data.api import build_loader, read_schema, select
from gem_data.interface import Batch, DataError, LoaderConfig
from gem_data.lengths import drawn_limits, uniform_of_rows
from gem_data.testing import batch_difference, tiny_schema, write_tiny

FEW = ("id.user", "stream.views.item", "dense.hour")
SHORT = LoaderConfig(global_batch_size=16, seed=3, logical_shards=4, window_groups=3, prefetch=0, stochastic_length=1.4)


@pytest.fixture
def directory(tmp_path):
    write_tiny(tmp_path / "d")
    return tmp_path / "d"


def batches(directory, config: LoaderConfig, impl: str = "arrow", **ranks: int) -> list[Batch]:
    return list(build_loader(directory, split="train", config=config, impl=impl, **ranks).epoch())


def test_selected_columns_are_those_of_the_whole_batch(directory) -> None:
    config = LoaderConfig(global_batch_size=16, seed=1)
    few = dataclasses.replace(config, features=FEW, labels=("like",))
    for whole, part in zip(batches(directory, config), batches(directory, few), strict=True):
        assert part.ids.keys() == ["user", "views.item"]
        for key in part.ids.keys():  # noqa: SIM118
            assert torch.equal(part.ids[key].values(), whole.ids[key].values())
        assert torch.equal(part.labels, whole.labels[:, 1:])
        assert torch.equal(part.weights, whole.weights[:, 1:])
        assert torch.equal(part.dense, whole.dense[:, 1:])
        assert list(part.streams) == ["views"]
        assert torch.equal(part.streams["views"].times, whole.streams["views"].times)
    for fast, slow in zip(batches(directory, few), batches(directory, few, impl="reference"), strict=True):
        assert batch_difference(fast, slow) is None


def test_other_columns_are_neither_read_nor_decoded(directory, monkeypatch) -> None:
    """The bytes of the chosen columns and no others. Damage elsewhere does not matter; in them it does."""
    read = []

    class Watched(blocks.Block):
        def __init__(self, path, chunks, *, size_bytes):
            super().__init__(path, chunks, size_bytes=size_bytes)
            read.append((self.bytes_read, sum(chunk.stop - chunk.start for chunk in chunks), len(chunks)))

    monkeypatch.setattr(shards, "Block", Watched)
    few = LoaderConfig(global_batch_size=16, features=("id.item", "stream.buys"), labels=("click",), prefetch=0)
    batches(directory, few)
    assert all(bytes_read == wanted for bytes_read, wanted, _ in read)
    assert {columns for _, _, columns in read} == {3 + 1 + 1 + 3}
    path = directory / "train-00000.parquet"
    with blocks.parse_footer(blocks.read_footer(path)) as file:
        places = {chunk.column: chunk.start for chunk in blocks.chunks_of(file.metadata, 1)}
    sound = path.read_bytes()
    for column, stops in (("stream.views.genre", False), ("stream.buys.time", True)):
        spoilt = bytearray(sound)
        spoilt[places[column] + 30] ^= 4
        path.write_bytes(bytes(spoilt))
        if stops:
            with pytest.raises(DataError, match=r"row group 1, column stream\.buys\.time"):
                batches(directory, few)
        else:
            batches(directory, few)
            with pytest.raises(DataError, match=r"column stream\.views\.genre"):
                batches(directory, dataclasses.replace(few, features=(), labels=()))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"features": ("id.usr",)},
            r"features: expected names of id\.user, id\.item, .*stream\.buys\.item; came 'id\.usr'",
        ),
        ({"labels": ("clack",)}, r"labels: expected names of click, like; came 'clack'"),
        ({"features": ("stream.views.genre",)}, r"stream\.views\.genre without stream\.views\.item"),
        ({"features": ("id.item",), "open_ids": ("user",)}, r"open_ids: expected features of \['item'\]"),
    ],
)
def test_unknown_names_are_errors_that_name_the_choices(directory, settings, says) -> None:
    with pytest.raises(ValueError, match=says):
        build_loader(directory, split="train", config=LoaderConfig(global_batch_size=16, **settings))


def test_nothing_selected_is_the_schema(directory) -> None:
    schema = read_schema(directory)
    assert select(schema) is schema
    assert [t.name for t in select(schema, features=["ids.genres"]).tables] == ["genre"]


def test_a_state_of_other_columns_is_refused_and_an_older_one_loads(directory) -> None:
    config = LoaderConfig(global_batch_size=16)
    plain = build_loader(directory, split="train", config=config)
    state = json.loads(json.dumps(plain.state_dict()))
    few = build_loader(directory, split="train", config=dataclasses.replace(config, features=FEW))
    with pytest.raises(DataError, match=r"config\.features"):
        few.load_state_dict(state)
    few.load_state_dict(json.loads(json.dumps(few.state_dict())))
    for name in ("features", "labels", "stochastic_length"):
        del state["config"][name]
    plain.load_state_dict(state)


@pytest.mark.parametrize("base", [None, 2])
def test_stochastic_length_is_the_reference(directory, base) -> None:
    config = dataclasses.replace(SHORT, base_batch=base)
    for _ in range(2):
        pairs = zip(batches(directory, config), batches(directory, config, "reference"), strict=True)
        assert [batch_difference(fast, slow) for fast, slow in pairs] == [None] * 7


def test_kept_events_are_the_latest_and_some_long_rows_stay_whole(directory) -> None:
    """max_length 12 and 5, alpha 1.4: cut to 12^0.7 = 5 and 5^0.7 = 3."""
    whole = dict(rows_by_sample(batches(directory, dataclasses.replace(SHORT, stochastic_length=None))))
    kept = {"views": set(), "buys": set()}
    for sample, streams in rows_by_sample(batches(directory, SHORT)):
        for name in kept:
            before, after = whole[sample][name], streams[name]
            assert after == before[len(before) - len(after) :]
            kept[name].add((len(before), len(after)))
    for name, short in (("views", 5), ("buys", 3)):
        assert {after for before, after in kept[name] if before <= short} == set(range(short + 1))
        longer = {(before, after) for before, after in kept[name] if before > short}
        assert {after in (short, before) for before, after in longer} == {True}
        assert {after == before for before, after in longer} == {True, False}


def rows_by_sample(found: list[Batch]) -> list[tuple[int, dict[str, list[tuple[int, ...]]]]]:
    """Sample -> stream -> one tuple of all parallel lists an event."""
    rows = []
    for batch in found:
        for row, sample in enumerate(batch.sample_ids.tolist()):
            streams = {}
            for name, stream in batch.streams.items():
                start, stop = stream.offsets[row : row + 2].tolist()
                lists = [stream.actions, stream.times]
                lists += [batch.ids[key].values() for key in batch.ids.keys() if key.startswith(f"{name}.")]  # noqa: SIM118
                streams[name] = list(zip(*(column[start:stop].tolist() for column in lists), strict=True))
            rows.append((sample, streams))
    return rows


def test_lengths_do_not_depend_on_ranks_batches_or_where_a_run_resumed(directory) -> None:
    wanted = dict(rows_by_sample(batches(directory, SHORT)))
    for world in (2, 4):
        parts = [batches(directory, SHORT, rank=rank, world_size=world) for rank in range(world)]
        assert dict(rows_by_sample([batch for part in parts for batch in part])) == wanted
    other = dataclasses.replace(SHORT, global_batch_size=20, logical_shards=1, shuffle=False)
    assert dict(rows_by_sample(batches(directory, other))) == wanted
    loader = build_loader(directory, split="train", config=SHORT)
    both = list(loader.epoch()) + list(loader.epoch())
    assert dict(rows_by_sample(both[7:])) != wanted  # drawn anew
    for batch in both[:9]:
        loader.mark_trained(batch)
    again = build_loader(directory, split="train", config=SHORT)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [batch_difference(a, b) for a, b in zip(again.epoch(), both[9:], strict=True)] == [None] * 5


def test_the_share_of_whole_rows_is_the_stated_one() -> None:
    """N = 100, alpha = 1.5: rows of 100 stay whole with probability 0.1, and rows of 50 with 0.4."""
    from gem_data.rows import Events

    count = 20_000
    schema = dataclasses.replace(
        tiny_schema(), streams=(dataclasses.replace(tiny_schema().streams[1], max_length=100),)
    )
    origin = np.stack([np.zeros(count, np.int64), np.arange(count) % 7, np.arange(count)], axis=1)
    config = LoaderConfig(global_batch_size=1, stochastic_length=1.5)
    for length, share in ((100, 0.1), (50, 0.4), (31, 1.0), (250, 0.1)):
        events = Events(columns=(), offsets=np.arange(count + 1) * length)
        rows = type("R", (), {"streams": (events,), "origin": origin})()
        (limits,) = drawn_limits(schema, rows, config, 0)
        assert set(limits) <= {31, 100}
        # Four standard deviations of a share of 20,000 draws.
        assert abs((limits == 100).mean() - share) <= 4 * (share * (1 - share) / count) ** 0.5
    uniform = uniform_of_rows(origin, 0, 0, "buys")
    assert abs(uniform.mean() - 0.5) < 4 / (12 * count) ** 0.5


@pytest.mark.parametrize("alpha", [0.5, 2.5, float("nan"), True, "1"])
def test_alpha_is_a_number_from_one_to_two(directory, alpha) -> None:
    with pytest.raises(ValueError, match="stochastic_length: expected a number from 1 to 2"):
        build_loader(directory, split="train", config=dataclasses.replace(SHORT, stochastic_length=alpha))
