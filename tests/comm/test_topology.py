"""Reading topologies: what is accepted, what is refused and with which words."""

from __future__ import annotations

import pytest
from gem_comm.api import parse_topology, read_topology, shipped_topologies, to_toml
from gem_comm.interface import CommError, Device, Tier, Topology
from gem_comm.probing import fit_line

GOOD = """
name = "two"
source = "test"
[device]
name = "thing"
flops_per_s = 1e12
memory_bytes = 8e9
memory_bytes_per_s = 1e11
[[tier]]
name = "host"
group_size = 4
bandwidth_bytes_per_s = 100e9
latency_s = 1e-6
[[tier]]
name = "network"
bandwidth_bytes_per_s = 10e9
latency_s = 10e-6
oversubscription = 2
"""


def test_reads():
    found = parse_topology(GOOD, where="x.toml")
    assert found == Topology(
        name="two",
        source="test",
        device=Device(name="thing", flops_per_s=1e12, memory_bytes=8e9, memory_bytes_per_s=1e11),
        tiers=(
            Tier(name="host", group_size=4, bandwidth_bytes_per_s=100e9, latency_s=1e-6),
            Tier(name="network", group_size=None, bandwidth_bytes_per_s=10e9, latency_s=10e-6, oversubscription=2),
        ),
    )
    assert found.tiers[1].shared_bandwidth == 5e9
    assert parse_topology(to_toml(found), where="again") == found


def test_text_survives_writing():
    tier = Tier(name="host", group_size=None, bandwidth_bytes_per_s=1.0, latency_s=0.0)
    odd = Topology(name='a "b" \\ c\n\tü', tiers=(tier,))
    assert parse_topology(to_toml(odd), where="x") == odd


@pytest.mark.parametrize("name", shipped_topologies())
def test_shipped(name):
    found = read_topology(name)
    assert found.name == name
    assert found.device is not None
    assert found.source.startswith(("measured", "assumed"))


def test_file(tmp_path):
    (tmp_path / "mine.toml").write_text(GOOD)
    assert read_topology(tmp_path / "mine.toml").name == "two"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("latency_s = 1e-6", "latency = 1e-6", r"x.toml, \[\[tier\]\] number 1: unknown key 'latency'; did you mean"),
        ('source = "test"', 'sourec = "test"', "unknown key 'sourec'; did you mean 'source'"),
        ("group_size = 4", "group_size = 4.0", "group_size is 4.0, expected a whole number"),
        ("group_size = 4", "group_size = true", "group_size is True, expected a whole number"),
        ("group_size = 4", "", "tier 'host' has no group_size; only the last tier"),
        ("group_size = 4", "group_size = 0", "group_size is 0, expected a multiple of 1"),
        ("100e9", '"fast"', "bandwidth_bytes_per_s is 'fast', expected a number"),
        ("100e9", "nan", "bandwidth_bytes_per_s is nan"),
        ("100e9", "-1.0", "expected a finite number above 0"),
        ("latency_s = 1e-6", "latency_s = -1.0", "latency_s is -1.0"),
        ("latency_s = 1e-6\n", "", r"number 1: latency_s missing"),
        ("oversubscription = 2", "oversubscription = 0.5", "oversubscription is 0.5, expected >= 1"),
        ("oversubscription = 2", "group_size = 6", "group_size is 6, expected a multiple of 4"),
        ('name = "network"', 'name = "host"', "tier names repeat"),
        ("flops_per_s = 1e12", "flops_per_s = 0", "device: flops_per_s is 0"),
        ("[device]", "[devise]", "unknown key 'devise'; did you mean 'device'"),
        ('name = "two"', "name = two", "not TOML"),
        ('name = "two"\n', "", "name missing"),
    ],
)
def test_refusals(old, new, words):
    assert old in GOOD
    with pytest.raises(CommError, match=words):
        parse_topology(GOOD.replace(old, new, 1), where="x.toml")


def test_no_tiers():
    with pytest.raises(CommError, match="no \\[\\[tier\\]\\]"):
        parse_topology('name = "x"', where="x.toml")


def test_unknown_name():
    with pytest.raises(CommError, match="did you mean 'h200_cluster'"):
        read_topology("h200-cluster")


def test_fit_line_finds_latency_and_bandwidth():
    sizes = [1e5, 1e6, 1e7, 1e8]
    latency, bandwidth = fit_line(sizes, [20e-6 + size / 5e9 for size in sizes])
    assert latency == pytest.approx(20e-6)
    assert bandwidth == pytest.approx(5e9)


def test_shipped_pair_is_the_line_through_the_measured_times():
    mib = 2.0**20
    tier = read_topology("h200_pair").tiers[0]
    measured = {1: 0.080e-3, 16: 0.135e-3, 64: 0.359e-3, 256: 1.147e-3}
    latency, bandwidth = fit_line([n * mib for n in measured], list(measured.values()))
    assert tier.latency_s == pytest.approx(latency, rel=0.01)
    assert tier.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.01)
    for n, seconds in measured.items():
        assert tier.latency_s + n * mib / tier.bandwidth_bytes_per_s == pytest.approx(seconds, rel=0.06)


def test_fit_line_refuses_falling_times():
    with pytest.raises(CommError, match="do not rise"):
        fit_line([1e3, 1e6], [2e-3, 1e-3])
