"""Which times a comparison must have, and what became of those that it has not.

asv loses measurements in silence: a commit whose wheel was not built has no results, a case that fails is left out, one
that fails in a round loses the rounds before it, one that skips itself looks like a success. So what must be there is
computed beforehand, from the working tree's list of cases, and the samples are counted. A case may stay without a time
for one reason only: the base cannot run it, and its own list of cases does not have it, or has another version of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gate_asv import BENCHMARKS, GateError

Samples = dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Samples of both sides, of the cases that have all of them, and the reasons of the others.

    not_compared   case -> why there is nothing to compare with, rightly
    lost           case -> why there is no time although there must be one: the gate has not done its work
    """

    base: Samples
    head: Samples
    not_compared: dict[str, str]
    lost: dict[str, str]


def select(pattern: str) -> list[Any]:
    """The cases of this tree whose names a regular expression finds, timed or not; GateError when it finds none."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(BENCHMARKS))
    from cases import all_cases

    try:
        found = [case for case in all_cases() if re.search(pattern, case.name)]
    except re.error as error:
        raise GateError(f"--cases {pattern!r} is no regular expression: {error}") from None
    if not found:
        known = sorted({case.package for case in all_cases()})
        raise GateError(f"--cases {pattern!r} matches no case; names are <package>.<case>, packages {', '.join(known)}")
    return found


def select_timed(pattern: str) -> list[Any]:
    """As `select`, without the cases that have no time."""
    timed = [case for case in select(pattern) if case.timed]
    if not timed:
        raise GateError(f"--cases {pattern!r} matches no case with a time, only such with counters alone")
    return timed


def versions_at(checkout: Path) -> dict[str, int]:
    """Case -> version, of the list of cases that a checkout has; {} where it has none yet."""
    folder = checkout / "benchmarks"
    if not (folder / "cases" / "__init__.py").exists():
        return {}
    code = "import json, cases; print(json.dumps({c.name: getattr(c, 'version', 1) for c in cases.all_cases()}))"
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise GateError(f"the base's list of cases cannot be read:\n{done.stderr.strip()[-2000:]}")
    found: dict[str, int] = json.loads(done.stdout)
    return found


def reasons_in(folder: Path) -> dict[str, str]:
    """Case -> the last line of what the base said when it could not run it (suites/__init__.py writes it)."""
    return {path.name: path.read_text().strip().splitlines()[-1] for path in folder.iterdir()}


def sort_out(
    expected: list[Any],
    base: Samples,
    head: Samples,
    *,
    rounds: int,
    reasons: Mapping[str, str],
    at_base: Mapping[str, int],
) -> Comparison:
    """What is compared, what rightly not, what is lost. expected: the cases; at_base: versions in the base's list."""
    for side, samples in (("base", base), ("head", head)):
        if not samples and not reasons:
            raise GateError(
                f"nothing was measured of the {side}: its wheel was not built, or its packages not installed, or the "
                "suites could not be imported, or every case failed; asv's output above says which"
            )
    comparison = Comparison(base={}, head={}, not_compared={}, lost={})
    for case in expected:
        name, wanted = case.name, rounds * case.repeat
        there = len(base.get(name, ())), len(head.get(name, ()))
        if there == (wanted, wanted):
            comparison.base[name], comparison.head[name] = base[name], head[name]
        elif name not in reasons:
            comparison.lost[name] = (
                f"{wanted} samples a side wanted, base has {there[0]}, head {there[1]}: it failed, see above"
            )
        elif there == (0, 0) and at_base.get(name) != case.version:
            what = f"has version {at_base[name]} of it" if name in at_base else "does not have it"
            comparison.not_compared[name] = f"the base {what} and cannot run this one: {reasons[name]}"
        else:
            comparison.lost[name] = (
                f"the base has this case and cannot run it: {reasons[name]} "
                "(it measures something else now? Then raise its version)"
            )
    return comparison
