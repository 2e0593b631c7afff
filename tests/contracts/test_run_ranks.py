"""The fixture that starts ranks tells which one failed and what it said, and leaves no process behind."""

from __future__ import annotations

import os
import textwrap

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
