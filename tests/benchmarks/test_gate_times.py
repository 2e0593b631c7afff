"""What the timed half of the gate does around asv: which cases, which samples, what is missing, which base.

asv itself is replaced by a function that writes the result files it would write; the forked processes, where a
benchmark can die, are asv's own.
"""

from __future__ import annotations

import doctest
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gate
import gate_asv
import gate_counters
import gate_limits
import gate_times
import pytest
from asv.results import Results
from asv.runner import BenchmarkResult, ForkServer, run_benchmark
from gate_asv import GateError, pattern_of
from gate_expected import Comparison, reasons_in, select, select_timed, sort_out, versions_at

CASE = "comm.layout_4096"
LIST = "from types import SimpleNamespace as S\ndef all_cases():\n    return [S(name={name!r}, version={version})]\n"


def git(repo, *arguments):
    name = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    done = subprocess.run(["git", *name, *arguments], cwd=repo, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path):
    """Three commits; the list of cases at each holds CASE, in version 1."""
    path = tmp_path / "repo"
    (path / "benchmarks" / "cases").mkdir(parents=True)
    (path / "benchmarks" / "cases" / "__init__.py").write_text(LIST.format(name=CASE, version=1))
    (path / "packages").mkdir()
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(path))
    git(path, "add", ".")
    for number in range(3):
        git(path, "commit", "--quiet", "--allow-empty", "-m", str(number))
    return path


def write_result(folder, commit, values, gpu="none"):
    """asv's result file of a commit; values: benchmark -> value, or its list of samples, or None for a failure."""
    machine = {"machine": "box", "os": "", "arch": "", "cpu": "", "num_cpu": "1", "ram": "1"}
    results = Results(machine, {}, commit, 1, "3.11", "env", {})
    for name, value in values.items():
        samples = value if isinstance(value, list) else None
        result = BenchmarkResult([True if samples else value], [samples], [1 if samples else None], 0, "", None)
        results.add_result({"name": name, "params": [], "version": "1"}, result, record_samples=True)
    results.save(str(folder))
    (folder / "box" / "machine.json").write_text(json.dumps({**machine, "gpu": gpu, "version": 1}))


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """The gate's folders, empty and elsewhere."""
    for name, folder in (("SCRATCH", "s"), ("CHECKOUT", "s/base"), ("REASONS", "s/reasons")):
        for module in (gate_asv, gate_times):
            monkeypatch.setattr(module, name, tmp_path / folder)
    return tmp_path / "s"


@pytest.fixture
def measured(monkeypatch, repo, scratch):
    """The gate's command on the repository, with an `asv continuous` that gives base and head these samples."""
    calls = []

    def run(base, head, *, reason=None, cases=CASE):
        def asv(workplace, *arguments, **variables):
            calls.append((arguments, variables))
            for commit, samples in zip(arguments[-2:], (base, head), strict=True):
                write_result(workplace.results, commit, {f"{CASE}.time_cpu": samples})
            if reason:
                (Path(variables["GEMLINE_REASONS"]) / CASE).write_text(f"Traceback\n{reason}\n")
            return 0

        monkeypatch.setattr(gate_asv, "asv", asv)
        place = gate_asv.Workplace(results=scratch / "results")
        monkeypatch.setattr(gate_times, "Workplace", lambda repo: place.__class__(repo=repo, results=place.results))
        return gate.main(["times", "--repo", str(repo), "--base", "HEAD~1", "--cases", cases])

    run.calls = calls
    return run


def full(value):
    (case,) = select(f"^{CASE}$")
    return [value] * (4 * case.repeat)


