"""What users of a promised class can reach by way of it is frozen, too (ci/surface_lines.py)."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "ci"))
surface = importlib.import_module("surface")
sys.path.remove(str(ROOT / "ci"))

KEPT = """
class _Base:
    def __init__(self, rows: int) -> None:
        self.rows = rows
class Loader(_Base):
    rank: int
    def __init__(self, windows: tuple[int, ...], *, size: int = 0) -> None:
        super().__init__(size)
        self.windows = windows
        self.size: int = size + 1
        self.first, self._last = 0, 1
        if size:
            self.rank = size
            other.depth = size
    def start(self) -> None:
        self.started = True
"""


@pytest.mark.parametrize(
    ("edit", "move"),
    [
        (("self.windows", "self.spans"), "major"),
        (("self.windows = windows", "self.windows = list(windows)"), "major"),  # not what was given any more
        (("self.size: int", "self.size: float"), "major"),
        (("self.first", "self.zeroth"), "major"),
        (("self.first", "self._first"), "major"),
        (("self._last", "self._end"), "none"),
        (("self._last", "self.last"), "minor"),
        (("self.rows", "self.lines"), "major"),  # of a base without lines
        (("other.depth", "other.width"), "none"),
        (("self.rank = size", "pass"), "none"),  # the class has it
        (("self.started", "self.begun"), "none"),  # not there before
    ],
)
def test_what_init_sets_is_part_of_a_class(edit, move):
    changed = KEPT.replace(*edit)
    assert changed != KEPT
    assert surface.required_move(surface.surface(KEPT), surface.surface(changed))[0] == move


REACHED = {
    "gem_attention": [
        "testing_cases Case.qk_dim",  # Quirks.refuses is given it
        "block_testing BlockCase.projection",
        "testing Listed.skipped",
    ],
    "gem_comm": ["counted Traffic.calls"],
    "gem_data": [
        "streaming StreamingLoader.windows",  # the training job reads it, and what it holds
        "streaming StreamingLoader.window",
        "streaming TimeWindow.rows",
        "loader ArrowLoader.batches_per_epoch",
        "rows Events.columns",
        "rows Jagged.values",
        "collate Part.take",
    ],
}


@pytest.mark.parametrize("name", REACHED)
def test_a_member_that_users_get_by_way_of_another_class_is_frozen(tmp_path, name):
    """A copy of the package with these words renamed wherever the module has them."""
    package = tmp_path / "packages" / "x" / name
    shutil.copytree(surface.interfaces()[name].parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "surface.toml", tmp_path / "ci")
    for module, member in map(str.split, REACHED[name]):
        path, word = package / f"{module}.py", member.partition(".")[2]
        path.write_text(re.sub(rf"\b{word}\b(?!=)", f"{word}_renamed", path.read_text()))
    frozen = surface.frozen_surface((surface.SNAPSHOTS / f"{name}.txt").read_text()).lines
    why = surface.required_move(frozen, surface.read_surface(package / "interface.py").lines)[1]
    for member in (each.split()[1] for each in REACHED[name]):
        assert any(line.startswith("- ") and re.search(rf"\b{member}\b", line) for line in why), member
