"""Bytes that collectives move and seconds they take: one set of formulas for counters and plans.

Bytes are what one rank sends, in the algorithms whose volume is the least possible (ring or direct), for a group of n
and a tensor of S bytes as given to the call:

    all_gather      (n - 1) S                S = this rank's part
    reduce_scatter  (n - 1) S / n            S = the whole input
    all_reduce      2 (n - 1) S / n          rounded up to a byte
    all_to_all      the rows that go to other ranks
    broadcast       (n - 1) S at the source, 0 elsewhere
    barrier         0

Seconds: the bytes are divided over the tiers that the group spans. A group with k ranks in each unit of a tier sends
(n/k - 1) / (n - 1) of its bytes over the slower tiers above, the rest below: a gather first among the units, by k
ranks side by side, then within them. The tiers work at the same time (pipelined), so the slowest decides; steps add
their latencies: n/k - 1 + k - 1 for all_gather and reduce_scatter (rings), 2 log2 for all_reduce (trees) and log2 for
the others. All-to-all sends to each peer alike, so its share on a tier is the share of peers there. Left out, and so
flattered: the cost of one message a peer in an all_to_all over thousands of ranks, and congestion between groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gem_comm.interface import Call, CommError, Kind, Topology


def sent_bytes(kind: Kind, *, size: int, x_bytes: int, rank: int = 0, source: int = 0, own_bytes: int = 0) -> int:
    """Bytes that the rank at position `rank` sends. x_bytes: bytes of x; own_bytes: rows an all_to_all keeps here.

    Example: all_gather of 100 bytes over 4 ranks: 300. reduce_scatter of 400 bytes over 4: 300. all_reduce of 400
    bytes over 4: 600.
    """
    if kind == "all_gather":
        return (size - 1) * x_bytes
    if kind == "reduce_scatter":
        return (size - 1) * x_bytes // size
    if kind == "all_reduce":
        return -(-2 * (size - 1) * x_bytes // size)
    if kind == "all_to_all":
        return x_bytes - own_bytes
    if kind == "broadcast":
        return (size - 1) * x_bytes if rank == source else 0
    return 0


def call_bytes(call: Call, *, size: int, rank: int) -> int:
    """`sent_bytes` of one call on the rank at position `rank`."""
    if call.x is None:
        return 0
    x_bytes = call.x.numel() * call.x.element_size()
    rows = call.x.shape[0]
    own = call.send_rows[rank] * (x_bytes // rows) if call.kind == "all_to_all" and rows else 0
    return sent_bytes(call.kind, size=size, x_bytes=x_bytes, rank=rank, source=call.source, own_bytes=own)


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """How a group lies on the tiers: `members[t]` ranks of it in its fullest unit of tier t; the last is its size.

    Example: 16 ranks, 4 a host, all in one zone of a host-zone-spine cluster: (4, 16, 16).
    """

    members: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.members[-1]


def group_shape(group: Sequence[int], units: Sequence[Sequence[int]]) -> GroupShape:
    """The shape of `group` on the units of `layouts.tier_units`."""
    counts = []
    for unit_of in units:
        found: dict[int, int] = {}
        for rank in group:
            found[unit_of[rank]] = found.get(unit_of[rank], 0) + 1
        counts.append(max(found.values()))
    if counts[-1] != len(group):
        raise CommError(f"no tier holds the ranks {tuple(group)[:8]}... together")
    return GroupShape(members=tuple(counts))


def bytes_by_tier(kind: Kind, shape: GroupShape, sent: float) -> tuple[float, ...]:
    """`sent` bytes of one rank over the tiers, fastest first; they add up to `sent`.

    Example: all_gather, 16 ranks, 4 a host (4, 16, 16), 1,500 bytes (15 parts of 100): 1,200 stay in the host, 300
    cross it: each of the 4 ranks of a host sends its own part to the 3 other hosts, then all parts around the host.
    """
    n = shape.size
    if n == 1:
        return tuple(0.0 for _ in shape.members)
    inner, result = 1, []
    for members in shape.members:
        if kind == "all_to_all":
            share = (members - inner) / (n - 1)
        else:
            share = (n / inner - n / members) / (n - 1)
        result.append(sent * share)
        inner = members
    return tuple(result)


def steps_by_tier(kind: Kind, shape: GroupShape) -> tuple[float, ...]:
    """Latency steps on each tier."""
    inner, result = 1, []
    for members in shape.members:
        ratio = members / inner
        if ratio <= 1:
            result.append(0.0)
        elif kind in ("all_gather", "reduce_scatter"):
            result.append(math.ceil(ratio) - 1.0)
        else:
            result.append((2.0 if kind == "all_reduce" else 1.0) * math.ceil(math.log2(ratio)))
        inner = members
    return tuple(result)


def seconds(kind: Kind, shape: GroupShape, sent: float, topology: Topology) -> float:
    """Time of one collective in which each rank sends `sent` bytes."""
    moved = bytes_by_tier(kind, shape, sent)
    steps = steps_by_tier(kind, shape)
    transfer = max(part / tier.shared_bandwidth for part, tier in zip(moved, topology.tiers, strict=True))
    return transfer + sum(count * tier.latency_s for count, tier in zip(steps, topology.tiers, strict=True))
