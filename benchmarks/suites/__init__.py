"""asv's view of the cases: a class per case with one time, and one with a track per counter. No other code.

asv asks for a module per package and names to find in it; `fill` makes them from the list of cases. The time is CPU
time of this process and its children, corrected for the machine's speed of the moment (timing.YardstickClock); one
thread (ci/gate_asv.py sets the variables). Inputs are made and checked once a process, counters of all cases taken once
a commit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases import Case, all_cases, prepare
from timing import YardstickClock

from suites.counters import take_counters

ROUNDS = 4
COUNTERS = Path(__file__).resolve().parents[1] / "results" / "counters.json"


class Timed:
    """Base of the classes with a time."""

    _prepared: Any = None
    _case: Case

    rounds = ROUNDS
    warmup_time = 0.05
    number = 1
    timeout = 120

    def setup(self, *_: Any) -> None:
        if self._prepared is None:
            self.timer = YardstickClock()  # asv reads the attributes again after setup
            self._prepared = prepare(self._case)

    def run_case(self) -> None:
        self._case.run(self._prepared)


def fill(module: dict[str, Any], package: str) -> None:
    """Put the classes of a package's cases into a module's namespace."""
    recorded = json.loads(COUNTERS.read_text())["cases"] if COUNTERS.exists() else {}
    for case in (case for case in all_cases() if case.package == package):
        name = case.name.partition(".")[2]
        if case.timed:
            module[name] = timed_class(case, name, module["__name__"])
        module[name + "_counters"] = counters_class(case, name, module["__name__"], recorded.get(case.name, {}))


def named(function: Any, name: str, qualified: str, version: str) -> Any:
    """The function as the benchmark `name`, e.g. attention.hstu_eager_ragged.time_cpu."""
    function.__name__ = name
    function.benchmark_name = qualified
    function.version = version
    function.pretty_source = qualified
    return function


def timed_class(case: Case, name: str, module: str) -> type:
    def time_cpu(self: Timed) -> None:
        self.run_case()

    method = named(time_cpu, "time_cpu", f"{case.name}.time_cpu", f"yardstick {case.version}")
    return type(name, (Timed,), {"_case": case, "repeat": case.repeat, "time_cpu": method, "__module__": module})


def counters_class(case: Case, name: str, module: str, counters: dict[str, int]) -> type:
    """One track per counter of the record, fed by one `setup_cache` for the whole list."""
    members: dict[str, Any] = {"setup_cache": staticmethod(take_counters), "__module__": module, "timeout": 900}
    for counter in counters:

        def track(self: Any, found: dict[str, dict[str, int] | None], counter: str = counter) -> float:
            figures_of_case = found[case.name] or {}
            return figures_of_case.get(counter, float("nan"))

        attribute = "track_" + counter.replace(".", "_")
        method = named(track, attribute, f"{case.name}.{attribute}", f"count {case.version}")
        method.unit = "bytes" if "bytes" in counter else "count"
        members[attribute] = method
    return type(name + "_counters", (), members)
