"""Where the processes of one start meet: apart from those of the starts before it.

torchrun keeps one key-value store for all its starts. A process that is quicker than its peer then reads the address
that the peer of the start before left there, and fails with "connection refused" (or, with NCCL, waits). The number of
restarts cannot tell the starts apart, as agents of several hosts count their own. So rank 0 draws a name for its start,
and gives it to each process that asks with a name of its own; no answer to an earlier process fits.
(torch 2.4 to 2.13: github.com/pytorch/pytorch/issues/135712.)
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from gem_pipelines.errors import MeetingError

_POLL_S = 0.01


def meet(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """`store` under a prefix that the `world_size` processes of this start, and no others, have.

    MeetingError on rank 0 names the ranks that did not come within `timeout`.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        _invite(store, mine, world_size, timeout)
        return dist.PrefixStore(f"start/{mine}", store)
    store.set(f"asks/{rank}", mine)
    try:
        store.wait([f"told/{mine}"], timeout)
    except dist.DistStoreError:
        raise MeetingError(f"rank {rank}: rank 0 did not answer within {timeout.total_seconds():.0f} s") from None
    start = store.get(f"told/{mine}").decode()
    store.set(f"met/{start}/{rank}", "")
    return dist.PrefixStore(f"start/{start}", store)


def _invite(store: dist.Store, start: str, world_size: int, timeout: timedelta) -> None:
    """Answer every other rank until all have the name of this start. One that is not of this start is answered, too."""
    absent = set(range(1, world_size))
    answered: dict[int, bytes] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    while absent:
        for rank in sorted(absent):
            if store.check([f"asks/{rank}"]) and (asking := store.get(f"asks/{rank}")) != answered.get(rank):
                store.set(f"told/{asking.decode()}", start)
                answered[rank] = asking
            if store.check([f"met/{start}/{rank}"]):
                absent.remove(rank)
        if absent and time.monotonic() > deadline:
            missing = ", ".join(map(str, sorted(absent)[:8])) + (", ..." if len(absent) > 8 else "")
            raise MeetingError(
                f"rank 0: {len(absent)} of {world_size} ranks did not come within {timeout.total_seconds():.0f} s "
                f"(ranks {missing}): see what they, or their hosts, say"
            )
        time.sleep(_POLL_S if absent else 0)
