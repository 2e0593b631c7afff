"""Row groups decoded ahead by threads: the same batches, states, errors and notes of damage as in line, to the bit."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gem_data import loader as loader_module
from gem_data.api import build_loader
from gem_data.interface import DataError, LoaderConfig
from gem_data.shards import Shards
from gem_data.streaming import StreamingLoader
from gem_data.testing import batch_difference, damage, write_tiny, write_tiny_requests


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("gem_data"))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited 10 s in vain"
        time.sleep(0.001)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sound rows, the same in row groups of 10, rows of which groups are bad or damaged, and requests."""
    parent = tmp_path_factory.mktemp("data")
    write_tiny(parent / "sound")
    write_tiny(parent / "even", rows_per_group=10)
    write_tiny_requests(parent / "requests")
    write_tiny(parent / "bad")
    # Row group 2 of the first file has a bad value; a group of another file, changed bytes.
    damage(parent / "bad", "label 7")
    path = parent / "bad" / "train-00001.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)
    return {name: parent / name for name in ("sound", "even", "requests", "bad")}


def settings_of(rng: random.Random, seed: int, world: int) -> dict[str, Any]:
    shards = rng.choice([1, 2, 4])
    settings: dict[str, Any] = {
        "global_batch_size": rng.choice([4, 8, 20, 36]),
        "seed": seed,
        "shuffle": rng.random() < 0.75,
        "window_groups": rng.choice([1, 2, 5]),
        "logical_shards": shards,
        "drop_last": rng.random() < 0.3,
        "stochastic_length": rng.choice([None, 1.3]),
    }
    if shards % world == 0 and settings["global_batch_size"] >= 4 * shards and rng.random() < 0.7:
        settings |= {"base_batch": settings["global_batch_size"] // shards // 2, "base_pool": 4}
    return settings


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["sound", "bad", "requests"])
def test_readers_change_nothing_that_comes_out(data: dict[str, Path], name: str, seed: int) -> None:
    """Two epochs at random settings, killed at random places and resumed with other readers: equal to the bit."""
    rng = random.Random(f"{name} {seed}")
    world = rng.choice([1, 2, 3])
    settings, rank = settings_of(rng, seed, world), rng.randrange(world)

    def build(**reading: int) -> Any:
        config = LoaderConfig(**settings, **reading)
        ranks = {"rank": rank, "world_size": world}
        return build_loader(data[name], split="train", config=config, **ranks, on_damage=lambda *_: None)

    straight = build(readers=0, prefetch=0)
    wanted, states = [], [straight.state_dict()]
    for batch in (batch for _ in range(2) for batch in straight.epoch()):
        straight.mark_trained(batch)
        wanted.append(batch)
        states.append(straight.state_dict())
    came: list[Any] = []
    while len(came) < len(wanted):
        loader = build(readers=rng.choice([1, 2, 3]), prefetch=rng.choice([1, 2, 5]))
        loader.load_state_dict(json.loads(json.dumps(states[len(came)])))
        left = rng.randint(0, 9)
        for batch in loader.epoch():
            if not left:
                break
            left -= 1
            loader.mark_trained(batch)
            came.append(batch)
        assert loader.state_dict() == states[len(came)]
        loader.close()
        assert threads() == []
    assert [batch_difference(a, b) for a, b in zip(came, wanted, strict=True)] == [None] * len(wanted)


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_heard_of_in_the_order_of_the_plan(
    data: dict[str, Path], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where threads come to damaged groups in another order."""
    rng, read = random.Random(seed), Shards.read
    settings = settings_of(rng, seed, 1)

    def notes(readers: int, prefetch: int) -> tuple[list[tuple[str | None, int | None, int, str]], list[str]]:
        found, where = [], []

        def hear(error: DataError, rows: int) -> None:
            found.append((error.file, error.row_group, rows, str(error)))
            where.append(threading.current_thread().name)

        config = LoaderConfig(**settings, readers=readers, prefetch=prefetch)
        loader = build_loader(data["bad"], split="train", config=config, on_damage=hear)
        assert sum(len(list(loader.epoch())) for _ in range(2)) == 2 * loader.batches_per_epoch
        return found, where

    wanted, _ = notes(0, 0)
    assert len(set(wanted)) >= 2
    monkeypatch.setattr(Shards, "read", lambda *place: (time.sleep(rng.random() / 500), read(*place))[1])
    for readers in (0, 1, 4):
        found, where = notes(readers, 1)
        assert found == wanted
        assert set(where) == {"gem_data.loader"}


@pytest.mark.parametrize("readers", [0, 1, 4])
def test_an_error_comes_at_the_batch_that_it_belongs_to(data: dict[str, Path], readers: int) -> None:
    config = LoaderConfig(global_batch_size=9, shuffle=False, readers=readers, prefetch=1)
    loader = build_loader(data["bad"], split="train", config=config)
    batches = loader.epoch()
    assert [next(batches).step for _ in range(2)] == [0, 1]
    with pytest.raises(DataError, match=r"train-00000\.parquet, row group 2, .*came 7\.0") as caught:
        next(batches)
    assert (caught.value.file, caught.value.row_group, caught.value.row) == ("train-00000.parquet", 2, 4)
    assert threads() == []
    with pytest.raises(ValueError, match="reading failed"):
        next(batches)


def test_any_exception_of_a_reader_reaches_the_consumer(data: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Shards, file: int, group: int) -> Any:
        raise MemoryError(f"group {group}")

    monkeypatch.setattr(Shards, "read", fail)
    loader = build_loader(data["sound"], split="train", config=LoaderConfig(global_batch_size=9, shuffle=False))
    with pytest.raises(MemoryError, match="group 0"):
        next(loader.epoch())
    assert threads() == []


def close(loader: Any, iterator: Any) -> None:
    loader.close()


def load(loader: Any, iterator: Any) -> None:
    loader.load_state_dict(loader.state_dict())


def again(loader: Any, iterator: Any) -> None:
    loader.epoch()  # dropped at once: told to end, too
    loader.close()


def to_the_end(loader: Any, iterator: Any) -> None:
    list(iterator)


@pytest.mark.parametrize("end", [close, load, again, to_the_end], ids=lambda end: end.__name__)
@pytest.mark.parametrize("taken", [0, 1, 4])
@pytest.mark.parametrize("readers", [1, 3])
def test_readers_end_with_their_iterator(data: dict[str, Path], end: Any, taken: int, readers: int) -> None:
    config = LoaderConfig(global_batch_size=5, window_groups=2, readers=readers, prefetch=1)
    loader = build_loader(data["sound"], split="train", config=config)
    iterator = loader.epoch()
    for _ in range(taken):
        next(iterator)
    if taken:
        assert "gem_data.reader_0" in threads()
    end(loader, iterator)
    assert threads() == []


def test_readers_end_where_a_loop_is_left_or_the_loader_dropped(data: dict[str, Path]) -> None:
    loader = build_loader(data["sound"], split="train", config=LoaderConfig(global_batch_size=5, readers=2))
    for _ in loader.epoch():
        assert len(threads()) == 3
        break
    wait_for(lambda: threads() == [])
    iterator = loader.epoch()
    next(iterator)
    del loader, iterator
    gc.collect()
    wait_for(lambda: threads() == [])


@pytest.mark.parametrize("where", ["gem_data.loader", "gem_data.reader_0"])
def test_an_iterator_in_a_cycle_may_be_collected_in_its_own_threads(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As where a consumer keeps an error with its traceback. Whoever allocates next collects it."""
    dropped, done, calls = threading.Event(), [], Counter[str]()
    read, take = Shards.read, loader_module.take_batch

    def collect(free: int) -> None:
        """Behind what the first batch needs."""
        name = threading.current_thread().name
        calls[name] += 1
        if name == where and calls[name] > free and not done and dropped.wait(10):
            done.append(gc.collect())

    monkeypatch.setattr(Shards, "read", lambda *place: (collect(2), read(*place))[1])
    monkeypatch.setattr(loader_module, "take_batch", lambda *given, **named: (collect(1), take(*given, **named))[1])
    config = LoaderConfig(global_batch_size=5, window_groups=2, prefetch=1)
    loader = build_loader(data["even"], split="train", config=config)
    cycle: list[Any] = [loader.epoch()]
    cycle.append(cycle)
    gc.disable()
    try:
        next(cycle[0])
        del cycle
        dropped.set()
        wait_for(lambda: bool(done))
        wait_for(lambda: threads() == [])
    finally:
        gc.enable()
    assert next(loader.epoch()).step == 1


@pytest.mark.parametrize("reading", [{"prefetch": 0}, {"prefetch": 1}])
def test_a_window_is_let_go_before_the_next_one_is_joined(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch, reading: dict[str, int]
) -> None:
    join, made, held = loader_module.join, [], []

    def watched(*given: Any) -> Any:
        held.append(sum(window() is not None for window in made))
        window = join(*given)
        made.append(weakref.ref(window))
        return window

    monkeypatch.setattr(loader_module, "join", watched)
    config = LoaderConfig(global_batch_size=10, window_groups=2, **reading)  # two batches a window
    loader = build_loader(data["even"], split="train", config=config)
    assert sum(len(batch.sample_ids) for batch in loader.epoch()) == 100
    assert held == [0] * 5


def test_on_damage_may_close_the_loader(data: dict[str, Path]) -> None:
    """It is called in the thread that reads, which cannot wait for itself."""
    config = LoaderConfig(global_batch_size=9, shuffle=False, prefetch=1)
    loader = build_loader(data["bad"], split="train", config=config, on_damage=lambda *_: loader.close())
    iterator = loader.epoch()
    with pytest.raises(ValueError, match="has ended: this loader was closed"):
        list(iterator)
    wait_for(lambda: threads() == [])


def test_readers_end_at_the_edge_of_a_streams_window(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d", train_rows=60, eval_rows=0, rows_per_group=10)
    config = LoaderConfig(global_batch_size=10, readers=2)
    loader = StreamingLoader(tmp_path / "d", seconds=200, config=config)
    seen = []
    while batches := list(loader.epoch()):
        assert threads() == []
        seen.append(sum(len(batch.sample_ids) for batch in batches))
        loader.mark_trained(batches[-1])
    assert sum(seen) == 60
    assert len(seen) > 1


class Gate:
    """Stands in for Shards.read: says which groups were begun, how many at once, and holds those behind the first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: int) -> None:
        self.begun: list[tuple[int, int]] = []
        self.inside = self.most = 0
        self._lock, self._room, read = threading.Lock(), threading.Semaphore(free), Shards.read

        def gated(shards: Shards, file: int, group: int) -> Any:
            with self._lock:
                self.begun.append((file, group))
                self.inside += 1
                self.most = max(self.most, self.inside)
            assert self._room.acquire(timeout=10)
            try:
                return read(shards, file, group)
            finally:
                with self._lock:
                    self.inside -= 1

        monkeypatch.setattr(Shards, "read", gated)

    def open(self) -> None:
        self._room.release(1000)


def test_the_next_window_is_decoded_while_the_present_one_is_used_and_no_further_one(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 2 groups of 10. Nobody asks for more than the first batch, and 4 groups are decoded."""
    gate = Gate(monkeypatch, free=1000)
    config = LoaderConfig(global_batch_size=4, window_groups=2, prefetch=1)
    loader = build_loader(data["even"], split="train", config=config)
    iterator = loader.epoch()
    next(iterator)
    wait_for(lambda: len(gate.begun) >= 4)
    time.sleep(0.05)
    assert len(gate.begun) == 4
    assert gate.most == 1
    # 20 rows a window: batches 0 to 4 are of the first. With the 6th, of the second window, the third is begun.
    for _ in range(5):
        next(iterator)
    wait_for(lambda: len(gate.begun) >= 6)
    time.sleep(0.05)
    assert len(gate.begun) == 6
    list(iterator)
    assert Counter(gate.begun) == Counter(set(gate.begun))
    assert len(gate.begun) == 10


def test_batches_of_a_window_do_not_wait_for_the_next_one(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, free=2)
    config = LoaderConfig(global_batch_size=4, window_groups=2, prefetch=1)
    loader = build_loader(data["even"], split="train", config=config)
    iterator = loader.epoch()
    assert [next(iterator).step for _ in range(5)] == list(range(5))
    wait_for(lambda: gate.inside == 1)  # the third group, in a thread of its own
    assert len(gate.begun) == 3
    gate.open()
    assert next(iterator).step == 5
    loader.close()


@pytest.mark.parametrize("shuffle", [True, False])
def test_several_groups_are_decoded_at_once(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    """Also in file order, whose windows are single groups: as many windows are ahead as there are readers."""
    gate = Gate(monkeypatch, free=0)
    config = LoaderConfig(global_batch_size=3, window_groups=4, shuffle=shuffle, readers=3, prefetch=1)
    loader = build_loader(data["sound"], split="train", config=config)
    iterator = loader.epoch()
    wait_for(lambda: gate.inside == 3)
    gate.open()
    assert sum(len(batch.sample_ids) for batch in iterator) == 100
    assert gate.most == 3
    assert Counter(gate.begun) == Counter(set(gate.begun))


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_never_due_is_not_read(data: dict[str, Path], monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """With drop_last the last group of file order has no row in a batch; a rank reads its own shards' groups only."""
    gate = Gate(monkeypatch, free=1000)
    settings: dict[str, Any] = {"global_batch_size": 90, "shuffle": False, "drop_last": True}
    if world == 2:
        settings = {"global_batch_size": 24, "logical_shards": 2, "drop_last": True}
    begun = []
    for readers in (0, 3):
        gate.begun.clear()
        config = LoaderConfig(**settings, readers=readers)
        loader = build_loader(data["sound"], split="train", config=config, rank=world - 1, world_size=world)
        assert list(loader.epoch())
        begun.append(sorted(gate.begun))
    assert begun[0] == begun[1]
    assert len(begun[0]) < 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"readers": -1}, "readers: expected a whole number >= 0, came -1"),
        ({"readers": True}, "readers: expected a whole number >= 0, came True"),
        ({"readers": 2, "prefetch": 0}, "readers: expected 0 or 1 with prefetch 0, .* came 2. Set prefetch"),
    ],
)
def test_settings_are_checked(data: dict[str, Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_loader(data["sound"], split="train", config=LoaderConfig(global_batch_size=4, **changes))


def test_with_prefetch_0_no_thread_is_started(data: dict[str, Path]) -> None:
    loader = build_loader(data["sound"], split="train", config=LoaderConfig(global_batch_size=4, prefetch=0))
    for _ in loader.epoch():
        assert threads() == []


def printed_by(program: str) -> str:
    """What a program of its own prints, which must end in time and without a traceback, of threads neither."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_closing_decodes_nothing_more(data: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the other groups of the batch in hand, which may be a window of every shard."""
    gate = Gate(monkeypatch, free=0)
    config = LoaderConfig(global_batch_size=10, window_groups=5, logical_shards=2, prefetch=1)
    loader = build_loader(data["even"], split="train", config=config)
    iterator = loader.epoch()
    wait_for(lambda: gate.inside == 1)
    threading.Timer(0.05, gate.open).start()
    loader.close()
    assert threads() == []
    assert len(gate.begun) == 1
    with pytest.raises(ValueError, match="this loader was closed"):
        next(iterator)


def test_a_program_that_ends_in_mid_epoch_finishes_the_group_in_hand_alone(data: dict[str, Path]) -> None:
    program = (
        "import atexit, threading\n"
        "begun, ended, leave = [], [], threading.Event()\n"
        "atexit.register(lambda: print(len(begun), len(ended)))\n"  # called last
        "import gem_data.loader as module\n"
        "from gem_data.api import build_loader\n"
        "from gem_data.interface import LoaderConfig\n"
        "decode = module._decode\n"
        "def slow(shards, group):\n"
        "    begun.append(group)\n"
        "    if len(begun) > 3:\n"
        "        leave.set(); threading.Event().wait(0.2)\n"
        "    rows = decode(shards, group); ended.append(group); return rows\n"
        "module._decode = slow\n"
        f"loader = build_loader({str(data['even'])!r}, split='train', "
        "config=LoaderConfig(global_batch_size=10, window_groups=3, prefetch=1))\n"
        "iterator = loader.epoch(); next(iterator); leave.wait(10)\n"
    )
    assert printed_by(program) == "4 4\n"


@pytest.mark.slow
def test_a_program_that_ends_in_mid_epoch_ends(data: dict[str, Path]) -> None:
    program = (
        "from gem_data.api import build_loader\n"
        "from gem_data.interface import LoaderConfig\n"
        f"loader = build_loader({str(data['sound'])!r}, split='train', "
        "config=LoaderConfig(global_batch_size=3, readers=2))\n"
        "iterator = loader.epoch(); print(next(iterator).step)\n"
    )
    assert printed_by(program) == "0\n"
