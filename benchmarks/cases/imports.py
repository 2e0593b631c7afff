"""How heavy each package is to import: modules loaded in a fresh interpreter (exact), and CPU seconds of our own part.

Torch and TorchRec take most of the seconds that an import takes, and none of that is ours. So the time is taken in a
process forked from one that has them: what is left is the package's own modules and the smaller libraries they load. A
fork also finds the packages where its parent does, which a fresh interpreter would not: the gate's companion has the
base's on its path.
"""

from __future__ import annotations

import contextlib
import importlib
import os
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


def make(*, module: str) -> str:
    """Load what is not measured; returns the module's name."""
    for name in ("torch", "torchrec"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return module


def run(module: str) -> str:
    """Import the module in a forked process; what that says of it: its name, or the error."""
    answers, answer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            for name in [name for name in sys.modules if name.partition(".")[0].startswith("gem_")]:
                del sys.modules[name]  # another case of this process may have loaded it
            said = importlib.import_module(module).__name__
        except BaseException as error:
            said = repr(error)
        os.write(answer, said.encode()[:4096])
        os._exit(0)
    os.close(answer)
    with os.fdopen(answers, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(process, 0)
    return said


def check(module: str, result: str) -> None:
    assert result == module, result


def count(module: str, run: Any) -> dict[str, int]:
    """Modules that a fresh interpreter has after the import."""
    code = f"import sys, {module} as m; print(m.__name__, len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, modules = done.stdout.split()[-2:]
    assert name == module
    assert int(modules) > 30  # the interpreter alone has about that many
    return {"modules": int(modules)}


CASES = tuple(
    Case(
        name=f"imports.{name}",
        make=partial(make, module=module),
        run=run,
        check=check,
        count=count,
        repeat=20,
        version=2,
    )
    for name, module in PACKAGES.items()
)
