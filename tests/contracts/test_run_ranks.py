"""The fixture that starts ranks tells which one failed and what it said, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest


def worker(folder, code):
    file = folder / "worker.py"
    file.write_text(textwrap.dedent(code))
    return file


def test_a_rank_that_fails_is_told(run_ranks, tmp_path):
    file = worker(
        tmp_path,
        """
        def main(rank, world_size, init_method, word):
            assert (world_size, init_method[:7]) == (2, "file://")
            if rank == 1:
                raise ValueError(word)
        """,
    )
    with pytest.raises(AssertionError, match=r"(?s)rank 0, exit code 0:.*rank 1, exit code 1:.*ValueError: seven"):
        run_ranks(file, 2, "seven")


def test_ranks_that_take_too_long_are_stopped(run_ranks, tmp_path):
    file = worker(
        tmp_path,
        f"""
        import os, time
        def main(rank, world_size, init_method):
            open({str(tmp_path)!r} + f"/{{os.getpid()}}.pid", "w").close()
            time.sleep(60 * (1 - rank))
        """,
    )
    with pytest.raises(AssertionError, match=r"(?s)rank 0, exit code None:.*rank 1, exit code 0:"):
        run_ranks(file, 2, timeout_s=1)
    for file in tmp_path.glob("*.pid"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.stem), 0)


def test_ranks_have_other_orders_of_sets_and_what_environment_is_given(run_ranks, tmp_path):
    file = worker(
        tmp_path,
        """
        import os, pathlib
        def main(rank, world_size, init_method, folder):
            pathlib.Path(folder, f"{rank}-{os.environ.get('WORD')}").write_text(str(hash("seven")))
        """,
    )
    run_ranks(file, 3, str(tmp_path))
    run_ranks(file, 1, str(tmp_path), env={**os.environ, "WORD": "given"})
    found = [(tmp_path / f"{rank}-None").read_text() for rank in range(3)]
    assert found[0] == found[2] != found[1]
    assert (tmp_path / "0-given").exists()


def test_ranks_have_the_environment_and_the_folder_of_their_call(run_ranks, tmp_path, monkeypatch):
    file = worker(
        tmp_path,
        """
        import os, subprocess, sys
        def main(rank, world_size, init_method, word, folder):
            assert (os.environ.get("WORD", "none"), os.getcwd()) == (word, folder)
            code = "import os; print(os.environ.get('WORD', 'none'), os.getcwd(), sep='|')"
            said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
            assert said.strip() == f"{word}|{folder}"
            assert os.environ["PYTEST_CURRENT_TEST"]
        """,
    )
    run_ranks(file, 2, "none", os.getcwd())
    monkeypatch.setenv("WORD", "later")
    monkeypatch.chdir(tmp_path)
    run_ranks(file, 2, "later", str(tmp_path))


def test_what_is_read_when_a_module_is_imported_is_of_the_call_too(run_ranks, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "reads_early.py").write_text("import os\nWORD = os.environ['WORD']\n")
    (tmp_path / "own").mkdir()
    file = worker(
        tmp_path / "own",
        """
        import reads_early
        def main(rank, world_size, init_method, word):
            assert reads_early.WORD == word
        """,
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    for word in ("first", "second"):
        monkeypatch.setenv("WORD", word)
        run_ranks(file, 1, word)


def test_nothing_of_a_worker_is_left_for_the_next(run_ranks, tmp_path):
    (tmp_path / "beside.py").write_text("import json\njson.patched_beside = 1\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "__init__.py").write_text("import json\njson.patched_inner = 1\n")
    patches = worker(
        tmp_path,
        """
        import json, os, sys
        import beside, inner
        json.patched, os.environ["PATCHED"] = 1, "1"
        sys.path.append("/patched")
        def main(rank, world_size, init_method):
            assert (json.patched, json.patched_beside, json.patched_inner) == (1, 1, 1)
            assert os.environ["PATCHED"] == "1" and "/patched" in sys.path
        """,
    ).rename(tmp_path / "patches.py")
    clean = worker(
        tmp_path,
        """
        import json, os, sys
        def main(rank, world_size, init_method):
            assert [name for name in vars(json) if "patched" in name] == []
            assert "PATCHED" not in os.environ and "/patched" not in sys.path
            assert not {"beside", "inner"} & set(sys.modules)
        """,
    )
    run_ranks(patches, 1)
    run_ranks(clean, 1)


def test_what_workers_import_first_is_imported_once(run_ranks, tmp_path):
    """wave: of a module beside the worker; shelve: after a statement that may decide what it finds."""
    (tmp_path / "beside.py").write_text("import wave\n")
    code = "'A docstring.'\nimport sys\nHAD = set(sys.modules)\ndef main(*_):\n    {}\n"
    first = worker(
        tmp_path, "from concurrent import futures\nimport beside\nWORD = 1\nimport shelve\ndef main(*_): ...\n"
    )
    run_ranks(first.rename(tmp_path / "first.py"), 1)
    check = "assert HAD & {'wave', 'shelve', 'concurrent.futures'} == {'wave', 'concurrent.futures'}, HAD"
    run_ranks(worker(tmp_path, code.format(check)), 1)


@pytest.mark.parametrize(("end", "codes"), [("time.sleep(60)", "None"), ("raise ValueError", "1")])
def test_what_a_rank_started_ends_with_it(run_ranks, tmp_path, end, codes):
    file = worker(
        tmp_path,
        f"""
        import os, pathlib, subprocess, sys, time
        def main(rank, world_size, init_method, file):
            started = subprocess.Popen(["sleep", "60"])
            pathlib.Path(file).write_text(str(started.pid))
            {end}
        """,
    )
    with pytest.raises(AssertionError, match=f"rank 0, exit code {codes}:"):
        run_ranks(file, 1, str(tmp_path / "pid"), timeout_s=1)
    assert ends(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("how", ["told to end", "killed"])
def test_ranks_end_with_what_they_are_forked_from(tmp_path, how):
    """Where the tests' whole process group is told to end, ranks are in others and would not hear of it."""
    file = worker(
        tmp_path,
        """
        import subprocess, time
        def main():
            print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
            time.sleep(60)
        """,
    )
    command = {"start": str(file), "arguments": [], "said": str(tmp_path / "said"), "folder": str(tmp_path)}
    program = [sys.executable, str(Path(__file__).parents[1] / "run_rank.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(program, start_new_session=True, **pipes) as parent:
        parent.stdin.write(json.dumps(command | {"environment": dict(os.environ)}) + "\n")
        rank = json.loads(parent.stdout.readline())["pid"]
        while not (said := (tmp_path / "said").read_text() if (tmp_path / "said").exists() else "").endswith("\n"):
            assert not ends(rank, seconds=0.01), said
        if how == "killed":
            os.killpg(parent.pid, signal.SIGKILL)
            assert ends(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(said), signal.SIGKILL)
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.killpg(parent.pid, number)
        parent.stdin.close()
        assert ends(rank)
        assert ends(int(said))


def ends(pid: int, *, seconds: float = 5) -> bool:
    """A process that was killed has its end still to come, and there may be nobody to reap it."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            state = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX" or time.monotonic() >= deadline:
            return state in "ZX"
        time.sleep(0.005)
