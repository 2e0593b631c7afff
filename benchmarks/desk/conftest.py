"""Rules of the desk: no measuring beside other workers, and nothing measured is a failure, not an empty file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput"):
        raise pytest.UsageError(
            "benchmarks must not run under xdist: workers beside one another slow each other down. Leave out -n."
        )


WRITING = ("benchmark_json", "benchmark_save", "benchmark_autosave")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    wanted = any(getattr(session.config.option, name, None) for name in WRITING)
    measured = getattr(session.config, "_benchmarksession", None)
    if wanted and exitstatus == 0 and not (measured and measured.benchmarks):
        print("\ndesk: nothing was measured, so no file was written", file=sys.stderr)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
