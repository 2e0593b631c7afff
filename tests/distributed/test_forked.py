"""A forked rank that fails is told, and so is one that does not end: no test passes on ranks that did not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from forked_ranks import gemline, run_worker
from super_jobs import Zygote

pytestmark = pytest.mark.distributed


def worker(folder: Path, code: str) -> Path:
    file = folder / "failing_worker.py"
    file.write_text(textwrap.dedent(code))
    return file


def test_a_rank_that_fails_is_told(tmp_path):
    code = """
        import os
        def main(word):
            if os.environ["RANK"] == "1":
                raise ValueError(word)
            print("well of", os.environ["WORLD_SIZE"])
        """
    with pytest.raises(AssertionError, match=r"(?s)ValueError: seven") as failed:
        run_worker(worker(tmp_path, code), ["seven"], world=2)
    assert "well of 2" in str(failed.value)


def test_a_rank_that_does_not_end_is_told(tmp_path):
    code = """
        import os, time
        def main():
            time.sleep(60 * int(os.environ["RANK"]))
        """
    with pytest.raises(pytest.fail.Exception, match=r"codes \[0, None\] after 0.5 s"):
        run_worker(worker(tmp_path, code), [], world=2, seconds=0.5)


SAY_ORDER = """
    import os
    def main():
        print(os.environ["RANK"], hash("seven"))
    """


def orders(said: str) -> dict[str, str]:
    return dict(line.split() for line in said.splitlines())


def test_ranks_have_other_orders_of_sets(tmp_path):
    found = orders(run_worker(worker(tmp_path, SAY_ORDER), [], world=3))
    assert found["0"] == found["2"] != found["1"]


def test_ranks_of_gemline_have_other_orders_of_sets(tmp_path, monkeypatch):
    file, fork = worker(tmp_path, SAY_ORDER), Zygote.fork
    # In the place of gemline's command, which says no hash.
    monkeypatch.setattr(Zygote, "fork", lambda self, given, **where: fork(self, given, **where | {"worker": file}))
    done = gemline([])
    found = orders(done.stdout)
    assert (done.returncode, sorted(found)) == (0, ["0", "1"])
    assert found["0"] != found["1"]
