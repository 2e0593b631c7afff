"""Python imports this when it starts, where blocked_imports.py put its folder first on PYTHONPATH: the processes that
tests start refuse the same packages. A sitecustomize of the environment, which this one hides, runs after it.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run(spec) -> None:  # type: ignore[no-untyped-def]
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


_run(spec_from_file_location("blocked_imports", os.path.join(os.path.dirname(_HERE), "blocked_imports.py")))
sys.modules["blocked_imports"].block_inherited()
_hidden = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != _HERE])
if _hidden is not None:
    _run(_hidden)
