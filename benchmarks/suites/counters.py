"""The counters of every case, taken once a commit and handed to all tracks (asv calls this a setup_cache).

In a module of its own, since asv names the cache by module and line, and for a package's __init__ by its absolute path.
"""

from __future__ import annotations

import sys

from cases import all_cases, figures


def take_counters() -> dict[str, dict[str, int] | None]:
    """Counters of every case, or None where the installed commit cannot run it or gets it wrong."""
    found: dict[str, dict[str, int] | None] = {}
    for case in all_cases():
        try:
            found[case.name] = figures(case)
        except Exception as error:  # an older commit may lack the package; HEAD is gated by `ci/gate.py counters`
            print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr)
            found[case.name] = None
    return found
