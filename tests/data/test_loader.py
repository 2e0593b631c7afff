"""What the arrow loader promises beyond the conformance suite: decoding once, messages, random schedules."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gem_data.api import build_loader, verify_dataset, write_dataset
from gem_data.damage import rewrite, set_value
from gem_data.interface import DataError, LoaderConfig
from gem_data.shards import Shards
from gem_data.testing import DAMAGES, batch_difference, damage, tiny_schema, tiny_table, write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "tiny"
    write_tiny(directory)
    return directory


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How often each row group is decoded."""
    counted: Counter[tuple[int, int]] = Counter()
    read = Shards.read

    def counting(self: Shards, file: int, group: int) -> Any:
        counted[file, group] += 1
        return read(self, file, group)

    monkeypatch.setattr(Shards, "read", counting)
    return counted


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_row_group_is_decoded_once_an_epoch(tiny: Path, reads: Counter[tuple[int, int]], shuffle: bool) -> None:
    config = LoaderConfig(global_batch_size=7, logical_shards=4, window_groups=2, shuffle=shuffle)
    list(build_loader(tiny, split="train", config=config).epoch())
    assert len(reads) == 12
    assert set(reads.values()) == {1}


def test_ranks_decode_only_their_shards(tmp_path: Path, reads: Counter[tuple[int, int]]) -> None:
    write_tiny(tmp_path / "d", train_rows=144, eval_rows=0, rows_per_file=1000)
    config = LoaderConfig(global_batch_size=16, logical_shards=4, window_groups=2)
    for rank in range(4):
        loader = build_loader(tmp_path / "d", split="train", config=config, rank=rank, world_size=4)
        assert sum(len(batch.sample_ids) for batch in loader.epoch()) == 36
    assert len(reads) == 16
    assert set(reads.values()) == {1}


def test_resuming_decodes_only_what_is_still_to_be_read(tiny: Path, reads: Counter[tuple[int, int]]) -> None:
    config = LoaderConfig(global_batch_size=10, shuffle=False, prefetch=0)
    loader = build_loader(tiny, split="train", config=config)
    for batch in loader.epoch():
        loader.mark_trained(batch)
        if batch.step == 8:
            break
    state = loader.state_dict()
    assert state["shards"] == [{"rows_read": 90, "file": "train-00002.parquet", "row_group": 0, "row": 0}]
    reads.clear()
    resumed = build_loader(tiny, split="train", config=config)
    resumed.load_state_dict(state)
    assert [batch.step for batch in resumed.epoch()] == [9]
    assert dict(reads) == {(2, 0): 1, (2, 1): 1}


