"""What `nox -s alone` refuses is refused in the processes that tests start as well (ci/blocked_imports.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A test file as packages have them; shelve and wave stand for what is refused. `import` says whether a child has it.
INNER = """
import multiprocessing, os, subprocess, sys
import pytest

def has(*command, **options):
    return subprocess.run([sys.executable, *command], stderr=subprocess.DEVNULL, **options).returncode == 0

def imports_wave():
    import wave

def test_the_test_itself():
    with pytest.raises(ModuleNotFoundError):
        import wave

def test_a_child():
    assert has("-c", "import json")
    assert not has("-c", "import shelve")
    assert not has("-c", "import wave")

def test_a_child_with_more_on_its_path():
    more = os.pathsep.join(["/nowhere", os.environ["PYTHONPATH"]])
    assert not has("-c", "import wave", env={**os.environ, "PYTHONPATH": more})

def test_a_child_of_a_child():
    inner = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'import wave']).returncode)"
    assert not has("-c", inner)

def test_a_spawned_process(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=imports_wave)
    process.start()
    process.join()
    assert process.exitcode == 1

def test_ranks(tmp_path, run_ranks):
    (tmp_path / "sound.py").write_text("def main(rank, world_size, store):\\n    import json\\n")
    (tmp_path / "worker.py").write_text("def main(rank, world_size, store):\\n    import wave\\n")
    run_ranks(tmp_path / "sound.py", 1)
    with pytest.raises(AssertionError, match="No module named 'wave' .blocked for this run"):
        run_ranks(tmp_path / "worker.py", 1)

def test_the_environment_still_has_its_sitecustomize():
    assert has("-c", "import sys; sys.exit(not hasattr(sys, 'said_by_the_environment'))")
"""


def test_processes_that_tests_start_refuse_what_the_tests_refuse(tmp_path):
    (tmp_path / "test_inner.py").write_text(INNER)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.said_by_the_environment = True\n")
    path = os.pathsep.join([str(ROOT / "ci"), str(tmp_path / "site"), str(tmp_path), str(ROOT)])
    options = ("-q", "-p", "blocked_imports", "--blocked", "wave,shelve", "-c", "/dev/null", "-p", "no:cacheprovider")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            "--rootdir",
            str(tmp_path),
            "-p",
            "tests.conftest",
            str(tmp_path / "test_inner.py"),
        ],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    assert "7 passed" in done.stdout
