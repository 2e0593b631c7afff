"""asv's view of the cases: a class per case with one time, and one with a track per counter. No other code.

asv asks for a module per package and names to find in it; `fill` makes them from the list of cases. Times are CPU times
of one thread. In the gate (GEMLINE_BASE names a checkout of the base) they are multiples of the base's call, measured
call by call beside it (companion.py); otherwise seconds, corrected by a yardstick (timing.YardstickClock). asv passes
over a case that the base cannot run without a word, so its reason goes into a file of folder GEMLINE_REASONS. Inputs
are made and checked once a process, counters of all cases taken once a commit.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases import Case, all_cases, prepare
from companion import ROUNDS, CannotPrepareError, Companion, PairedClock, package_folders
from timing import YardstickClock, keep_memory

from suites.counters import take_counters

# asv imports this once and forks a process per benchmark (`--launch-method forkserver`), which forks one more for the
# base: what both need of other projects is loaded here, where it costs once. Nothing of ours: see companion.py.
for _name in ("torch", "torchrec"):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)

COUNTERS = Path(__file__).resolve().parents[1] / "results" / "counters.json"


class Timed:
    """Base of the classes with a time."""

    _prepared: Any = None
    _case: Case

    rounds = ROUNDS
    warmup_time = 0.05
    number = 1
    timeout = 300

    def setup(self, *_: Any) -> None:
        if self._prepared is None:
            keep_memory()
            base = os.environ.get("GEMLINE_BASE")
            companion = self.companion(Path(base)) if base else None
            self._prepared = prepare(self._case)
            self.timer = PairedClock(companion) if companion else YardstickClock()  # asv reads it after setup

    def companion(self, base: Path) -> Companion:
        """The base's version of the case, on the core that this process shall stay on too."""
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        case = self._case

        def prepared() -> Callable[[], object]:
            inputs = prepare(case)
            return lambda: case.run(inputs)

        try:
            return Companion(prepared, package_folders(base))
        except CannotPrepareError as error:
            if reasons := os.environ.get("GEMLINE_REASONS"):
                (Path(reasons) / case.name).write_text(str(error))
            raise NotImplementedError(
                f"the base cannot run {case.name}, so there is nothing to compare: {error}"
            ) from None

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

    method = named(time_cpu, "time_cpu", f"{case.name}.time_cpu", f"cpu {case.version}")
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
