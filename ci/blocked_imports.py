"""A pytest plugin that makes the import of named packages fail, as if they were not installed.

    PYTHONPATH=ci pytest -p blocked_imports --blocked gem_data,torchrec tests/attention

`nox -s alone` uses it to run each package's tests without its siblings and without what it does not need. It holds in
the processes that tests start too (ranks, readers): they inherit the names in an environment variable, and Python
itself imports blocked/sitecustomize.py when they start. One started with an environment of its own inherits neither.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

NAMES = "GEMLINE_BLOCKED_IMPORTS"
FOLDER = Path(__file__).resolve().parent / "blocked"


class Blocker(MetaPathFinder):
    """Refuses the named top-level packages."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r} (blocked for this run)", name=fullname)
        return None


def block(names: set[str]) -> None:
    """Refuse these packages from now on; one that is loaded already is an error, since blocking came too late."""
    loaded = names & {name.partition(".")[0] for name in sys.modules}
    if loaded:
        raise RuntimeError(f"already imported, so it cannot be blocked: {sorted(loaded)}")
    sys.meta_path.insert(0, Blocker(names))


def block_in_children(names: set[str]) -> None:
    """Let processes that are started from now on refuse them from their first import on."""
    os.environ[NAMES] = ",".join(sorted(names))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))


def block_inherited() -> None:
    """What a process does that was started so."""
    block(set(filter(None, os.environ.get(NAMES, "").split(","))))


def pytest_addoption(parser):  # type: ignore[no-untyped-def]
    parser.addoption("--blocked", default="", help="comma-separated packages whose import fails")


def pytest_configure(config):  # type: ignore[no-untyped-def]
    names = {name for name in config.getoption("--blocked").split(",") if name}
    if names:
        block(names)
        block_in_children(names)


def pytest_report_header(config):  # type: ignore[no-untyped-def]
    return f"blocked imports: {config.getoption('--blocked') or 'none'}"
