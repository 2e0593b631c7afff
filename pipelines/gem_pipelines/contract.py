"""Which interface versions of the packages this pipeline was written against.

Checked before a command imports anything of them, so that a package of another version is named, and not the first
of its names that an import misses; and written into every checkpoint. The rule is that of the major number must be
equal, the minor number at least what is required.

The versions are read from the text of interface.py where it was not imported yet: 35 ms, instead of the seconds that
torch and TorchRec take to load.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from gem_pipelines.errors import RunError

REQUIRED: dict[str, tuple[int, int]] = {
    "gem_data": (1, 8),
    "gem_embeddings": (1, 7),
    "gem_attention": (1, 2),
    "gem_comm": (1, 3),
}


def installed_versions() -> dict[str, tuple[int, int]]:
    """Package -> the interface version it declares, of those that are installed."""
    return {name: version for name in REQUIRED if (version := _installed_version(name)) is not None}


def _installed_version(name: str) -> tuple[int, int] | None:
    loaded = sys.modules.get(f"{name}.interface")
    if loaded is not None:
        major, minor = loaded.INTERFACE_VERSION
        return int(major), int(minor)
    if importlib.util.find_spec(name) is None:
        return None
    spec = importlib.util.find_spec(f"{name}.interface")
    source = getattr(spec.loader, "get_source", lambda _: None)(spec.name) if spec is not None else None
    for node in ast.parse(source or "").body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "INTERFACE_VERSION":
            major, minor = ast.literal_eval(node.value)
            return int(major), int(minor)
    raise RunError(f"package {name} is installed, but its interface.py declares no INTERFACE_VERSION = (major, minor)")


def check_versions(found: dict[str, tuple[int, int]], required: dict[str, tuple[int, int]] | None = None) -> None:
    """Raise RunError naming every package whose version does not satisfy the requirement."""
    required = REQUIRED if required is None else required
    wrong = [
        f"{name}: interface {_dotted(found.get(name))} is installed, this pipeline needs {_dotted(need)} "
        f"(same major, minor at least {need[1]})"
        for name, need in required.items()
        if name not in found or found[name][0] != need[0] or found[name][1] < need[1]
    ]
    if wrong:
        raise RunError("the installed packages do not fit together:\n  " + "\n  ".join(wrong))


def compare_versions(stored: Mapping[str, Any], found: Mapping[str, tuple[int, int]]) -> tuple[list[str], list[str]]:
    """(what forbids using what was stored, what is only worth saying), one line a package.

    Another major version forbids, as does a stored one that is none; another minor one, and a package that is in one
    of the two only, are said: whether the tensors still fit is found out by comparing them.

    Example: stored {"gem_data": [1, 6]}, found {"gem_data": (1, 8), "gem_comm": (1, 2)} forbid nothing, and say that
    gem_data was 1.6 and is 1.7, and that of gem_comm no version is stored.
    """
    forbidden, said = [], []
    for name in sorted(stored.keys() | found.keys()):
        if name not in stored:
            said.append(f"interface {name}: no version is stored, installed {_dotted(found[name])}")
            continue
        was = stored[name]
        if not (isinstance(was, list | tuple) and len(was) == 2 and all(type(number) is int for number in was)):
            forbidden.append(f"interface {name}: stored {was!r}, which is no version [major, minor]")
            continue
        line = f"interface {name}: stored {was[0]}.{was[1]}, installed {_dotted(found.get(name))}"
        if name in found and found[name][0] != was[0]:
            forbidden.append(f"{line} (needed {_dotted(REQUIRED.get(name))})")
        elif found.get(name) != tuple(was):
            said.append(line)
    return forbidden, said


def _dotted(version: tuple[int, int] | None) -> str:
    return "none" if version is None else ".".join(map(str, version))
