"""benchmarks/ and ci/ are folders of programs, not packages: their modules are found by path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
for folder in ("ci", "benchmarks"):
    if str(ROOT / folder) not in sys.path:
        sys.path.append(str(ROOT / folder))


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """A home without anything in it: asv keeps its machine file there."""
    path = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(path))
    return path
