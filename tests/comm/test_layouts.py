"""Layouts: coordinates, groups and tiers against a plain enumeration of ranks."""

from __future__ import annotations

import itertools

import pytest
from gem_comm.api import layout, parse_topology, read_topology, tier_units
from gem_comm.interface import DENSE_AXES, TABLE_AXES, CommError, MeshSpec
from hypothesis import given, settings
from hypothesis import strategies as st

CLUSTER = read_topology("h200_cluster")
PAIRS = parse_topology(
    'name = "pairs"\n'
    '[[tier]]\nname = "host"\ngroup_size = 2\nbandwidth_bytes_per_s = 2e9\nlatency_s = 0.0\n'
    '[[tier]]\nname = "network"\nbandwidth_bytes_per_s = 1e9\nlatency_s = 0.0\n',
    where="test",
)


@st.composite
def specs(draw):
    sizes = [draw(st.sampled_from([1, 2, 3, 4])) for _ in range(3)]
    world = sizes[0] * sizes[1] * sizes[2]
    copies = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    return MeshSpec(
        expert=sizes[0],
        shard=sizes[1],
        replicate=sizes[2],
        table_replica=copies,
        table_shard=world // copies,
        fully_sharded=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(specs())
def test_coordinates_are_a_bijection_and_groups_differ_in_one_axis(spec):
    placed = layout(spec, CLUSTER)
    world = spec.world_size
    where = [placed.coordinate(rank) for rank in range(world)]
    for axes in (DENSE_AXES, TABLE_AXES):
        seen = {tuple(c[axis] for axis in axes) for c in where}
        assert seen == set(itertools.product(*(range(getattr(spec, axis)) for axis in axes)))
        for axis in axes:
            others = [other for other in axes if other != axis]
            for group in placed.groups[axis]:
                assert [where[rank][axis] for rank in group] == list(range(getattr(spec, axis)))
                assert len({tuple(where[rank][other] for other in others) for rank in group}) == 1
                assert list(group) == sorted(group)
    for groups in placed.groups.values():
        assert sorted(itertools.chain.from_iterable(groups)) == list(range(world))
    for group in placed.groups["shard_expert"]:
        assert [where[r]["shard"] * spec.expert + where[r]["expert"] for r in group] == list(range(len(group)))
        assert len({where[r]["replicate"] for r in group}) == 1


def test_four_ranks_on_two_hosts():
    spec = MeshSpec(expert=2, replicate=2, table_shard=2, table_replica=2)
    placed = layout(spec, PAIRS)
    assert placed.groups["expert"] == ((0, 1), (2, 3))
    assert placed.groups["replicate"] == ((0, 2), (1, 3))
    assert placed.groups["table_shard"] == ((0, 1), (2, 3))
    assert placed.groups["table_replica"] == ((0, 2), (1, 3))
    assert placed.tiers["expert"] == "host"
    assert placed.tiers["replicate"] == "network"
    assert placed.tiers["shard"] == "host"  # groups of one rank cross nothing


def test_fully_sharded_tables_turn_replicas_fastest():
    sizes = {"shard": 4, "table_shard": 2, "table_replica": 2}
    plain, full = layout(MeshSpec(**sizes), PAIRS), layout(MeshSpec(**sizes, fully_sharded=True), PAIRS)
    assert plain.tiers["table_shard"] == "host"
    assert plain.tiers["table_replica"] == "network"
    assert full.tiers["table_replica"] == "host"
    assert full.tiers["table_shard"] == "network"
    assert full.groups["table_shard"] == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("world", "axis", "size", "tier"),
    [(8, "shard", 8, "host"), (16, "shard", 16, "zone"), (512, "shard", 512, "zone"), (1024, "shard", 1024, "spine")],
)
def test_tier_of_growing_groups(world, axis, size, tier):
    placed = layout(MeshSpec(**{axis: size}, table_shard=world), CLUSTER)
    assert placed.tiers[axis] == tier


def test_a_size_that_does_not_divide_the_host_crosses_it():
    placed = layout(MeshSpec(expert=3, shard=8, table_shard=24), CLUSTER)
    assert (6, 7, 8) in placed.groups["expert"]
    assert placed.tiers["expert"] == "zone"


def test_both_products_in_the_error():
    spec = MeshSpec(expert=2, shard=2, replicate=2, table_shard=2, table_replica=2)
    with pytest.raises(CommError) as found:
        spec.check_world(8)
    assert str(found.value) == (
        "the mesh does not fit 8 ranks: expert 2 x shard 2 x replicate 2 = 8, table_shard 2 x table_replica 2 = 4; "
        "both products must be 8"
    )


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_sizes_are_whole_numbers(size):
    with pytest.raises(CommError, match="shard is"):
        MeshSpec(shard=size)


def test_hosts_by_name():
    spec = MeshSpec(shard=3, table_shard=3)
    assert layout(spec, PAIRS, hosts=["a", "a", "b"]).tiers["shard"] == "network"
    assert layout(MeshSpec(expert=2, table_shard=2), PAIRS, hosts=["a", "b"]).tiers["expert"] == "network"
    assert tier_units(PAIRS, 3, ["a", "b", "b"]) == ((0, 1, 1), (0, 0, 0))
    with pytest.raises(CommError, match=r"ranks \[0, 2\] run on host 'a', with other hosts' ranks between"):
        layout(spec, PAIRS, hosts=["a", "b", "a"])
    with pytest.raises(CommError, match="host 'a' runs 3 ranks, but tier 'host' of topology 'pairs' holds 2"):
        layout(spec, PAIRS, hosts=["a", "a", "a"])


def test_a_topology_that_ends():
    text = 'name = "one"\n[[tier]]\nname = "host"\ngroup_size = 2\nbandwidth_bytes_per_s = 1.0\nlatency_s = 0.0\n'
    with pytest.raises(CommError, match=r"joins 2 ranks .* but 4 are asked for"):
        layout(MeshSpec(shard=4, table_shard=4), parse_topology(text, where="x"))


def test_unknown_axis():
    placed = layout(MeshSpec(), PAIRS)
    with pytest.raises(CommError, match="unknown axis 'experts'; did you mean 'expert'"):
        placed.group_of(0, "experts")
    with pytest.raises(CommError, match="rank 7 is not in a world of 1"):
        placed.group_of(7, "expert")
