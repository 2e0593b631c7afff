"""Numbers as a person reads them. What is undefined or was not recorded says so, and never looks like a number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

UNDEFINED = "undefined"
UNKNOWN = "not recorded"


def number(value: Any) -> float:
    """The value as a float, NaN if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value)


def plain(value: Any, digits: int = 4) -> str:
    """A number to `digits` decimals, or "undefined"."""
    value = number(value)
    return f"{value:.{digits}f}" if math.isfinite(value) else UNDEFINED


def count(value: Any) -> str:
    """A whole number with thousands separators, or "not recorded"."""
    value = number(value)
    return f"{value:,.0f}" if math.isfinite(value) else UNKNOWN


def quantity(value: Any, unit: str = "") -> str:
    """Three significant digits with k, M, G, T: 1234567 -> 1.23 M; or "not recorded"."""
    value = number(value)
    if not math.isfinite(value):
        return UNKNOWN
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".strip()


def duration(seconds: Any) -> str:
    """3725 -> 1 h 02 min 05 s; below a minute 12.3 s; or "not recorded"."""
    seconds = number(seconds)
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min {rest:02d} s" if hours else f"{minutes} min {rest:02d} s"


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested JSON with dotted names. A list of plain values is one leaf; a list of dicts is numbered."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        for index, inner in enumerate(value):
            yield from flatten(inner, f"{prefix}.{index}")
    else:
        yield prefix, value