@pytest.mark.parametrize("seed", range(8))
def test_random_schedules_train_every_row_once(tiny: Path, seed: int) -> None:
    """Kills at random places, twice or more an epoch, at changing world sizes and prefetch depths, over two epochs.

    What a killed run read ahead or yielded without training must come again, and nothing else.
    """
    rng = random.Random(seed)
    settings = {
        "global_batch_size": rng.choice([3, 7, 16, 33]),
        "seed": seed,
        "shuffle": rng.random() < 0.8,
        "window_groups": rng.choice([1, 2, 5]),
        "logical_shards": rng.choice([1, 2, 3, 8]),
    }
    straight = build_loader(tiny, split="train", config=LoaderConfig(**settings))
    wanted = [batch.sample_ids.tolist() for _ in range(2) for batch in straight.epoch()]
    state, step, came = None, 0, []
    while step < len(wanted):
        world = rng.choice([1, 2, 3, 4])
        config = LoaderConfig(**settings, prefetch=rng.choice([0, 1, 3]))
        per_epoch = straight.batches_per_epoch
        count = min(rng.randint(0, per_epoch // 2), per_epoch - step % per_epoch)
        ahead = rng.randint(0, 2)
        ranks, states = [], []
        for rank in range(world):
            loader = build_loader(tiny, split="train", config=config, rank=rank, world_size=world)
            if state is not None:
                loader.load_state_dict(state)
            batches = [batch for batch, _ in zip(loader.epoch(), range(count + ahead), strict=False)]
            for batch in batches[:count]:
                loader.mark_trained(batch)
            ranks.append([batch.sample_ids.tolist() for batch in batches[:count]])
            states.append(loader.state_dict())
        assert all(other == states[0] for other in states)
        came += [[row for part in parts for row in part] for parts in zip(*ranks, strict=True)]
        state, step = states[0], step + count
    assert came == wanted
    assert Counter(row for batch in came for row in batch) == Counter(dict.fromkeys(range(100), 2))


@pytest.mark.parametrize("entry", DAMAGES, ids=lambda entry: entry.kind)
def test_messages_say_place_expectation_and_next_step(tmp_path: Path, entry: Any) -> None:
    write_tiny(tmp_path / "d")
    damage(tmp_path / "d", entry.kind)

    def read() -> None:
        list(build_loader(tmp_path / "d", split="train", config=LoaderConfig(global_batch_size=9)).epoch())

    with pytest.raises(DataError) as caught:
        read()
    message = str(caught.value)
    assert entry.says in message
    assert entry.file in message
    for part in (f"row group {entry.row_group}", f"row {entry.row} (sample_id", f"column {entry.column}"):
        assert part in message or "None" in part
    if entry.file != "schema.json":
        assert "expected " in message
        assert ", came " in message
        assert message.endswith(".")


def test_one_message_in_full(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d")
    damage(tmp_path / "d", "id outside its table")
    with pytest.raises(DataError) as caught:
        list(build_loader(tmp_path / "d", split="train", config=LoaderConfig(global_batch_size=9)).epoch())
    assert str(caught.value) == (
        "train-00000.parquet, row group 2, row 4 (sample_id 22), column id.item: expected an id with 0 <= id < 50 "
        "(table item), came id 50. Fix the rows where they are written; `gemline data verify` lists every such place."
    )


def test_a_file_changed_while_reading_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d")
    config = LoaderConfig(global_batch_size=9, shuffle=False, prefetch=0)
    loader = build_loader(tmp_path / "d", split="train", config=config)
    batches = loader.epoch()
    next(batches)
    rewrite(tmp_path / "d" / "train-00000.parquet", lambda table: set_value(table, 20, "id.item", 3))
    with pytest.raises(DataError, match=r"train-00000.parquet, row group 1: expected \d+ bytes as at start, came"):
        next(batches)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size: expected a whole number >= 1, came 0"),
        ({"global_batch_size": 2.0}, "global_batch_size: expected a whole number >= 1, came 2.0"),
        ({"seed": -1}, "seed: expected a whole number >= 0, came -1"),
        ({"seed": 2**63}, r"seed: expected less than 2\*\*63"),
        ({"window_groups": 0}, "window_groups"),
        ({"logical_shards": 0}, "logical_shards"),
        ({"prefetch": -1}, "prefetch"),
        ({"max_length": -1}, "max_length"),
        ({"rank": 2, "world_size": 2}, "rank: expected less than world_size = 2, came 2"),
        ({"world_size": 0}, "world_size"),
        ({"impl": "fast"}, r"impl: expected one of \['arrow', 'reference'\], came 'fast'"),
    ],
)
def test_settings_are_checked(tiny: Path, changes: dict[str, Any], message: str) -> None:
    outside = {key: changes.pop(key) for key in ("rank", "world_size", "impl") if key in changes}
    config = LoaderConfig(**{"global_batch_size": 4, **changes})
    with pytest.raises(ValueError, match=message):
        build_loader(tiny, split="train", config=config, **outside)


def test_a_refused_state_names_the_difference(tiny: Path) -> None:
    def loader(**changes: Any) -> Any:
        return build_loader(tiny, split="train", config=LoaderConfig(**{"global_batch_size": 9, **changes}))

    state = loader().state_dict()
    with pytest.raises(DataError, match=r"config\.seed: the state has 0, this loader 3\. Resume with"):
        loader(seed=3).load_state_dict(state)
    state["files"][1]["rows"] = 44
    with pytest.raises(DataError, match=r"files\[1\]: the state has .*44.*The data changed since"):
        loader().load_state_dict(state)
    state = loader().state_dict()
    state["shards"][0]["rows_raed"] = state["shards"][0].pop("rows_read")
    with pytest.raises(DataError, match=r'shards\[0\]: expected an object with "rows_read"'):
        loader().load_state_dict(state)


def write_changed(tmp_path: Path) -> tuple[Path, Path]:
    """Two data sets whose files have equal paths, sizes and rows; one value in train-00001.parquet differs."""
    table = tiny_table(rows=80, seed=0)
    directories = tmp_path / "a", tmp_path / "b"
    for directory, rows in zip(directories, (table, set_value(table, 41, "dense.hour", 0.5)), strict=True):
        write_dataset(directory, tiny_schema(), {"train": rows}, rows_per_file=40, rows_per_group=10)
    content = [[path.read_bytes() for path in sorted(d.glob("*.parquet"))] for d in directories]
    assert [len(file) for file in content[0]] == [len(file) for file in content[1]]
    assert [a == b for a, b in zip(*content, strict=True)] == [True, False]
    return directories


def test_changed_data_of_equal_paths_sizes_and_rows_is_refused(tmp_path: Path) -> None:
    first, second = write_changed(tmp_path)
    config = LoaderConfig(global_batch_size=9)
    loader = build_loader(first, split="train", config=config)
    loader.mark_trained(next(loader.epoch()))
    other = build_loader(second, split="train", config=config)
    before = other.state_dict()
    with pytest.raises(DataError, match=r"train-00001\.parquet.*xxh3.*The data changed since") as caught:
        other.load_state_dict(loader.state_dict())
    assert caught.value.file == "train-00001.parquet"
    assert other.state_dict() == before


def forget_hashes(directory: Path) -> None:
    """schema.json as version 1.0 wrote it."""
    content = json.loads((directory / "schema.json").read_text())
    content["interface_version"] = [1, 0]
    for file in content["files"]:
        file.pop("xxh3")
    (directory / "schema.json").write_text(json.dumps(content))


def test_a_state_from_before_there_were_hashes_loads_where_the_data_have_none_either(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d")
    write_tiny(tmp_path / "old")
    forget_hashes(tmp_path / "old")
    config = LoaderConfig(global_batch_size=9)
    old, new = (build_loader(tmp_path / name, split="train", config=config) for name in ("old", "d"))
    old.mark_trained(next(old.epoch()))
    state = json.loads(json.dumps(old.state_dict()))
    for file in state["files"]:
        del file["xxh3"]
    build_loader(tmp_path / "old", split="train", config=config).load_state_dict(state)
    with pytest.raises(DataError, match=r"train-00000\.parquet.*the state has no xxh3"):
        new.load_state_dict(state)


def test_batches_move_to_a_device(tiny: Path) -> None:
    batch = next(build_loader(tiny, split="train", config=LoaderConfig(global_batch_size=9)).epoch())
    assert batch_difference(batch, batch.to("cpu")) is None
    moved = batch.to("meta")
    tensors = [moved.labels, moved.row_index, moved.ids.values(), moved.streams["views"].times]
    assert {str(tensor.device) for tensor in tensors} == {"meta"}


def test_flipped_bits_never_change_a_batch_unnoticed(tmp_path: Path) -> None:
    """120 single-bit flips anywhere in a file: a DataError that names the file, or exactly the batch as it was."""
    write_tiny(tmp_path / "d", train_rows=20, eval_rows=0, rows_per_group=20)
    path = tmp_path / "d" / "train-00000.parquet"
    content = path.read_bytes()
    config = LoaderConfig(global_batch_size=20, shuffle=False, prefetch=0)

    def read() -> Any:
        return next(build_loader(tmp_path / "d", split="train", config=config).epoch())

    good, rng = read(), random.Random(3)
    refused: list[str] = []
    for _ in range(120):
        flipped = bytearray(content)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        try:
            batch = read()
        except DataError as error:
            refused.append(str(error))
        else:
            assert batch_difference(good, batch) is None
    assert len(refused) > 30
    assert all("train-00000.parquet" in message for message in refused)
    path.write_bytes(content)
    assert verify_dataset(tmp_path / "d").ok
