"""asv, driven without questions: a machine entry, a configuration with absolute paths, results read and merged.

Why a configuration of our own beside benchmarks/asv.conf.json: a comparison's raw results do not belong into the record
(results/ is for commits that somebody chose to record), and a plant is tried in a clone of the repository, with this
tree's benchmarks as the ruler. Why not `asv machine`: on a machine it does not know, it drops every value that equals
its own guess, so that a name alone leaves an entry without processor or memory.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
SCRATCH = BENCHMARKS / "env" / "gate"
CHECKOUT = SCRATCH / "base"
REASONS = SCRATCH / "reasons"
LAUNCH = ("--launch-method", "forkserver")
"""Benchmarks are forked from a process that has loaded what they all need (suites/__init__.py): seconds each, often."""
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")


class GateError(RuntimeError):
    """The gate could not do its work; neither passed nor failed."""


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """Where one asv call works: which repository it measures and where its results go."""

    repo: Path = ROOT
    results: Path = SCRATCH / "results"
    html: Path = BENCHMARKS / "html"

    def config(self, folder: Path) -> Path:
        """Write the configuration of this workplace into `folder`; returns its path."""
        tree = json.loads((BENCHMARKS / "asv.conf.json").read_text())
        tree |= {
            "repo": str(self.repo),
            "pythons": [f"{sys.version_info.major}.{sys.version_info.minor}"],
            "benchmark_dir": str(BENCHMARKS / "suites"),
            "env_dir": str(BENCHMARKS / "env"),
            "results_dir": str(self.results),
            "html_dir": str(self.html),
            "install_command": [f"python {BENCHMARKS / 'install.py'} {{wheel_file}}"],
        }
        self.results.mkdir(parents=True, exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "asv.conf.json"
        path.write_text(json.dumps(tree, indent=1))
        return path


def machine_values() -> dict[str, str]:
    """What asv shall call this machine: a name made of its processor, never the host's."""
    from asv.machine import Machine

    defaults = Machine.get_defaults()
    slug = re.sub(r"[^a-z0-9]+", "-", defaults["cpu"].lower()).strip("-") or "unknown"
    return {
        **defaults,
        "machine": f"cpu-{defaults['num_cpu']}x-{slug}",
        "os": platform.system(),
        "gpu": "none",
    }


def write_machine(values: Mapping[str, str] | None = None) -> str:
    """Make asv know this machine, without a question; returns the name."""
    from asv.machine import MachineCollection

    values = dict(values or machine_values())
    MachineCollection.save(values["machine"], values)
    return values["machine"]


def asv(
    workplace: Workplace,
    *arguments: str,
    allowed: Sequence[int] = (0,),
    config_folder: Path = SCRATCH,
    **variables: str,
) -> int:
    """Run asv with these environment variables more; its exit code, which must be one of `allowed`."""
    command = [sys.executable, "-m", "asv", "--config", str(workplace.config(config_folder)), *arguments]
    environment = {**os.environ, **THREADS, "PYTHONHASHSEED": "0", **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, check=False)
    if done.returncode not in allowed:
        raise GateError(f"asv {' '.join(arguments)} ended with code {done.returncode}")
    return done.returncode


def git(*arguments: str, repo: Path = ROOT) -> str:
    """Output of a git command in `repo`."""
    done = subprocess.run(["git", *arguments], cwd=repo, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GateError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def pattern_of(names: Iterable[str], attribute: str) -> str:
    """What asv's --bench must be to select exactly these cases."""
    return f"^({'|'.join(map(re.escape, names))})\\.{attribute}"


def continuous(workplace: Workplace, base: str, head: str, *, names: Iterable[str], rounds: int) -> None:
    """`asv continuous`, its rounds interleaved (base head, head base, ...), samples kept; fills workplace.results.

    The suites find a checkout of the base in GEMLINE_BASE and measure in multiples of its calls (see companion.py for
    why interleaved rounds alone do not suffice). asv's own verdict (one factor for all) is not used: ours needs a ratio
    per case, and reads the samples it stored. Nor is its exit code: 2 says that something failed, but 0 does not say
    that all was measured, so the caller counts samples (gate_expected.py).
    """
    for folder in (workplace.results, REASONS):
        shutil.rmtree(folder, ignore_errors=True)
    REASONS.mkdir(parents=True)
    export(workplace.repo, base, CHECKOUT)
    asv(
        workplace,
        *("continuous", *LAUNCH, "--interleave-rounds", "--record-samples", "--show-stderr"),
        *("--machine", write_machine(), "--attribute", f"rounds={rounds}"),
        *("--bench", pattern_of(names, "time_cpu$"), base, head),
        allowed=(0, 1, 2),
        GEMLINE_BASE=str(CHECKOUT),
        GEMLINE_REASONS=str(REASONS),
    )


def export(repo: Path, commit: str, target: Path) -> None:
    """The files of a commit, without its history, in a fresh folder."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    archive = target.with_suffix(".tar")
    git("archive", "--output", str(archive), commit, repo=repo)
    subprocess.run(["tar", "-x", "-C", str(target), "-f", str(archive)], check=True)
    archive.unlink()


def result_files(results: Path) -> list[Path]:
    """Result files below a results directory, without machine.json and benchmarks.json."""
    return sorted(path for path in results.glob("*/*.json") if path.name != "machine.json")


def load(path: Path) -> Any:
    """asv's Results of one file."""
    from asv.results import Results

    return Results.load(str(path), machine_name=path.parent.name)


def samples_of(results: Path, commit: str) -> dict[str, list[float]]:
    """Case -> all samples in seconds, of one commit; cases that failed there are absent."""
    found: dict[str, list[float]] = {}
    for path in result_files(results):
        result = load(path)
        if result.commit_hash != commit:
            continue
        for name in result.get_all_result_keys():
            samples = result.get_result_samples(name, [])
            if name.endswith(".time_cpu") and samples and samples[0]:
                found[name.removesuffix(".time_cpu")] = samples[0]
    return found


def merge(source: Path, target: Path = RESULTS) -> list[Path]:
    """Copy results, machines and the list of benchmarks into the record; the newer entry of a name wins."""
    known_path = target / "benchmarks.json"
    known = json.loads(known_path.read_text()) if known_path.exists() else {}
    known |= json.loads((source / "benchmarks.json").read_text())
    copied = []
    for path in result_files(source):
        folder = target / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / path.name)
        shutil.copyfile(path.parent / "machine.json", folder / "machine.json")
        copied.append(folder / path.name)
    version = known.pop("version")
    known_path.write_text(json.dumps({**dict(sorted(known.items())), "version": version}, indent=1) + "\n")
    return copied
