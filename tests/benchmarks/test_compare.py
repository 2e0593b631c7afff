"""The rule: what moved, by how much, and what the gate says to it."""

from __future__ import annotations

import math

import pytest
from gate_asv import GateError
from gate_compare import compare, failed, judge, summary, table
from gate_counters import compare_counters
from gate_limits import MARK, SMALLEST_TIME_RATIO, Noise, ratio_from_noise, read_limits, write_times
from gate_times import cut, put_together


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        (1000, 1000, "same"),
        (1000, 1020, "same"),  # the limit itself is allowed
        (1000, 1021, "regressed"),
        (1021, 1000, "improved"),
        (1020, 1000, "same"),
        (0, 0, "same"),
        (0, 1, "regressed"),  # spills from none to one
        (1, 0, "improved"),
        (None, 5, "new"),
        (5, None, "gone"),
    ],
)
def test_verdicts(base, head, verdict):
    assert judge(base, head, 1.02) == verdict


def test_what_vanishes_fails_and_what_is_new_does_not():
    limit = lambda key: 1.02  # noqa: E731
    assert failed(compare({"a": 1}, {}, limit))
    assert not failed(compare({}, {"a": 1}, limit))
    assert not failed(compare({"a": 1}, {"a": 0.5}, limit))
    assert failed(compare({"a": 1, "b": 1}, {"a": 0.5, "b": 1.1}, limit))


def test_limits_are_looked_up_by_key():
    moves = compare({"a": 100, "b": 100}, {"a": 110, "b": 110}, {"a": 1.2, "b": 1.05}.__getitem__)
    assert [move.verdict for move in moves] == ["same", "regressed"]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("base", "head", "limit"),
    [(NAN, 1, 1.02), (1, NAN, 1.02), (INF, INF, 1.02), (1, 1, NAN), (1, 100, INF), (None, NAN, 2)],
)
def test_what_is_no_finite_number_has_no_verdict(base, head, limit):
    with pytest.raises(ValueError, match="finite"):
        judge(base, head, limit)


def test_the_figure_that_was_not_measured_is_named():
    with pytest.raises(ValueError, match=r"a\.b: a figure is a finite number, got nan"):
        compare({"a.b": 1.0}, {"a.b": NAN}, lambda key: 1.02)


SHARDED = {"a.b": {"ops": 5, "collectives.shard": 2, "collective_bytes.shard": 100}}
PLAIN = {"a.b": {"ops": 5}}
MORE = {"a.b": {"ops": 5, "launches": 3}}


@pytest.mark.parametrize(
    ("recorded", "head", "verdicts"),
    [
        (PLAIN, SHARDED, {"ops": "same", "collectives.shard": "regressed", "collective_bytes.shard": "regressed"}),
        (SHARDED, PLAIN, {"ops": "same", "collectives.shard": "improved", "collective_bytes.shard": "improved"}),
        (PLAIN, MORE, {"ops": "same", "launches": "added"}),
        (MORE, PLAIN, {"ops": "same", "launches": "gone"}),
        ({}, SHARDED, {"ops": "new", "collectives.shard": "new", "collective_bytes.shard": "new"}),
    ],
    ids=["a first collective", "the last one gone", "a counter added", "a counter gone", "a new case"],
)
def test_counters_that_a_side_has_not(recorded, head, verdicts):
    moves = compare_counters(recorded, head, lambda key: 1.02)
    assert {move.key.partition("/")[2]: move.verdict for move in moves} == verdicts
    assert failed(moves) == bool({"regressed", "added", "gone"} & set(verdicts.values()))


def test_table_names_what_moved_worst_first():
    moves = compare({"a": 100, "b": 100, "c": 100, "d": 0}, {"a": 110, "b": 300, "c": 100, "d": 4}, lambda key: 1.02)
    lines = table(moves, unit=str).splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["d", "b", "a"]
    assert lines[2].split() == ["regressed", "b", "100", "300", "3.000", "1.020"]
    assert math.isinf(moves[3].ratio)
    assert summary(moves) == "3 regressed, 1 same"
    assert table(moves[2:3], unit=str) == ""


def test_a_limit_of_one_is_refused():
    with pytest.raises(ValueError, match="above 1"):
        judge(1, 1, 1.0)


def test_limits_file(tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text(
        "[default]\ncounters = 1.02\ntimes = 1.3\n\n"
        '[counters."a.b/ops"]\nratio = 1.1\nreason = "depends on the processor"\n\n'
        + MARK
        + '\n\n[times."a.d"]\nratio = 1.11\nreason = "before"\n'
    )
    write_times(path, {"a.b": Noise(seen=[1.0, 1.01, 0.99]), "a.c": Noise(seen=[1.2, 0.9])})
    limits = read_limits(path)
    assert limits.of_counter("a.b/ops") == 1.1
    assert limits.of_counter("a.b/bytes") == 1.02
    assert limits.of_time("a.b") == pytest.approx(ratio_from_noise(Noise(seen=[1.0, 1.01, 0.99]))[0])
    assert limits.of_time("a.c") > 1.2 * 1.2
    assert limits.of_time("a.d") == 1.11  # kept
    assert limits.of_time("a.e") == 1.3


def test_rounds_of_equal_code_are_put_together():
    """Four quiet rounds and four slow ones: what a comparison of two and two can show, never a sample on both sides."""
    blocks = [[1.0, 1.0, 1.0]] * 4 + [[2.0, 2.0, 2.0]] * 4
    ratios = put_together(blocks, 2, count=300)
    assert set(ratios) == {0.5, 2 / 3, 0.75, 1.0, 4 / 3, 1.5, 2.0}
    assert ratios == put_together(blocks, 2, count=300)
    assert cut([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    with pytest.raises(GateError, match="3 samples"):
        cut([1, 2, 3], 2)


def test_a_limit_needs_a_reason(tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text('[default]\ncounters = 1.02\ntimes = 1.3\n[counters."a.b/ops"]\nratio = 1.1\n')
    with pytest.raises(ValueError, match=r"a\.b/ops.*reason"):
        read_limits(path)


@pytest.mark.parametrize("ratio", ["nan", "inf", "-inf", "1.0", "true", '"1.1"'])
def test_a_limit_that_lets_everything_pass_is_refused(tmp_path, ratio):
    path = tmp_path / "limits.toml"
    path.write_text(f'[default]\ncounters = 1.02\ntimes = 1.3\n[times."a.b"]\nratio = {ratio}\nreason = "none"\n')
    with pytest.raises(ValueError, match=r"limits\.toml: times\.'a\.b' needs a ratio above 1"):
        read_limits(path)
    path.write_text(f"[default]\ncounters = 1.02\ntimes = {ratio}\n")
    with pytest.raises(ValueError, match=r"limits\.toml: default\.times"):
        read_limits(path)


def test_noise_decides_the_ratio():
    quiet, _ = ratio_from_noise(Noise(seen=[1.0, 1.001, 0.999]))
    loud, reason = ratio_from_noise(Noise(seen=[1.0, 1.04, 0.95]))
    assert quiet == SMALLEST_TIME_RATIO
    assert loud > 1 / 0.95
    assert loud > math.exp(5 * math.sqrt((math.log(1.04) ** 2 + math.log(0.95) ** 2) / 3)) - 1e-9
    assert "3 comparisons" in reason


def test_the_reason_does_not_count_what_was_put_together_as_measured():
    _, reason = ratio_from_noise(Noise(seen=[1.01], drawn=[1.0] * 200, rounds=8))
    assert reason.startswith("1 comparison of equal code, 200 more put together from 8 rounds: deviation 0.07%")
