"""The reading thread: order, exceptions, and that it ends whenever its consumer does."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gem_data.api import build_loader
from gem_data.interface import DataError, LoaderConfig
from gem_data.prefetch import Prefetch
from gem_data.testing import damage, write_tiny


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("p", "gem_data.loader")]


def no_thread_soon() -> None:
    """Dropping an iterator stops its thread, and does not wait for it."""
    deadline = time.monotonic() + 5
    while threads():
        assert time.monotonic() < deadline, threads()
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [1, 2, 10])
def test_items_come_in_order_and_the_thread_ends(depth: int) -> None:
    assert list(Prefetch(iter(range(50)), depth=depth, name="p")) == list(range(50))
    assert threads() == []


@pytest.mark.parametrize("depth", [1, 3])
def test_an_error_comes_after_the_items_before_it(depth: int) -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise DataError("row 3 is bad", row=3)

    items = Prefetch(source(), depth=depth, name="p")
    assert (next(items), next(items)) == (1, 2)
    with pytest.raises(DataError, match="row 3 is bad") as caught:
        next(items)
    assert caught.value.row == 3
    assert caught.traceback[-1].name == "source"
    assert threads() == []


def test_it_stays_depth_items_ahead_and_no_more() -> None:
    made = []

    def source() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    items = Prefetch(source(), depth=3, name="p")
    assert next(items) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    # One taken, three waiting, one in the thread's hand.
    assert made == [0, 1, 2, 3, 4]
    items.close()
    assert threads() == []


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_closing_ends_a_thread_that_waits_for_room(taken: int) -> None:
    items = Prefetch(iter(range(1000)), depth=1, name="p")
    for _ in range(taken):
        next(items)
    items.close()
    items.close()
    assert threads() == []
    assert list(items) == []


def test_dropping_the_iterator_ends_the_thread() -> None:
    items = Prefetch(iter(range(1000)), depth=2, name="p")
    next(items)
    assert threads() == ["p"]
    del items
    gc.collect()
    no_thread_soon()


def test_it_may_be_collected_in_its_own_thread() -> None:
    """What is dropped in a cycle is collected wherever the interpreter next allocates."""
    dropped, seen = threading.Event(), []

    def source() -> Iterator[int]:
        yield 0
        yield 1
        assert dropped.wait(10)
        gc.collect()
        seen.append(kept[0]() is None)
        yield 2

    items = Prefetch(source(), depth=1, name="p")
    kept = [weakref.ref(items)]
    assert next(items) == 0
    cycle: list[Any] = [items]
    cycle.append(cycle)
    gc.disable()
    try:
        del items, cycle
        dropped.set()
        no_thread_soon()
    finally:
        gc.enable()
    assert seen == [True]


def test_breaking_out_of_an_epoch_ends_the_thread(tmp_path: Path) -> None:
    write_tiny(tmp_path / "d")
    loader = build_loader(tmp_path / "d", split="train", config=LoaderConfig(global_batch_size=4))
    for _ in loader.epoch():
        assert threads() == ["gem_data.loader"]
        break
    no_thread_soon()
    iterator = loader.epoch()
    next(iterator)
    loader.close()
    assert threads() == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_bad_row_group_raises_before_its_batch_and_never_looks_like_an_end(tmp_path: Path, prefetch: int) -> None:
    write_tiny(tmp_path / "d")
    damage(tmp_path / "d", "label 7")
    config = LoaderConfig(global_batch_size=9, shuffle=False, prefetch=prefetch)
    loader = build_loader(tmp_path / "d", split="train", config=config)
    batches = loader.epoch()
    assert [next(batches).step for _ in range(2)] == [0, 1]
    with pytest.raises(DataError, match=r"came 7\.0"):
        next(batches)
    with pytest.raises(ValueError, match="reading failed"):
        next(batches)
    # The position is after the last good batch, so another try meets the same row.
    with pytest.raises(DataError, match=r"came 7\.0"):
        next(loader.epoch())
    assert threads() == []
