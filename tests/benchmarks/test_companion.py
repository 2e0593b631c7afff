"""The base's version of a case, in a process beside: other code, same calls, errors told."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from companion import PairedClock, package_folders

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def run_fresh(code, tmp_path):
    """Run code in a process without any package of the project."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"PYTHONPATH": BENCHMARKS, "BASE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_other_process_runs_the_other_code(tmp_path):
    """A package gem_x that spins 20 ms at the base and 40 ms at the head: the head costs two calls of the base."""
    for version, seconds in (("base", 0.02), ("head", 0.04)):
        folder = tmp_path / version / "packages" / "x"
        folder.mkdir(parents=True)
        spin = f"import time\ndef spin():\n    stop = time.process_time() + {seconds}\n"
        (folder / "gem_x.py").write_text(spin + "    while time.process_time() < stop: pass\n")
    code = """
        import os, statistics, sys
        from pathlib import Path
        from companion import Companion, PairedClock, package_folders
        root = Path(os.environ["BASE"])
        sys.path[:0] = package_folders(root / "head")
        def prepare():
            import gem_x
            return gem_x.spin
        companion = Companion(prepare, package_folders(root / "base"))
        call, clock, multiples = prepare(), PairedClock(companion), []
        for _ in range(9):
            start = clock()
            call()
            multiples.append(clock() - start)
        companion.close()
        print(statistics.median(multiples))
    """
    assert 1.7 < float(run_fresh(code, tmp_path)) < 2.3


def test_an_interpreter_that_the_call_starts_has_the_other_code(tmp_path):
    """As the imports cases do: what a call of the base starts must find the base's packages, not the head's."""
    for version in ("base", "head"):
        folder = tmp_path / version / "packages" / "x"
        folder.mkdir(parents=True)
        (folder / "gem_x.py").write_text(f"VERSION = {version!r}")
    code = """
        import os, subprocess, sys
        from pathlib import Path
        from companion import Companion, package_folders
        root = Path(os.environ["BASE"])
        os.environ["PYTHONPATH"] = os.pathsep.join([*package_folders(root / "head"), os.environ["PYTHONPATH"]])
        def prepare():
            child = f"import companion, gem_x; open({str(root / 'seen')!r}, 'a').write(gem_x.VERSION)"
            return lambda: subprocess.run([sys.executable, "-c", child], check=True)
        companion, call = Companion(prepare, package_folders(root / "base")), prepare()
        companion()
        call()
        print((root / "seen").read_text())
    """
    assert run_fresh(code, tmp_path).strip() == "basehead"


def test_a_base_that_fails_in_its_third_call_is_told(tmp_path):
    """Neither read as a time, nor lost: the message comes with the call that failed, and later calls are refused."""
    code = """
        from companion import Companion
        def prepare():
            calls = []
            def call():
                calls.append(1)
                if len(calls) == 3:
                    raise ValueError("third call")
            return call
        companion = Companion(prepare, [])
        for _ in range(4):
            try:
                print(0 <= companion() < 1)
            except RuntimeError as error:
                print(type(error).__name__, str(error).splitlines()[0], str(error).splitlines()[-1], sep="|")
    """
    assert run_fresh(code, tmp_path).splitlines() == [
        "True",
        "True",
        "RuntimeError|the base failed in a call:|ValueError: third call",
        "RuntimeError|the base's process died|the base's process died",
    ]


def test_a_base_that_is_killed_in_a_call_is_told(tmp_path):
    code = """
        import os
        from companion import Companion
        companion = Companion(lambda: lambda: os.kill(os.getpid(), 9), [])
        try:
            companion()
        except RuntimeError as error:
            print(error)
    """
    assert run_fresh(code, tmp_path).strip() == "the base's process died"


def test_what_the_base_cannot_run_is_told(tmp_path):
    code = """
        from companion import CannotPrepareError, Companion
        def prepare():
            raise ValueError("no such feature at the base")
        try:
            Companion(prepare, [])
        except CannotPrepareError as error:
            print(str(error).splitlines()[-1])
    """
    assert run_fresh(code, tmp_path).strip() == "ValueError: no such feature at the base"


def test_it_must_be_forked_before_the_packages_are_imported(tmp_path):
    code = """
        import sys, types
        from companion import Companion
        sys.modules["gem_x.api"] = types.ModuleType("gem_x.api")
        try:
            Companion(lambda: None, [])
        except RuntimeError as error:
            print(error)
    """
    assert run_fresh(code, tmp_path).strip() == "too late for a companion: gem_x.api is imported already"


def test_multiples_of_the_calls_at_both_ends(monkeypatch):
    """A machine that slows down by half within the measured stretch: the mean of both ends is the yardstick."""
    now, costs = [0.0], iter([1.0, 1.0, 2.0])
    monkeypatch.setattr("companion.cpu_clock", lambda: now[0])
    clock = PairedClock(lambda: next(costs))
    start = clock()
    now[0] += 3.0
    assert clock() - start == pytest.approx(3.0 / 1.5)


def test_folders_of_a_checkout(tmp_path):
    for name in ("packages/a", "packages/b", "pipelines", "datasets"):
        (tmp_path / name).mkdir(parents=True)
    expected = [str(tmp_path / name) for name in ("packages/a", "packages/b", "pipelines", "datasets")]
    assert package_folders(tmp_path) == expected