def test_both_sides_whole_are_compared(measured, repo, capsys):
    assert measured(full(1.0), full(1.0)) == 0
    assert "1 same" in capsys.readouterr().out
    assert measured(full(1.0), full(2.0)) == 1
    assert "1 regressed" in capsys.readouterr().out
    (arguments, variables), _ = measured.calls
    assert arguments[-2:] == (git(repo, "rev-parse", "HEAD~1"), git(repo, "rev-parse", "HEAD"))
    assert arguments[arguments.index("--bench") + 1] == r"^(comm\.layout_4096)\.time_cpu$"
    assert arguments[arguments.index("--attribute") + 1] == "rounds=4"
    assert (Path(variables["GEMLINE_BASE"]) / "benchmarks" / "cases" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("base", "head", "message"),
    [
        (None, full(1.0), "nothing was measured of the base"),
        (full(1.0), None, "nothing was measured of the head"),
        (full(1.0)[1:], full(1.0), "1 cases have no time, or not all of it: comm.layout_4096"),
        (full(1.0), full(1.0)[: len(full(1.0)) // 4], "1 cases have no time, or not all of it: comm.layout_4096"),
    ],
    ids=["no wheel of the base", "no wheel of the head", "a sample less", "one round of four"],
)
def test_what_was_not_measured_is_an_error(measured, capsys, base, head, message):
    assert measured(base, head) == 2
    assert message in capsys.readouterr().err


def test_a_base_that_cannot_run_a_case_it_has_is_an_error(measured, capsys):
    nan = float("nan")
    assert measured(nan, nan, reason="TypeError: no such argument") == 2
    shown = capsys.readouterr()
    assert f"lost: {CASE}: the base has this case and cannot run it: TypeError: no such argument" in shown.out
    assert "1 cases have no time" in shown.err


@pytest.mark.parametrize("base_list", [LIST.format(name="comm.other", version=1), LIST.format(name=CASE, version=7)])
def test_a_case_that_the_base_does_not_have_is_not_compared_and_said_so(measured, repo, capsys, base_list):
    (repo / "benchmarks" / "cases" / "__init__.py").write_text(base_list)
    git(repo, "commit", "--quiet", "--all", "-m", "another list")
    git(repo, "commit", "--quiet", "--allow-empty", "-m", "head")
    assert measured(float("nan"), float("nan"), reason="TypeError: no such argument") == 0
    output = capsys.readouterr().out
    assert f"not compared: {CASE}: the base " in output
    assert "TypeError: no such argument" in output
    assert output.splitlines()[-1] == "nothing to compare, 1 not compared"


def test_lost_cases_do_not_hide_the_others():
    one, two, three = (SimpleNamespace(name=f"a.{name}", repeat=2, version=1) for name in ("one", "two", "three"))
    base = {"a.one": [1.0] * 8, "a.two": [1.0] * 8}
    head = {"a.one": [1.0] * 8, "a.two": [1.0] * 2}
    found = sort_out([one, two, three], base, head, rounds=4, reasons={}, at_base={})
    assert found.base == found.head == {"a.one": [1.0] * 8}
    assert set(found.lost) == {"a.two", "a.three"}
    assert "base has 8, head 2" in found.lost["a.two"]


def test_one_meaning_of_cases():
    """A regular expression found in the name, for times as for counters; asv gets the names."""
    names = [case.name for case in select("attention\\.")]
    assert len(names) > 5
    assert all(name.startswith("attention.") for name in names)
    assert [case.name for case in select("layout_")] == [CASE]
    pattern = pattern_of(["a.b", "a.c"], "time_cpu$")
    for name, found in (
        ("a.b.time_cpu", True),
        ("a.c.time_cpu", True),
        ("a.bc.time_cpu", False),
        ("axb.time_cpu", False),
    ):
        assert bool(re.search(pattern, name)) == found


@pytest.mark.parametrize("command", ["counters", "times"])
@pytest.mark.parametrize("pattern", ["no_such_case", "("])
def test_a_pattern_without_a_case_is_an_error(repo, capsys, command, pattern):
    more = ["--repo", str(repo), "--base", "HEAD~1"] if command == "times" else []
    assert gate.main([command, "--cases", pattern, *more]) == 2
    assert f"--cases {pattern!r}" in capsys.readouterr().err


def test_cases_without_a_time_are_no_times():
    with pytest.raises(GateError, match="no case with a time"):
        select_timed("^kernels")


def test_versions_at_a_checkout(tmp_path, repo):
    assert versions_at(repo) == {CASE: 1}
    assert versions_at(tmp_path / "nothing") == {}
    (repo / "benchmarks" / "cases" / "__init__.py").write_text("import no_such_module")
    with pytest.raises(GateError, match="no_such_module"):
        versions_at(repo)


def test_the_suite_writes_why_the_base_cannot_run(tmp_path, monkeypatch):
    for name in ("torch", "torchrec"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))  # not loaded for this
    import suites
    from companion import CannotPrepareError

    def refuse(*_):
        raise CannotPrepareError("Traceback ...\nValueError: no such feature\n")

    monkeypatch.setattr(suites, "Companion", refuse)
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    monkeypatch.setenv("GEMLINE_REASONS", str(tmp_path))
    timed = suites.Timed()
    timed._case = SimpleNamespace(name=CASE)
    with pytest.raises(NotImplementedError, match="no such feature"):
        timed.companion(tmp_path)
    assert reasons_in(tmp_path) == {CASE: "ValueError: no such feature"}


DYING = """
import os
class Dying:
    def time_killed(self): os.kill(os.getpid(), 9)
    def time_leaving(self): os._exit(0)
    def time_raising(self): raise ValueError("no")
    def time_living(self): pass
    time_living.number = time_living.repeat = 1
"""


def test_a_benchmark_that_dies_in_the_forked_process_has_no_samples(tmp_path):
    """asv's fork server outlives it, counts it as failed, and the case is lost, which is an error (above)."""
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "dying.py").write_text(DYING)

    def run(arguments, return_popen, redirect_stderr, env):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([sys.executable, *arguments], **streams, env=env, start_new_session=True)

    server = ForkServer(SimpleNamespace(run=run, env_vars={}), str(tmp_path / "suite"))
    try:
        assert server.preimport()[0]
        results = Results({"machine": "box"}, {}, "c" * 40, 1, "3.11", "env", {})
        for what in ("living", "killed", "leaving", "raising"):
            benchmark = {"name": f"dying.Dying.time_{what}", "params": [], "timeout": 60, "version": "1"}
            done = run_benchmark(benchmark, server, profile=False)
            results.add_result({**benchmark, "name": f"dying.{what}.time_cpu"}, done, record_samples=True)
            if what == "killed":
                assert done.errcode == -signal.SIGKILL
    finally:
        server.close()
    results.save(str(tmp_path / "results"))
    assert list(gate_asv.samples_of(tmp_path / "results", "c" * 40)) == ["dying.living"]
    assert gate_asv.samples_of(tmp_path / "results", "d" * 40) == {}
    (path,) = gate_asv.result_files(tmp_path / "results")
    assert gate_times.failed_in(path) == [f"dying.{what}.time_cpu" for what in ("killed", "leaving", "raising")]


