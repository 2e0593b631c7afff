"""The exact half of the gate: take the counters of this tree, read and write their record.

The record names the versions it was taken with: another torch has other operators, so figures are compared only where
the versions agree.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gate_asv import BENCHMARKS, THREADS, GateError
from gate_compare import Move, compare
from gate_expected import select

KERNELS = "kernels"
BY_AXIS = ("collectives.", "collective_bytes.")
CONSTRAINTS = Path(__file__).with_name("constraints-cpu.txt")

Counters = dict[str, dict[str, int]]


def versions() -> dict[str, str]:
    """What decides how many operators an operation is, and what it calls and imports: all that is pinned."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in re.findall(r"^([\w.-]+)==", CONSTRAINTS.read_text(), re.MULTILINE):
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "none"
    return found


def take(pattern: str = ".*") -> Counters:
    """Counters of the cases whose names match; GateError names every case that failed its check.

    Compiling the kernels takes as long as all the rest, so it is done beside it, in a process of its own.
    """
    names = [case.name for case in select(pattern)]
    if not any(name.startswith(f"{KERNELS}.") for name in names):
        taken, wrong = take_here(pattern, KERNELS, inverted=True)
        more, more_wrong = {}, []
    else:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "kernels.json"
            command = [sys.executable, "-W", "ignore", __file__, pattern, str(output)]
            beside = subprocess.Popen(command, env={**os.environ, **THREADS})
            taken, wrong = take_here(pattern, KERNELS, inverted=True)
            if beside.wait() != 0:
                raise GateError("the process that compiles the kernels died; its message is above")
            more, more_wrong = json.loads(output.read_text())
    if wrong or more_wrong:
        raise GateError("no figures without a right result:\n  " + "\n  ".join([*wrong, *more_wrong]))
    return {**taken, **more}


def take_here(pattern: str, package: str, *, inverted: bool) -> tuple[Counters, list[str]]:
    """Counters of the matching cases of one package (inverted: of all others), and what went wrong."""
    os.environ.update(THREADS)
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    import torch
    from cases import all_cases, figures

    torch.set_num_threads(1)
    taken: Counters = {}
    wrong = []
    for case in all_cases():
        if (case.package == package) == inverted or not re.search(pattern, case.name):
            continue
        try:
            taken[case.name] = figures(case)
        except Exception as error:
            wrong.append(f"{case.name}: {type(error).__name__}: {str(error)[-800:]}")
    return taken, wrong


def flatten(counters: Counters) -> dict[str, float]:
    """{"case": {"ops": 3}} -> {"case/ops": 3}."""
    return {f"{case}/{name}": value for case, figures in counters.items() for name, value in figures.items()}


def compare_counters(recorded: Counters, head: Counters, limit_of: Callable[[str], float]) -> list[Move]:
    """Every counter of either side.

    Counters by mesh axis exist only where something is sent, so one that a side of a recorded case has not is 0 there.
    Any other counter that a recorded case has not is "added", and fails until it is recorded.

    >>> compare_counters({"a": {"ops": 5}}, {"a": {"ops": 5, "collectives.shard": 2}}, lambda key: 1.02)[1].verdict
    'regressed'
    """
    both = [with_zeros(side, of=(recorded, head)) for side in (recorded, head)]
    moves = compare(*map(flatten, both), limit_of)
    return [
        replace(move, verdict="added") if move.verdict == "new" and move.key.partition("/")[0] in recorded else move
        for move in moves
    ]


def with_zeros(side: Counters, *, of: tuple[Counters, Counters]) -> Counters:
    """One side of a comparison, with 0 for the counters by mesh axis that only the other side's case has."""
    filled = {}
    for case, figures in side.items():
        names = {name: None for other in of for name in other.get(case, {}) if name.startswith(BY_AXIS)}
        filled[case] = {**figures, **{name: 0 for name in names if name not in figures}}
    return filled


class OtherVersionsError(GateError):
    """The record was taken with other versions than those at hand; the message names which."""


def differing(recorded: dict[str, str], here: dict[str, str]) -> str:
    """Which versions differ, for a message; "" when none does.

    >>> differing({"python": "3.11", "torch": "2.13.0"}, {"python": "3.12", "torch": "2.13.0"})
    'python is 3.12 here and was 3.11'
    """
    names = [name for name in {**recorded, **here} if recorded.get(name) != here.get(name)]
    return ", ".join(f"{name} is {here.get(name, 'none')} here and was {recorded.get(name, 'none')}" for name in names)


def read_record(path: Path, pattern: str = ".*") -> Counters:
    """The recorded counters of matching cases; OtherVersionsError unless they were taken with the versions at hand."""
    if not path.exists():
        raise GateError(f"{path.name} does not exist: record the counters first with   python ci/gate.py record")
    tree: dict[str, Any] = json.loads(path.read_text())
    if different := differing(tree["versions"], versions()):
        raise OtherVersionsError(
            f"counters are not comparable with {path.name}: {different}. Compare where it was taken (Python "
            f"{tree['versions']['python']}, no GPU, ./ci/nox -s gate), or record anew after a change of versions"
        )
    return {case: figures for case, figures in tree["cases"].items() if re.search(pattern, case)}


def record_counters(path: Path) -> None:
    """Take all counters and write them as the record, whole or not at all."""
    tree = {"versions": versions(), "cases": take()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(tree, indent=1) + "\n")
    temporary.replace(path)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(take_here(sys.argv[1], KERNELS, inverted=False)))
