"""Processes of one start meet, whatever earlier starts left in the store."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from gem_pipelines.errors import RunError
from gem_pipelines.meeting import meet


def start(store, world_size, *, delay):
    """One start: what each rank finds in the store under its prefix as the address of rank 0."""
    found = {}

    def one(rank):
        time.sleep(delay(rank))
        mine = meet(store, rank=rank, world_size=world_size, timeout=timedelta(seconds=20))
        if rank == 0:
            time.sleep(0.05)  # its peers ask before it has written
            mine.set("address", f"rank 0 of the start of {id(found)}")
        found[rank] = mine.get("address").decode()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, f"rank 0 of the start of {id(found)}"


@pytest.mark.parametrize("delay", [lambda rank: 0.1 * rank, lambda rank: 0.1 * (2 - rank)], ids=["0 first", "0 last"])
def test_every_start_has_its_own_keys(delay):
    store = dist.HashStore()
    for _ in range(3):
        found, expected = start(store, 3, delay=delay)
        assert found == dict.fromkeys(range(3), expected)


def test_who_does_not_come_is_named():
    store = dist.HashStore()
    store.set("asks/2", "a process of an earlier start")
    with pytest.raises(RunError, match=r"rank 0: 2 of 3 ranks did not come within 0 s \(ranks 1, 2\)"):
        meet(store, rank=0, world_size=3, timeout=timedelta(seconds=0.2))
    with pytest.raises(RunError, match="rank 1: rank 0 did not answer within 0 s"):
        meet(store, rank=1, world_size=3, timeout=timedelta(seconds=0.2))