def test_what_failed_is_not_recorded(tmp_path):
    """A failure and a time that was skipped; a counter that the commit does not have is none."""
    values = {
        "a.b.time_cpu": [1.0, 2.0],
        "a.c.time_cpu": float("nan"),
        "a.b.track_x": float("nan"),
        "a.c.track_x": None,
    }
    write_result(tmp_path, "c" * 40, values)
    assert gate_times.failed_in(tmp_path / "box" / "cccccccc-env.json") == ["a.c.time_cpu", "a.c.track_x"]


def test_noise_is_of_every_comparison_and_of_its_rounds(monkeypatch):
    """Two comparisons of two rounds a side: two ratios seen, the others of their eight rounds."""
    found = [
        Comparison(base={"a.b": [1.0] * 4}, head={"a.b": [head] * 4}, not_compared={}, lost={}) for head in (1.0, 1.1)
    ]
    monkeypatch.setattr(gate_times, "compare_commits", lambda *_, **__: found.pop(0))
    monkeypatch.setattr(gate_times, "clone_with_empty_commit", lambda path: path)
    noise = gate_times.measure_noise(cases="a", runs=2, rounds=2)["a.b"]
    assert noise.seen == [1.0, 1.1]
    assert (noise.rounds, len(noise.drawn)) == (8, 200)
    assert min(noise.drawn) < 1.0 < max(noise.drawn)


