"""The step model: parts by hand, what must rise and fall, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from gem_comm.api import layout, parse_topology, read_topology
from gem_comm.interface import CommError, MeshSpec
from gem_pipelines.errors import ConfigError
from gem_pipelines.planner.estimate import Assumptions, axis_strides, estimate, group_shapes, table_placement
from gem_pipelines.planner.scaling import Point, breakdown, scale
from gem_pipelines.planner.search import divisors, make_plan, meshes, parse_mesh
from gem_pipelines.planner.text import difference, explain, plan_json, size_text
from gem_pipelines.planner.workload import TableLoad, Unit, Workload
from gem_pipelines.planner.workloads import WORKLOADS, find_workload, gem_like_1t, gem_like_100b
from hypothesis import given, settings
from hypothesis import strategies as st

CLUSTER = read_topology("h200_cluster")
SMALL = parse_topology(
    """
name = "small"
[device]
name = "d"
flops_per_s = 1e9
memory_bytes = 1e6
memory_bytes_per_s = 1e9
[[tier]]
name = "host"
group_size = 2
bandwidth_bytes_per_s = 1e6
latency_s = 1e-4
[[tier]]
name = "network"
bandwidth_bytes_per_s = 1e5
latency_s = 1e-3
""",
    where="test",
)
WORK = Workload(
    name="w",
    units=(Unit(name="root", shapes=((100, 10),), root=True),),
    tables=(TableLoad(name="a", rows=100, dim=8, ids=2.0, vectors=2.0),),
    batch=10,
    forward_flops=1e6,
    backward_flops=2e6,
    flops_spread=0.0,
    activation_bytes=1000.0,
)
PLAIN = Assumptions(utilisation=0.5, overlap_slowdown=0.1, memory_share=1.0)


def test_one_rank_by_hand():
    found = estimate(WORK, MeshSpec(), SMALL, PLAIN)
    assert found.seconds["compute"] == pytest.approx(10 * 3e6 / 0.5e9)
    assert found.seconds["tables"] == pytest.approx(10 * (2 * 8 * 4 * 3 + 2 * 8 * 4 * 2) / 1e9)
    assert found.seconds["optimizer"] == pytest.approx(1000 * 28 / 1e9)
    assert {k: found.seconds[k] for k in ("recompute", "exposed", "contention", "imbalance")} == dict.fromkeys(
        ("recompute", "exposed", "contention", "imbalance"), 0.0
    )
    assert found.memory["dense state"] == 16_000
    assert found.memory["tables"] == 100 * (8 * 4 + 4)
    assert found.memory["activations"] == 10_000
    assert found.step_s == pytest.approx(sum(found.seconds.values()))


def test_the_host_counts_where_it_takes_longer_than_the_device():
    alone = estimate(WORK, MeshSpec(), SMALL, PLAIN)
    busy = alone.step_s
    assert estimate(WORK, MeshSpec(), SMALL, dataclasses.replace(PLAIN, host_s=busy / 2)).step_s == busy
    slow = estimate(WORK, MeshSpec(), SMALL, dataclasses.replace(PLAIN, host_s=3 * busy))
    assert slow.seconds["host"] == pytest.approx(2 * busy)
    assert slow.step_s == pytest.approx(3 * busy)
    calls = dataclasses.replace(PLAIN, host_s=busy, collective_host_s=0.25)
    pair = estimate(WORK, MeshSpec(replicate=2, table_shard=2), SMALL, calls)
    device = sum(pair.seconds[part] for part in ("compute", "recompute", "tables", "optimizer"))
    assert pair.seconds["host"] == pytest.approx(busy + 0.25 * sum(move.calls for move, _ in pair.moved) - device)
    # the root is WORK's only unit of FSDP2; a model that is not cut has none
    units = dataclasses.replace(PLAIN, host_s=busy, unit_host_s=0.5)
    cut = estimate(WORK, MeshSpec(shard=2, table_shard=2), SMALL, units)
    device = sum(cut.seconds[part] for part in ("compute", "recompute", "tables", "optimizer"))
    assert cut.seconds["host"] == pytest.approx(busy + 0.5 - device)
    whole = estimate(WORK, MeshSpec(replicate=2, table_shard=2), SMALL, units)
    assert whole.seconds["host"] < 0.5


def test_two_ranks_of_one_host_by_hand():
    found = estimate(WORK, MeshSpec(shard=2, table_shard=2), SMALL, PLAIN)
    hidden = 2 * 2e3 / 1e6 + 2 * 1e-4 + (10 / 2 * (2 * 8 + 8)) / 1e6 + 1e-4  # one gather, one scatter, the ids
    exposed = 2 * ((10 / 2 * 2 * 8 * 4) / 1e6 + 1e-4)
    assert found.seconds["exposed"] == pytest.approx(exposed)
    assert found.seconds["contention"] == pytest.approx(0.1 * hidden)


def test_hidden_moves_that_outlast_computing_are_exposed():
    slow = dataclasses.replace(WORK, forward_flops=1.0, backward_flops=2.0)
    found = estimate(slow, MeshSpec(shard=2, table_shard=2), SMALL, PLAIN)
    assert found.seconds["exposed"] > 0.004


def test_recomputes_only_what_does_not_fit():
    big = dataclasses.replace(WORK, activation_bytes=150_000.0)  # 1.5 MB of 1 MB
    found = estimate(big, MeshSpec(), SMALL, PLAIN)
    assert found.fits
    assert found.memory_bytes == pytest.approx(1e6)
    assert found.seconds["recompute"] == pytest.approx(found.recomputed * found.seconds["compute"] / 3)
    hopeless = estimate(dataclasses.replace(WORK, activation_bytes=2e6), MeshSpec(), SMALL, PLAIN)
    assert not hopeless.fits
    assert hopeless.recomputed == 0.9


def test_longest_of_many_batches():
    uneven = dataclasses.replace(WORK, flops_spread=0.5)
    spec = MeshSpec(replicate=4, table_shard=4)
    found = estimate(uneven, spec, SMALL, PLAIN)
    assert found.length_imbalance == pytest.approx(1 + 0.5 * math.sqrt(2 * math.log(4) / 10))
    assert estimate(uneven, MeshSpec(), SMALL, PLAIN).length_imbalance == 1.0


def test_placement_of_tables():
    equal = tuple(TableLoad(name=str(i), rows=10, dim=4, ids=1.0, vectors=1.0) for i in range(3))
    assert table_placement(equal, 1) == (1.0, 1.0)
    assert table_placement(equal, 2) == pytest.approx((4 / 3, 4 / 3))
    assert table_placement(equal, 3) == pytest.approx((1.0, 1.0))
    one = (TableLoad(name="big", rows=1000, dim=4, ids=9.0, vectors=9.0),)
    assert table_placement(one, 4) == pytest.approx((1.0, 1.0))  # cut in four


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(list(meshes(24, experts=2, fastest=8))))
def test_shapes_are_those_of_the_layout(spec):
    """The planner's short cut (one group where sizes nest) agrees with every group of the layout."""
    from gem_comm.layouts import tier_units
    from gem_comm.traffic import group_shape

    placed, units = layout(spec, CLUSTER), tier_units(CLUSTER, 24)
    for axis, (size, stride) in axis_strides(spec).items():
        expected = {group_shape(group, units) for group in placed.groups[axis]}
        assert set(group_shapes(CLUSTER, 24, size, stride)) == expected


