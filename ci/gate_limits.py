"""ci/limits.toml: how far a figure may move, per case, each with the reason.

    [default]                      counters and times without an entry of their own
    [counters."case/counter"]      ratio, reason: written by hand
    [times."case"]                 ratio, reason: written by `ci/gate.py noise`, below the MARK; do not edit

How a time's ratio follows from noise: see `ratio_from_noise`.
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "# ---- measured by `ci/gate.py noise`; do not edit below ----"
SMALLEST_TIME_RATIO = 1.03
SPREADS = 5.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Ratios by key, and the defaults."""

    default_counters: float
    default_times: float
    counters: Mapping[str, float]
    times: Mapping[str, float]

    def of_counter(self, key: str) -> float:
        """Ratio of "<case>/<counter>"."""
        return self.counters.get(key, self.default_counters)

    def of_time(self, case: str) -> float:
        """Ratio of the time of a case."""
        return self.times.get(case, self.default_times)


def is_ratio(value: object) -> bool:
    """Whether this can be a limit: a finite number above 1 (inf and nan would let everything pass)."""
    return isinstance(value, int | float) and math.isfinite(value) and value > 1


def read_limits(path: Path) -> Limits:
    """Read and check the file; ValueError names the entry without a ratio above 1 or without a reason."""
    tree = tomllib.loads(path.read_text())
    default = tree.get("default", {})
    for section in ("counters", "times"):
        if not is_ratio(default.get(section)):
            raise ValueError(f"{path.name}: default.{section} must be a ratio above 1, is {default.get(section)}")
    for section in ("counters", "times"):
        for key, entry in tree.get(section, {}).items():
            if not (is_ratio(entry.get("ratio")) and entry.get("reason")):
                raise ValueError(f"{path.name}: {section}.{key!r} needs a ratio above 1 and a reason, has {entry}")
    ratios = {
        section: {key: float(entry["ratio"]) for key, entry in tree.get(section, {}).items()}
        for section in ("counters", "times")
    }
    return Limits(
        default_counters=float(default["counters"]),
        default_times=float(default["times"]),
        counters=ratios["counters"],
        times=ratios["times"],
    )


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Ratios that comparisons of equal code gave, of one case.

    seen     of the comparisons made
    drawn    of further ones, put together from the same rounds (gate_times.put_together): they show the spread of what
             was measured in those rounds, and nothing of what other rounds would have given
    rounds   how many rounds those were, both sides together
    """

    seen: Sequence[float]
    drawn: Sequence[float] = ()
    rounds: int = 0

    def __str__(self) -> str:
        made = f"{len(self.seen)} comparison{'s' if len(self.seen) > 1 else ''} of equal code"
        return made + (f", {len(self.drawn)} more put together from {self.rounds} rounds" if self.drawn else "")


def ratio_from_noise(noise: Noise) -> tuple[float, str]:
    """(limit, reason) from the ratios that comparisons of equal code gave.

    The limit is 1 + the larger of SPREADS standard deviations of log(ratio) around 0 and 1.25 times the largest
    departure seen, and never below SMALLEST_TIME_RATIO. Five deviations: a gate of 30 cases run 20 times makes 600
    comparisons, and noise of a shared machine has longer tails than the normal law.

    >>> ratio_from_noise(Noise(seen=[1.0, 1.01, 0.99, 1.005]))
    (1.039, '4 comparisons of equal code: deviation 0.75%, largest 1.01%')
    """
    logs = [math.log(ratio) for ratio in (*noise.seen, *noise.drawn)]
    deviation = math.sqrt(statistics.fmean(log * log for log in logs))
    largest = max(abs(log) for log in logs)
    limit = max(math.exp(max(SPREADS * deviation, 1.25 * largest)), SMALLEST_TIME_RATIO)
    limit = math.ceil(limit * 1000) / 1000
    return limit, f"{noise}: deviation {deviation:.2%}, largest {math.expm1(largest):.2%}"


def write_times(path: Path, noise: Mapping[str, Noise]) -> None:
    """Replace the entries of these cases in the measured part of the file; other cases keep theirs."""
    text = path.read_text()
    entries = {case: (entry["ratio"], entry["reason"]) for case, entry in tomllib.loads(text).get("times", {}).items()}
    entries |= {case: ratio_from_noise(measured) for case, measured in noise.items()}
    lines = [text.partition(MARK)[0].rstrip(), "", MARK, ""]
    for case, (limit, reason) in sorted(entries.items()):
        lines += [f'[times."{case}"]', f"ratio = {limit}", f'reason = "{reason}"', ""]
    path.write_text("\n".join(lines))