@pytest.mark.parametrize("what", ["lost", "not_compared"])
def test_no_noise_without_a_time(monkeypatch, what):
    found = Comparison(base={}, head={}, **{"lost": {}, "not_compared": {}, what: {"a.b": "it died"}})
    monkeypatch.setattr(gate_times, "compare_commits", lambda *_, **__: found)
    monkeypatch.setattr(gate_times, "clone_with_empty_commit", lambda path: path)
    with pytest.raises(GateError, match=r"no noise without a time: a\.b: it died"):
        gate_times.measure_noise(cases="a", runs=1, rounds=2)


@pytest.mark.parametrize("lost", [False, True])
def test_recorded_whole_or_not_at_all(scratch, monkeypatch, tmp_path, lost):
    target = tmp_path / "record"
    target.mkdir()

    def asv(workplace, *arguments, **variables):
        assert arguments[arguments.index("--bench") + 1] == r"^(comm\.layout_4096)\."
        write_result(workplace.results, "c" * 40, {} if lost else {f"{CASE}.time_cpu": [1.0, 2.0]})
        (workplace.results / "box" / "machine.json").write_text("{}")
        (workplace.results / "benchmarks.json").write_text(json.dumps({f"{CASE}.time_cpu": {}, "version": 2}))
        return 2

    monkeypatch.setattr(gate_times, "asv", asv)
    monkeypatch.setattr(gate_times, "merge", lambda source: gate_asv.merge(source, target))
    if lost:
        with pytest.raises(GateError, match=f"{CASE}: no result"):
            gate_times.record_times(CASE)
        assert list(target.iterdir()) == []
    else:
        assert gate_times.record_times(CASE) == [target / "box" / "cccccccc-env.json"]


def test_the_newest_recorded_ancestor(repo, tmp_path, monkeypatch):
    monkeypatch.setattr(gate_times, "RESULTS", tmp_path / "results")
    commits = git(repo, "rev-list", "HEAD").split()
    write_result(tmp_path / "results", commits[2], {"a.b.time_cpu": [1.0]})
    assert gate_times.newest_recorded_ancestor(repo) == commits[2]
    write_result(tmp_path / "gpu", commits[1], {"a.b.time_device": [1.0]}, gpu="NVIDIA H200")
    (tmp_path / "gpu" / "box").rename(tmp_path / "results" / "nvidia-h200")
    assert gate_times.newest_recorded_ancestor(repo) == commits[2]  # a GPU's results are no base of CPU times
    write_result(tmp_path / "results", commits[1], {"a.b.time_cpu": [1.0]})
    assert gate_times.newest_recorded_ancestor(repo) == commits[1]
    write_result(tmp_path / "results", commits[0], {"a.b.time_cpu": [1.0]})  # HEAD itself is no base
    assert gate_times.newest_recorded_ancestor(repo) == commits[1]


def test_a_shallow_clone_is_named_as_the_reason(repo, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gate_times, "RESULTS", tmp_path / "results")
    monkeypatch.delenv("GATE_BASE", raising=False)
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{repo}", "shallow")
    for base in ([], ["--base", "main~1"]):
        assert gate.main(["times", "--repo", str(tmp_path / "shallow"), *base]) == 2
        message = capsys.readouterr().err
        assert "shallow, with 1 commit(s)" in message
        assert "git fetch --unshallow" in message
    assert gate.main(["times", "--repo", str(repo), "--base", "main~9"]) == 2
    assert capsys.readouterr().err == "gate: there is no commit 'main~9'\n"


def test_files_that_git_does_not_know_are_named_too(repo, capsys):
    (repo / "packages" / "new.py").write_text("")
    gate_times.warn_about_uncommitted(repo)
    assert "packages/new.py" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyError("default"), OSError("disk"), subprocess.CalledProcessError(1, "tar")])
def test_whatever_breaks_the_gate_is_no_regression(monkeypatch, capsys, error):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(gate_counters, "read_record", broken)
    assert gate.main(["counters"]) == 2
    message = capsys.readouterr().err
    assert type(error).__name__ in message  # the traceback
    assert message.endswith("gate: the gate itself failed\n")


def test_examples_of_docstrings():
    for module in (gate_limits, gate_counters):
        tried = doctest.testmod(module)
        assert tried.attempted
        assert not tried.failed
