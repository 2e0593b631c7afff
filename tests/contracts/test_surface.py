"""The version of every interface moves with its signatures (ci/surface.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("surface", ROOT / "ci" / "surface.py")
surface = importlib.util.module_from_spec(spec)
spec.loader.exec_module(surface)

BASE = """
INTERFACE_VERSION = (1, 0)
class Loader(Protocol):
    def epoch(self, n: int, *, seed: int = 0) -> Iterator: ...
@dataclass(frozen=True)
class Config:
    size: int
    depth: int = 2
def build(path: str) -> Loader: ...
"""


@pytest.mark.parametrize("name", sorted(surface.interfaces()))
def test_interface_is_as_frozen(name):
    source = surface.interfaces()[name].read_text()
    frozen = (surface.SNAPSHOTS / f"{name}.txt").read_text()
    assert surface.verdict(name, frozen, source) is None
    assert frozen == surface.frozen_text(source), "run: python ci/surface.py --update"


@pytest.mark.parametrize(
    ("edit", "version", "accepted"),
    [
        (("seed: int = 0", "seed: int = 0"), "(1, 0)", True),
        (("seed: int = 0", "seed: int = 0"), "(1, 1)", False),  # nothing changed, so nothing may move
        (("seed: int = 0", "generator: int = 0"), "(1, 1)", False),  # renamed keyword
        (("seed: int = 0", "generator: int = 0"), "(2, 0)", True),
        (("seed: int = 0", "seed: int = 1"), "(1, 1)", False),  # changed default
        (("depth: int = 2", "depth: int = 2\n    width: int = 3"), "(1, 0)", False),
        (("depth: int = 2", "depth: int = 2\n    width: int = 3"), "(1, 1)", True),  # new field with a default
        (("size: int", "size: int\n    width: int"), "(1, 1)", False),  # new field that callers must give
        (("size: int", "size: int\n    width: int"), "(2, 0)", True),
        (("path: str", "path: str, *, name: str"), "(1, 1)", False),  # new required parameter
        (("path: str", "path: str, *, name: str = ''"), "(1, 1)", True),
        (("def build", "def open(path: str) -> Loader: ...\ndef build"), "(1, 1)", True),  # new function
        (("def build", "def _build"), "(1, 1)", False),  # gone
    ],
)
def test_rule(edit, version, accepted):
    frozen = surface.frozen_text(BASE)
    changed = BASE.replace(*edit).replace("(1, 0)", version)
    assert (surface.verdict("gem_x", frozen, changed) is None) == accepted
