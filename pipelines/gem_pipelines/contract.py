"""Which interface versions of the packages this pipeline was written against.

Checked when a run starts, and written into every checkpoint. The rule is that of the major number must be equal,
the minor number at least what is required.
"""

from __future__ import annotations

import importlib

from gem_pipelines.errors import RunError

REQUIRED: dict[str, tuple[int, int]] = {
    "gem_data": (1, 4),
    "gem_embeddings": (1, 3),
    "gem_attention": (1, 1),
    "gem_comm": (1, 1),
}


def installed_versions() -> dict[str, tuple[int, int]]:
    """Package -> the interface version it declares."""
    return {name: importlib.import_module(f"{name}.interface").INTERFACE_VERSION for name in REQUIRED}


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


def _dotted(version: tuple[int, int] | None) -> str:
    return "none" if version is None else ".".join(map(str, version))