@pytest.mark.parametrize("world", [8, 16, 64])
def test_short_cut_where_sizes_nest(world):
    from gem_comm.layouts import strided_groups, tier_units
    from gem_comm.traffic import group_shape

    units = tier_units(CLUSTER, world)
    for size in divisors(world):
        for stride in divisors(world // size):
            found = {group_shape(g, units) for g in strided_groups(world, size=size, stride=stride)}
            assert set(group_shapes(CLUSTER, world, size, stride)) == found


def test_meshes_are_all_factorizations():
    found = list(meshes(8, experts=2, fastest=8))
    assert len(found) == len(set(found)) == (4 + 3) * (4 + 3)  # expert 1 and 2; table copies 1, 2, 4, 8, twice but 1
    for spec in found:
        spec.check_world(8)
    assert {spec.expert for spec in meshes(8, experts=6, fastest=2)} == {1, 2}
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


def test_plan_prefers_what_fits_then_what_is_fast():
    plan = make_plan(gem_like_1t(), CLUSTER, 128)
    assert plan.chosen is plan.ranked[0]
    assert plan.chosen.fits
    fitting = [e.step_s for e in plan.ranked if e.fits]
    assert all(b >= a * 0.999 for a, b in itertools.pairwise(fitting))
    flags = [e.fits for e in plan.ranked]
    assert flags == sorted(flags, reverse=True)
    assert False in flags


def test_a_named_mesh_is_explained_against_the_best():
    wanted = MeshSpec(replicate=64, table_shard=64)
    plan = make_plan(gem_like_100b(), CLUSTER, 64, mesh=wanted)
    assert plan.chosen.spec == wanted
    assert plan.ranked[0].spec != wanted
    assert "runner-up" in explain(plan)
    with pytest.raises(CommError, match="both products must be 64"):
        make_plan(gem_like_100b(), CLUSTER, 64, mesh=MeshSpec(replicate=32, table_shard=64))


def test_strategies_break_down_in_their_order():
    """A trillion parameters: plain copies stop paying before one copy does, slices of copies go furthest."""
    points = scale(gem_like_1t(), CLUSTER, worlds=(64, 128, 512, 2048))
    rate = {(p.strategy, p.world_size): p.rate for p in points}
    assert all(not p.best.fits for p in points if p.strategy == "fully sharded" and p.world_size == 64)
    assert rate["2D", 512] < 0.8 * rate["1D", 512]
    assert rate["fully sharded", 2048] > rate["1D", 2048] > rate["2D", 2048]
    said = breakdown(points, "2D")
    assert said.startswith("2D: holds at 64 to 128 ranks; ")
    assert said.endswith("behind at 512 to 2,048 ranks (exposed)")
    assert "does not fit at 64 ranks (whole tables)" in breakdown(points, "fully sharded")
    assert isinstance(points[0], Point)


def test_more_bandwidth_never_slows():
    fast = dataclasses.replace(
        CLUSTER,
        tiers=tuple(dataclasses.replace(t, bandwidth_bytes_per_s=t.bandwidth_bytes_per_s * 2) for t in CLUSTER.tiers),
    )
    work = gem_like_100b()
    for spec in list(meshes(16, experts=2, fastest=8))[::5]:
        slow_s, fast_s = (estimate(work, spec, t, PLAIN).step_s for t in (CLUSTER, fast))
        assert fast_s <= slow_s


def test_json_has_every_rank():
    plan = make_plan(gem_like_100b(), CLUSTER, 16)
    found = plan_json(plan)
    assert sum(map(len, found["layout"]["groups"]["shard"])) == 16
    assert sum(found["chosen"]["bytes_by_axis"].values()) == pytest.approx(
        sum(move["sent"] for move in found["chosen"]["moves"])
    )
    assert len(found["runners_up"]) == 10


def test_difference_names_the_part():
    plan = make_plan(gem_like_1t(), CLUSTER, 512)
    spread = next(e for e in plan.ranked if not e.spec.fully_sharded and e.spec.table_replica == 2)
    assert "slower, mostly exposed" in difference(plan.chosen, spread)
    assert "does not fit" in difference(plan.chosen, plan.ranked[-1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shard", "expected axis=size"),
        ("shards=2", "axes are expert"),
        ("shard=two", "shard is 'two'"),
        ("shard=2,shard=4", "names shard twice"),
        ("fully_sharded=1", "expected true or false"),
    ],
)
def test_meshes_as_text_that_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_mesh(text)


def test_meshes_as_text():
    assert parse_mesh("expert=2, shard=4,table_shard=4,table_replica=2,fully_sharded=true") == MeshSpec(
        expert=2, shard=4, table_shard=4, table_replica=2, fully_sharded=True
    )


def test_a_topology_without_device_is_refused():
    with pytest.raises(ConfigError, match=r"has no \[device\] table"):
        estimate(WORK, MeshSpec(), dataclasses.replace(SMALL, device=None), PLAIN)


def test_workloads():
    assert gem_like_1t().table_parameters == pytest.approx(1e12, rel=0.001)
    assert [find_workload(name).name for name in WORKLOADS] == list(WORKLOADS)
    with pytest.raises(ConfigError, match="did you mean 'gem_like_1t'"):
        find_workload("gem_like1t")


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1_500_000, "1.5 MB"), (2e15, "2e+03 TB")])
def test_sizes(count, text):
    assert size_text(count) == text
