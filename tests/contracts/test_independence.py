"""No package imports a sibling; only gem_pipelines imports packages. `nox -s alone` runs their tests that way."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {path.name: path for path in [*ROOT.glob("packages/*/gem_*"), ROOT / "datasets" / "gem_datasets"]}
GEMLINE = {*PACKAGES, "gem_pipelines"}


def imported(path: Path) -> dict[str, int]:
    """Top-level names that a file imports, with the line."""
    names: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0]: node.lineno for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names[node.module.partition(".")[0]] = node.lineno
    return names


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_imports_no_sibling(name):
    siblings = GEMLINE - {name}
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in PACKAGES[name].rglob("*.py")
        for module, line in imported(path).items()
        if module in siblings
    ]
    assert found == []


# Without a GPU, and without what each package does not need, it imports in a fresh process.
NOT_NEEDED = {
    name: set(entry["not_needed"]) for name, entry in tomllib.loads((ROOT / "ci" / "alone.toml").read_text()).items()
}


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_imports_alone(name):
    blocked = (GEMLINE - {name}) | NOT_NEEDED[name]
    module = f"{name}.interface" if (PACKAGES[name] / "interface.py").exists() else name
    code = f"import blocked_imports; blocked_imports.block({blocked!r}); import {name}, {module}"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "ci")}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
