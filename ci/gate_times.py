"""The timed half of the gate: two commits on one machine in one job, by one ruler, through asv.

Rounds are interleaved by asv (base head, head base, ...), and each call of either stands between calls of the base in a
process beside it, so that a machine that slows down slows all alike. The ruler is the working tree's benchmarks; the
commits are installed one after the other into one environment.
"""

from __future__ import annotations

import random
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gate_asv import (
    LAUNCH,
    RESULTS,
    ROOT,
    SCRATCH,
    GateError,
    Workplace,
    asv,
    continuous,
    git,
    merge,
    result_files,
    samples_of,
    write_machine,
)
from gate_limits import Noise

Samples = dict[str, list[float]]


def newest_recorded_ancestor(repo: Path) -> str:
    """The newest commit before HEAD that has results of any machine in the record."""
    recorded = {path.name.partition("-")[0] for path in result_files(RESULTS)}
    for commit in git("rev-list", "--skip=1", "HEAD", repo=repo).split():
        if commit[:8] in recorded:
            return commit
    raise GateError("no ancestor of HEAD has recorded results: name a base, e.g. GATE_BASE=main~1")


def warn_about_uncommitted(repo: Path) -> None:
    """asv measures commits; say so where the tree has more."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "packages", "pipelines", "datasets", repo=repo)
    if changed:
        print("gate: uncommitted changes are not measured:\n" + changed, file=sys.stderr)


def compare_commits(
    repo: Path, base: str, head: str, *, cases: str = ".*", rounds: int | None = None
) -> tuple[Samples, Samples]:
    """(case -> samples at base, the same at head), in multiples of a call of the base made beside each."""
    base, head = (git("rev-parse", f"{name}^{{commit}}", repo=repo) for name in (base, head))
    if base == head:
        raise GateError(f"base and head are the same commit {base[:8]}")
    workplace = Workplace(repo=repo)
    continuous(workplace, base, head, cases=cases, rounds=rounds)
    base_samples, head_samples = (samples_of(workplace.results, commit) for commit in (base, head))
    if not base_samples and not head_samples:
        raise GateError(f"asv measured nothing for cases {cases!r}")
    return base_samples, head_samples


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
            base, head = compare_commits(clone, "HEAD~1", "HEAD", cases=cases, rounds=rounds)
            for case in base.keys() & head.keys():
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
    """Measure HEAD (times, and counters for the history) and add it to the record."""
    workplace = Workplace(results=SCRATCH / "record")
    for path in result_files(workplace.results):
        path.unlink()
    machine = write_machine()
    options = ("--show-stderr", "--machine", machine, "--bench", f"^({cases})\\.")
    asv(workplace, "run", *LAUNCH, *options, "HEAD^!", allowed=(0, 2))
    failures = [f"{path.name}: {name}" for path in result_files(workplace.results) for name in failed_in(path)]
    if failures:
        raise GateError("not recorded, these failed: " + ", ".join(failures))
    return merge(workplace.results)


def failed_in(path: Path) -> list[str]:
    """Benchmarks of a result file without a value."""
    from gate_asv import load

    result = load(path)
    values = {name: result.get_result_value(name, []) for name in result.get_all_result_keys()}
    return [name for name, value in values.items() if value == [None] and not re.search("track_", name)]
