"""The timed half of the gate: two commits on one machine in one job, by one ruler, through asv.

Rounds are interleaved by asv (base head, head base, ...), and each call of either stands between calls of the base in a
process beside it, so that a machine that slows down slows all alike. The ruler is the working tree's benchmarks; the
commits are installed one after the other into one environment.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gate_asv import (
    BENCHMARKS,
    CHECKOUT,
    LAUNCH,
    REASONS,
    RESULTS,
    ROOT,
    SCRATCH,
    GateError,
    Workplace,
    asv,
    continuous,
    git,
    load,
    merge,
    pattern_of,
    result_files,
    samples_of,
    write_machine,
)
from gate_expected import Comparison, Samples, reasons_in, select, select_timed, sort_out, versions_at
from gate_limits import Noise

if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))
from companion import ROUNDS


def newest_recorded_ancestor(repo: Path) -> str:
    """The newest commit before HEAD that has results of a machine without a GPU in the record (times are of CPUs)."""
    recorded = {path.name.partition("-")[0] for path in result_files(RESULTS) if gpu_of(path.parent) == "none"}
    for commit in git("rev-list", "--skip=1", "HEAD", repo=repo).split():
        if commit[:8] in recorded:
            return commit
    raise GateError("no ancestor of HEAD has recorded results: name a base, e.g. GATE_BASE=main~1" + shallowness(repo))


def gpu_of(machine: Path) -> str:
    """The GPU of a machine in the record."""
    return str(json.loads((machine / "machine.json").read_text())["gpu"])


def shallowness(repo: Path) -> str:
    """What to know of a clone without its whole history; "" of another."""
    if git("rev-parse", "--is-shallow-repository", repo=repo) != "true":
        return ""
    count = git("rev-list", "--count", "HEAD", repo=repo)
    return (
        f"; this clone is shallow, with {count} commit(s) of its history: fetch the rest with "
        "  git fetch --unshallow   (in CI: a checkout of full depth)"
    )


def commit_of(name: str, repo: Path) -> str:
    """The hash of a named commit."""
    try:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", repo=repo)
    except GateError:
        raise GateError(f"there is no commit {name!r}" + shallowness(repo)) from None


def warn_about_uncommitted(repo: Path) -> None:
    """asv measures commits; say so where the tree has more, new files included."""
    changed = git(
        "status", "--porcelain", "--untracked-files=all", "--", "packages", "pipelines", "datasets", repo=repo
    )
    if changed:
        print("gate: uncommitted changes are not in the times:\n" + changed, file=sys.stderr)


def compare_commits(repo: Path, base: str, head: str, *, cases: str = ".*", rounds: int = ROUNDS) -> Comparison:
    """The samples of both sides, in multiples of a call of the base made beside each, of the cases that match."""
    expected = select_timed(cases)
    base, head = commit_of(base, repo), commit_of(head, repo)
    if base == head:
        raise GateError(f"base and head are the same commit {base[:8]}")
    workplace = Workplace(repo=repo)
    continuous(workplace, base, head, names=[case.name for case in expected], rounds=rounds)
    return sort_out(
        expected,
        *(samples_of(workplace.results, commit) for commit in (base, head)),
        rounds=rounds,
        reasons=reasons_in(REASONS),
        at_base=versions_at(CHECKOUT),
    )


def estimates(samples: Samples) -> dict[str, float]:
    """One number per case: the median of all its samples."""
    return {case: statistics.median(values) for case, values in samples.items()}


def measure_noise(*, cases: str, runs: int, rounds: int) -> dict[str, Noise]:
    """Case -> ratios that comparisons of equal commits give.

    HEAD is compared `runs` times with an empty commit on top of it. What asv measured in one round, in one process, is
    a block of samples; all blocks are of equal code. Besides the ratios seen, many more comparisons are put together
    from these blocks, `rounds` a side, which shows the spread of a gate run without running hundreds.
    """
    seen: dict[str, list[float]] = {}
    blocks: dict[str, list[Sequence[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        clone = clone_with_empty_commit(Path(folder) / "clone")
        for number in range(1, runs + 1):
            print(f"gate: comparison {number} of {runs}", file=sys.stderr, flush=True)
            found = compare_commits(clone, "HEAD~1", "HEAD", cases=cases, rounds=rounds)
            base, head = found.base, found.head
            for name, reason in {**found.lost, **found.not_compared}.items():
                raise GateError(f"no noise without a time: {name}: {reason}")
            for case in base:
                seen.setdefault(case, []).append(statistics.median(head[case]) / statistics.median(base[case]))
                for side in (base, head):
                    blocks.setdefault(case, []).extend(cut(side[case], rounds))
    return {
        case: Noise(seen=ratios, drawn=put_together(blocks[case], rounds), rounds=len(blocks[case]))
        for case, ratios in seen.items()
    }


def cut(samples: Sequence[float], count: int) -> list[Sequence[float]]:
    """Samples in `count` blocks of equal length, in order."""
    length = len(samples) // count
    if length * count != len(samples):
        raise GateError(f"{len(samples)} samples are not {count} rounds of equal length")
    return [samples[i * length : (i + 1) * length] for i in range(count)]


def put_together(blocks: Sequence[Sequence[float]], rounds: int, *, count: int = 200) -> list[float]:
    """Ratios of `count` comparisons of disjoint halves of `rounds` blocks each, drawn with a fixed seed."""
    draw = random.Random(0)
    ratios = []
    for _ in range(count):
        chosen = draw.sample(range(len(blocks)), 2 * rounds)
        sides = [[x for i in part for x in blocks[i]] for part in (chosen[:rounds], chosen[rounds:])]
        ratios.append(statistics.median(sides[1]) / statistics.median(sides[0]))
    return ratios


def clone_with_empty_commit(target: Path) -> Path:
    """A clone of this repository whose HEAD changes nothing."""
    git("clone", "--quiet", "--shared", str(ROOT), str(target))
    commit(target, "Change nothing", "--allow-empty")
    return target


def commit(repo: Path, message: str, *options: str) -> str:
    """Commit all changes of a scratch clone; the new commit."""
    name = ("-c", "user.name=gate", "-c", "user.email=gate@localhost", "-c", "commit.gpgsign=false")
    git(*name, "commit", "--quiet", "--no-verify", "--all", "-m", message, *options, repo=repo)
    return git("rev-parse", "HEAD", repo=repo)


def record_times(cases: str = ".*") -> list[Path]:
    """Measure HEAD (times, and counters for the history) and add it to the record, whole or not at all."""
    workplace = Workplace(results=SCRATCH / "record")
    for path in result_files(workplace.results):
        path.unlink()
    machine = write_machine()
    options = ("--show-stderr", "--machine", machine, "--bench", pattern_of((c.name for c in select(cases)), ""))
    asv(workplace, "run", *LAUNCH, *options, "HEAD^!", allowed=(0, 2))
    files = result_files(workplace.results)
    failures = [f"{path.name}: {name}" for path in files for name in failed_in(path)]
    there = {name for path in files for name in load(path).get_all_result_keys()}
    failures += [f"{case.name}: no result" for case in select_timed(cases) if f"{case.name}.time_cpu" not in there]
    if failures:
        raise GateError("not recorded, these failed: " + ", ".join(failures))
    return merge(workplace.results)


def failed_in(path: Path) -> list[str]:
    """Benchmarks of a result file that failed, and times without a value; a counter may be one the commit lacks."""
    result = load(path)
    values = {name: result.get_result_value(name, []) for name in result.get_all_result_keys()}
    return [
        name
        for name, value in values.items()
        if value == [None] or (name.endswith(".time_cpu") and not all(map(math.isfinite, value)))
    ]
