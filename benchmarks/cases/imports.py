"""How heavy each package is to import, in a process of its own: modules loaded (exact) and CPU seconds (timed)."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

from cases.case import Case

PACKAGES = {
    "attention": "gem_attention.api",
    "comm": "gem_comm.api",
    "data": "gem_data.api",
    "datasets": "gem_datasets",
    "embeddings": "gem_embeddings.api",
    "command_line": "gem_pipelines.cli",
}


def run(memory: dict[str, Any]) -> dict[str, Any]:
    """Import the module in a fresh interpreter; keeps and returns what it printed."""
    code = f"import sys, {memory['module']} as m; print(m.__name__, len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    memory["name"], modules = done.stdout.split()[-2:]
    memory["modules"] = int(modules)
    return memory


def check(memory: dict[str, Any], result: dict[str, Any]) -> None:
    assert result["name"] == memory["module"]
    assert result["modules"] > 30  # the interpreter alone has about that many


def count(memory: dict[str, Any], run: Any) -> dict[str, int]:
    """From the run that the check has seen: a second import costs seconds and gives the same number."""
    return {"modules": memory["modules"]}


CASES = tuple(
    Case(name=f"imports.{name}", make=partial(dict, module=module), run=run, check=check, count=count, repeat=3)
    for name, module in PACKAGES.items()
)
