"""The performance gate: fails a change that makes something larger or slower.

    python ci/gate.py counters             exact figures of this tree against benchmarks/results/counters.json
    python ci/gate.py times [--cases RE]   CPU times: asv continuous of GATE_BASE against HEAD, on this machine
    python ci/gate.py noise                measure the noise of the times and write their limits to ci/limits.toml
    python ci/gate.py record               record counters, and HEAD's times for this machine; commit the files
    python ci/gate.py publish              asv's pages from benchmarks/results/, and that nothing is missing on them

Exit code 0: nothing regressed (improvements are named, with how to record them); 1: something did, or vanished;
2: the gate could not do its work. `nox -s gate` runs the counters, `nox -s bench` the whole. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from gate_asv import RESULTS, ROOT, GateError
from gate_compare import Move, compare, failed, summary, table
from gate_expected import select
from gate_limits import read_limits
from gate_times import ROUNDS

LIMITS = ROOT / "ci" / "limits.toml"
COUNTERS = RESULTS / "counters.json"
RECORD = "python ci/gate.py record"
EMPTY: Mapping[str, Mapping[str, str]] = {}
HINTS = {
    "new": f"New: not gated until recorded:   {RECORD}",
    "added": f"Added: the record of the case does not have this figure. Meant? Then record:   {RECORD}",
    "improved": f"Improved: keep it by recording it:   {RECORD}   (then commit benchmarks/results)",
    "gone": "Gone: a figure of the record is no longer taken. Meant? Then record.",
}


def report(moves: list[Move], *, unit: str, verbose: bool, left_out: Mapping[str, Mapping[str, str]] = EMPTY) -> int:
    """Print the table and, by kind, what is left out of it and why; 1 if the gate fails."""

    def text(value: float) -> str:
        return f"{value:,.0f}" if unit == "count" else f"{value:.3f} x"

    if shown := table(moves, unit=text, show_same=verbose):
        print(shown)
    for kind, reasons in left_out.items():
        for name, reason in reasons.items():
            print(f"{kind}: {name}: {reason}")
    print(summary(moves), *(f"{len(reasons)} {kind}" for kind, reasons in left_out.items() if reasons), sep=", ")
    for verdict, hint in HINTS.items():
        if any(move.verdict == verdict for move in moves):
            print(hint)
    return 1 if failed(moves) else 0


def counters(arguments: argparse.Namespace) -> int:
    """Take all counters of this tree and compare them with the record."""
    from gate_counters import OtherVersionsError, compare_counters, read_record, take

    select(arguments.cases)
    try:
        recorded = read_record(Path(arguments.record), arguments.cases)
    except OtherVersionsError as error:
        if not arguments.other_versions:
            raise
        print(f"checked, not compared: {len(take(arguments.cases))} cases gave right results; {error}")
        return 0
    moves = compare_counters(recorded, take(arguments.cases), read_limits(LIMITS).of_counter)
    return report(moves, unit="count", verbose=arguments.verbose)


def times(arguments: argparse.Namespace) -> int:
    """Compare the times of two commits on this machine, in multiples of the base's calls."""
    from gate_times import compare_commits, estimates, newest_recorded_ancestor, warn_about_uncommitted

    repo = Path(arguments.repo).resolve()
    limits = read_limits(LIMITS)
    base = arguments.base or os.environ.get("GATE_BASE") or newest_recorded_ancestor(repo)
    warn_about_uncommitted(repo)
    found = compare_commits(repo, base, arguments.head, cases=arguments.cases, rounds=arguments.rounds)
    moves = compare(estimates(found.base), estimates(found.head), limits.of_time)
    left_out = {"not compared": found.not_compared, "lost": found.lost}
    code = report(moves, unit="calls of the base", verbose=True, left_out=left_out)
    if found.lost and not code:
        raise GateError(f"{len(found.lost)} cases have no time, or not all of it: {', '.join(found.lost)}")
    return code


def noise(arguments: argparse.Namespace) -> int:
    """Measure noise, write limits."""
    from gate_limits import write_times
    from gate_times import measure_noise

    found = measure_noise(cases=arguments.cases, runs=arguments.runs, rounds=arguments.rounds)
    write_times(LIMITS, found)
    print(f"wrote the limits of {len(found)} times to {LIMITS.relative_to(ROOT)}")
    return 0


def record(arguments: argparse.Namespace) -> int:
    """Write the counters of this tree and, unless --counters-only, the times of HEAD on this machine."""
    from gate_counters import record_counters
    from gate_times import record_times, warn_about_uncommitted

    if not arguments.counters_only:
        warn_about_uncommitted(ROOT)
    record_counters(COUNTERS)
    written = [COUNTERS] if arguments.counters_only else [COUNTERS, *record_times()]
    print("recorded; commit:", *(str(path.relative_to(ROOT)) for path in written))
    return 0


def publish(arguments: argparse.Namespace) -> int:
    """Build the pages and check that every recorded result is on them."""
    from gate_publish import publish_pages

    missing = publish_pages(
        Path(arguments.results), Path(arguments.html), Path(arguments.repo), records=Path(arguments.records)
    )
    print(*missing, sep="\n")
    print(f"{arguments.html}: " + (f"{len(missing)} recorded values are missing" if missing else "complete"))
    return 1 if missing else 0


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("counters")
    one.add_argument("--cases", default=".*", help="regular expression of case names")
    one.add_argument("--record", default=str(COUNTERS), help="the record to compare with")
    one.add_argument("--verbose", action="store_true", help="also show what has not moved")
    one.add_argument(
        "--other-versions",
        action="store_true",
        help="where the record was taken with other versions: check results, say that nothing is compared, pass",
    )
    two = commands.add_parser("times")
    two.add_argument("--cases", default=".*", help="regular expression of case names")
    two.add_argument("--base", help="commit; default GATE_BASE, then the newest ancestor with recorded results")
    two.add_argument("--head", default="HEAD")
    two.add_argument("--repo", default=str(ROOT), help="repository whose commits are measured")
    two.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds")
    three = commands.add_parser("noise")
    three.add_argument("--cases", default=".*", help="regular expression of case names")
    three.add_argument("--runs", type=int, default=3, help="comparisons of equal commits")
    three.add_argument("--rounds", type=int, default=ROUNDS, help="interleaved rounds; as many as the gate takes")
    four = commands.add_parser("record")
    four.add_argument("--counters-only", action="store_true")
    five = commands.add_parser("publish")
    five.add_argument("--results", default=str(RESULTS))
    five.add_argument("--records", default=str(ROOT / "benchmarks" / "gpu" / "records"))
    five.add_argument("--html", default=str(ROOT / "benchmarks" / "html"))
    five.add_argument("--repo", default=str(ROOT))
    arguments = parser.parse_args(given)
    try:
        code = globals()[arguments.command](arguments)
    except (GateError, ValueError) as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2
    except Exception:  # whatever it is, it is no regression: exit code 1 must mean one
        traceback.print_exc()
        print("gate: the gate itself failed", file=sys.stderr)
        return 2
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
