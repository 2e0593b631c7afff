"""Bytes, tiers and seconds of collectives: worked by hand, and against a simulation that moves real messages."""

from __future__ import annotations

import math

import pytest
import torch
from gem_comm.api import Traffic, parse_topology, tier_units, wrap
from gem_comm.interface import Call
from gem_comm.reference import run_ranks, thread_groups
from gem_comm.single import SingleCollectives
from gem_comm.traffic import GroupShape, bytes_by_tier, group_shape, seconds, sent_bytes, steps_by_tier
from hypothesis import given, settings
from hypothesis import strategies as st

TIERS = parse_topology(
    'name = "t"\n'
    '[[tier]]\nname = "host"\ngroup_size = 4\nbandwidth_bytes_per_s = 100.0\nlatency_s = 1.0\n'
    '[[tier]]\nname = "zone"\ngroup_size = 16\nbandwidth_bytes_per_s = 10.0\nlatency_s = 10.0\n'
    '[[tier]]\nname = "spine"\nbandwidth_bytes_per_s = 10.0\nlatency_s = 100.0\noversubscription = 2\n',
    where="test",
)


def simulated_ring_bytes(kind, n, size):
    """Messages of a ring: each rank passes one of n parts on at each step."""
    part = size if kind == "all_gather" else size / n
    steps = {"all_gather": n - 1, "reduce_scatter": n - 1, "all_reduce": 2 * (n - 1)}[kind]
    return sum(part for _ in range(steps))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_bytes_of_a_ring(kind, n):
    size = 240
    assert sent_bytes(kind, size=n, x_bytes=size) == simulated_ring_bytes(kind, n, size)


def test_all_reduce_rounds_up():
    assert sent_bytes("all_reduce", size=3, x_bytes=4) == math.ceil(2 * 2 * 4 / 3)


def test_counted_bytes_of_every_kind():
    groups = thread_groups([(4, 7, 9)], axis="shard")
    send = ((1, 2, 3), (0, 0, 0), (4, 0, 1))

    def work(rank):
        traffic = Traffic()
        comm = wrap(groups[rank], traffic=traffic)
        i = comm.rank
        comm.all_gather(torch.ones(2, 5))
        comm.reduce_scatter(torch.ones(6, 5, dtype=torch.float64))
        comm.all_reduce(torch.ones(3))
        comm.all_to_all(torch.ones(sum(send[i]), 2), send_rows=send[i], receive_rows=[row[i] for row in send])
        comm.broadcast(torch.ones(10), source=2)
        comm.barrier()
        return traffic

    first, second, third = run_ranks_of((4, 7, 9), work)
    assert first.sent["shard", "all_gather"] == 2 * 2 * 5 * 4
    assert first.sent["shard", "reduce_scatter"] == 2 * 2 * 5 * 8
    assert first.sent["shard", "all_reduce"] == 2 * 2 * 4
    assert [t.sent["shard", "all_to_all"] for t in (first, second, third)] == [(2 + 3) * 8, 0, 4 * 8]
    assert [t.sent["shard", "broadcast"] for t in (first, second, third)] == [0, 0, 2 * 40]
    assert set(first.calls.values()) == {1}
    assert len(first.calls) == 6
    assert first.by_axis() == {"shard": 80 + 160 + 16 + 40}
    first.clear()
    assert first.by_axis() == {}


def run_ranks_of(ranks, work):
    return run_ranks(len(ranks), lambda i: work(ranks[i]))


def test_coded_bytes_are_those_that_travel():
    groups = thread_groups([range(2)], axis="shard")

    def work(rank):
        traffic = Traffic()
        comm = wrap(groups[rank], codec="int8", traffic=traffic)
        comm.all_gather(torch.ones(3, 16))
        comm.reduce_scatter(torch.ones(6, 16))
        comm.all_reduce(torch.ones(16))
        comm.all_gather(torch.ones(3, dtype=torch.int64))
        return traffic.sent

    sent = run_ranks(2, work)[0]
    assert sent["shard", "all_gather"] == 3 * (16 + 4) + 24  # ids travel as they are
    assert sent["shard", "all_to_all"] == 3 * (16 + 4)  # the coded reduce_scatter
    assert sent["shard", "all_reduce"] == 64


def test_one_rank_sends_nothing():
    traffic = Traffic()
    comm = wrap(SingleCollectives(), traffic=traffic)
    comm.all_gather(torch.ones(5))
    comm.start(Call(kind="all_to_all", x=torch.ones(5), send_rows=(5,), receive_rows=(5,))).wait()
    assert traffic.by_axis() == {"world": 0}
    assert sum(traffic.calls.values()) == 2


def test_shape_of_a_group():
    units = tier_units(TIERS, 32)
    assert group_shape(range(16), units) == GroupShape(members=(4, 16, 16))
    assert group_shape(range(0, 32, 4), units) == GroupShape(members=(1, 4, 8))
    assert group_shape((3, 4), units) == GroupShape(members=(1, 2, 2))


def test_tiers_by_hand():
    shape = GroupShape(members=(4, 16, 16))
    assert bytes_by_tier("all_gather", shape, 1500) == pytest.approx((1200, 300, 0))
    assert bytes_by_tier("all_to_all", shape, 1500) == pytest.approx((300, 1200, 0))
    assert steps_by_tier("all_gather", shape) == (3, 3, 0)
    assert steps_by_tier("all_reduce", shape) == (4, 4, 0)
    assert seconds("all_gather", shape, 1500, TIERS) == pytest.approx(max(1200 / 100, 300 / 10) + 3 + 30)


def hierarchical_gather(members, sent_part):
    """Simulate: gather among units first (side by side), then inside them; bytes a rank sends on each tier."""
    n = members[-1]
    moved = []
    inner_sizes = [1, *members[:-1]]
    for inner, outer in reversed(list(zip(inner_sizes, members, strict=True))):
        # each rank holds n / outer parts by now, and sends them to the other outer / inner - 1 units of this tier
        held = n // outer
        moved.append(held * (outer // inner - 1) * sent_part)
    return list(reversed(moved))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8]), st.integers(1, 1000))
def test_tiers_equal_a_simulated_gather_and_add_up(a, b, c, part):
    shape = GroupShape(members=(a, a * b, a * b * c))
    n = shape.size
    sent = (n - 1) * part
    moved = bytes_by_tier("all_gather", shape, sent)
    assert sum(moved) == pytest.approx(sent)
    assert list(moved) == pytest.approx(hierarchical_gather(shape.members, part))
    assert sum(bytes_by_tier("all_to_all", shape, sent)) == pytest.approx(sent)
