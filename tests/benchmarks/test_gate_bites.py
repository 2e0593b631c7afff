"""The gate, through its own command: passes when nothing changed, fails on plants, and says how to record a gain.

The counters are exact, so the fast tests plant into real code and real records. The times need a quiet machine and
minutes: marked slow; docs/benchmarks.md says what they gave, on one case.
"""

from __future__ import annotations

import json
import re

import gate
import gem_attention.eager
import pytest
from gate_counters import differing, read_record, take, versions
from gate_times import clone_with_empty_commit, commit

CASE = "attention.seeds_eager_uniform"


@pytest.fixture
def record(tmp_path):
    """A record of the case as it is now, and the command that compares with it."""
    path = tmp_path / "counters.json"
    path.write_text(json.dumps({"versions": versions(), "cases": take(f"^{CASE}$")}))

    def compare_with(change=lambda figures: None, *more):
        tree = json.loads(path.read_text())
        change(tree["cases"][CASE])
        path.write_text(json.dumps(tree))
        return gate.main(["counters", "--cases", f"^{CASE}$", "--record", str(path), *more])

    return compare_with


def test_no_change_passes_twenty_times(record, capsys):
    assert [record() for _ in range(20)] == [0] * 20
    assert "regressed" not in capsys.readouterr().out


def test_five_percent_more_bytes_in_the_code_fail(record, monkeypatch, capsys):
    """A copy of v that nobody needs: 1.4 MB of 13 MB more moved, and as much more alive at the peak."""
    original = gem_attention.eager.attention

    def with_a_copy(q, k, v, **arguments):
        return original(q, k, v.clone().contiguous().clone(), **arguments)

    monkeypatch.setattr(gem_attention.eager, "attention", with_a_copy)
    assert record() == 1
    moved = re.search(rf"regressed +{CASE}/bytes_moved .* (\d\.\d+) +1\.020", capsys.readouterr().out)
    assert moved
    assert float(moved[1]) == pytest.approx(1.09, abs=0.04)


def test_five_percent_more_bytes_than_recorded_fail(record, capsys):
    def shrink(figures):
        figures["peak_bytes"] = round(figures["peak_bytes"] / 1.05)

    assert record(shrink) == 1
    output = capsys.readouterr().out
    assert re.search(rf"regressed +{CASE}/peak_bytes .* 1\.050 +1\.020", output)
    assert output.count("regressed") == 2  # the line, and the summary


def test_an_improvement_passes_with_a_hint(record, capsys):
    def grow(figures):
        figures["ops"] *= 2

    assert record(grow) == 0
    output = capsys.readouterr().out
    assert "improved" in output
    assert "ci/gate.py record" in output


def test_a_lost_counter_fails(record):
    assert record(lambda figures: figures.update(launches=3)) == 1


def test_a_counter_that_the_record_of_the_case_does_not_have_fails(record, capsys):
    assert record(lambda figures: figures.pop("python_calls")) == 1
    assert re.search(
        rf"added +{CASE}/python_calls .*\n\d+ same, 1 added\nAdded: .*ci/gate.py record", capsys.readouterr().out
    )


def test_other_versions_are_not_compared(tmp_path, capsys):
    path = tmp_path / "counters.json"
    path.write_text(json.dumps({"versions": {**versions(), "torch": "1.0", "python": "3.1"}, "cases": {}}))
    command = ["counters", "--cases", f"^{CASE}$", "--record", str(path)]
    assert gate.main(command) == 2
    here = versions()
    message = f"python is {here['python']} here and was 3.1, torch is {here['torch']} here and was 1.0"
    assert message in capsys.readouterr().err
    assert gate.main([*command, "--other-versions"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("checked, not compared: 1 cases gave right results")
    assert message in output


def test_other_versions_still_need_right_results(tmp_path, monkeypatch, capsys):
    path = tmp_path / "counters.json"
    path.write_text(json.dumps({"versions": {**versions(), "torch": "1.0"}, "cases": {}}))
    original = gem_attention.eager.attention
    monkeypatch.setattr(gem_attention.eager, "attention", lambda *a, **k: original(*a, **k) * 1.001)
    assert gate.main(["counters", "--cases", f"^{CASE}$", "--record", str(path), "--other-versions"]) == 2
    assert f"{CASE}: AssertionError: output" in capsys.readouterr().err


def test_leave_to_pass_with_other_versions_changes_nothing_with_these(record):
    assert record(lambda figures: figures.update(peak_bytes=1), "--other-versions") == 1


def test_a_wrong_result_is_an_error_not_a_figure(record, monkeypatch, capsys):
    original = gem_attention.eager.attention
    monkeypatch.setattr(gem_attention.eager, "attention", lambda *a, **k: original(*a, **k) * 1.001)
    assert record() == 2
    assert f"{CASE}: AssertionError: output" in capsys.readouterr().err


def test_the_record_is_of_this_environment():
    different = differing(json.loads(gate.COUNTERS.read_text())["versions"], versions())
    if different:
        pytest.skip(f"not compared: {different}")
    assert read_record(gate.COUNTERS)


PLANT = """

_planted = attention


def attention(q, k, v, **arguments):
    import time

    start = time.process_time()
    out = _planted(q, k, v, **arguments)
    stop = time.process_time() + {share} * (time.process_time() - start)
    while time.process_time() < stop:
        pass
    return out
"""
TIMED = r"attention\.softmax_eager_uniform"
PLANTED_SHARE = 0.205  # of the forward pass, which is 0.49 of the case: 10 % of the whole


@pytest.mark.slow
def test_ten_percent_slower_fails_and_no_change_passes(tmp_path, capfd):
    """Through asv, in a clone: HEAD~1 against an empty commit 20 times, then against a slowdown of 10 %."""
    clone = clone_with_empty_commit(tmp_path / "clone")
    command = ["times", "--repo", str(clone), "--base", "HEAD~1", "--cases", TIMED]
    assert [gate.main(command) for _ in range(20)] == [0] * 20
    path = clone / "packages" / "attention" / "gem_attention" / "eager.py"
    path.write_text(path.read_text() + PLANT.format(share=PLANTED_SHARE))
    commit(clone, "Slow attention down")
    assert gate.main(command) == 1
    assert "regressed" in capfd.readouterr().out
