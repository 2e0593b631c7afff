"""What a benchmark case is, and how it is run: first the check, then the figures.

A case is data: how to make its inputs, what to call, how to tell that the result is right. The runners (asv in suites/,
pytest-benchmark in desk/, the gate in ci/gate.py) take cases from the one list in cases/__init__.py and add nothing but
their way of timing. Everything a case needs is imported inside its functions, so the list can be read where a package
is absent or older, and both commits of a comparison are measured by the same ruler.

Why counters beside times: on a shared machine a 5 % slower step drowns in noise, while its operations, bytes, FLOPs and
Python calls are the same numbers on every run. What they cannot see (a slower kernel behind the same operation) is
what the times are for.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NAME = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One benchmark.

    name     "<package>.<what>", identifiers both, since asv makes a module and a class of them; jagged inputs end in
             _ragged (lengths differ) or _uniform (all alike), and such cases come in pairs
    make     builds the inputs from a fixed seed
    run      the thing measured; called many times with the same inputs
    check    raises AssertionError unless the result is right; called before any figure is taken
    count    exact figures of one call, (inputs, run) -> {"ops": 12, ...}; larger is worse
    formula  further exact figures that follow from the inputs, such as FLOPs of real lengths
    repeat   calls timed in a process; the gate takes several processes
    timed    False where a time says nothing (a cross-compiled kernel)
    version  raise it when the case measures something else than before: old results are then not compared
    """

    name: str
    make: Callable[[], Any]
    run: Callable[[Any], Any]
    check: Callable[[Any, Any], None]
    count: Callable[[Any, Callable[[Any], Any]], dict[str, int]]
    formula: Callable[[Any], dict[str, int]] | None = None
    repeat: int = 200
    timed: bool = True
    version: int = 1

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"case name {self.name!r}: expected two identifiers in small letters with a dot between")

    @property
    def package(self) -> str:
        """The part before the dot."""
        return self.name.partition(".")[0]


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for a case's files, two levels below the root whatever TMPDIR says: resolving costs calls a level."""
    return tempfile.TemporaryDirectory(dir="/tmp")


def prepare(case: Case) -> Any:
    """Make the inputs and check one result against the reference; returns the inputs, warmed up."""
    inputs = case.make()
    case.check(inputs, case.run(inputs))
    return inputs


def figures(case: Case) -> dict[str, int]:
    """All exact figures of a case, after its check."""
    inputs = prepare(case)
    return {**case.count(inputs, case.run), **(case.formula(inputs) if case.formula else {})}
