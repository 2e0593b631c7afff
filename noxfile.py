"""Everything that is run on Gemline, as nox sessions: `./ci/nox -l` lists them.

torch and FBGEMM are a gigabyte and every session needs them, so one session, `environment`, fills one virtual
environment and the others require it and run inside it. It is filled from ci/constraints-cpu.txt, or
ci/constraints-cuda.txt where a GPU is present, and left alone as long as pyproject.toml and that file stay as they are.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tomllib
from pathlib import Path

import nox

os.environ.pop("UV_PYTHON", None)  # with it set, nox's uv support installs into another interpreter
nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["tests", "lint"]

ROOT = Path(__file__).parent
ENVIRONMENT = ROOT / ".nox" / "environment"
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Another Python, or a GPU host's torch, counts other operators: there the gate checks results and says so.
COUNTERS = ("counters", "--other-versions")
# TorchRec names the CUDA build of FBGEMM as its dependency, which overwrites the CPU build: these go in alone.
ALONE = ("torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu")


def gpu_present() -> bool:
    """Whether the NVIDIA driver answers on this machine."""
    return shutil.which("nvidia-smi") is not None and os.system("nvidia-smi -L >/dev/null 2>&1") == 0


def pins(constraints: Path) -> dict[str, str]:
    """Package name -> 'name==version' of a constraints file."""
    found = re.findall(r"^([\w.-]+)==\S+", constraints.read_text(), re.MULTILINE)
    lines = re.findall(r"^[\w.-]+==\S+", constraints.read_text(), re.MULTILINE)
    return dict(zip(found, lines, strict=True))


@nox.session(reuse_venv=True)
def environment(session: nox.Session) -> None:
    """Fill the environment that all other sessions run in (called by them)."""
    constraints = ROOT / "ci" / ("constraints-cuda.txt" if gpu_present() else "constraints-cpu.txt")
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + constraints.read_bytes()).hexdigest()
    stamp = ENVIRONMENT / "gemline-stamp"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    pinned = pins(constraints)
    session.install("--quiet", pinned["torch"], "-c", str(constraints))
    session.install("--quiet", "--no-deps", *(pinned[name] for name in ALONE if name in pinned))
    session.install("--quiet", "-e", ".[dev]", "-c", str(constraints))
    stamp.write_text(wanted)


def inside(function):  # type: ignore[no-untyped-def]
    """A session that runs in the shared environment."""
    return nox.session(venv_backend="none", requires=["environment"])(function)


def run(session: nox.Session, program: str, *arguments: str, **environment: str) -> None:
    """Run a program of the shared environment, its other programs first on PATH."""
    path = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"
    session.run(str(ENVIRONMENT / "bin" / program), *arguments, external=True, env={"PATH": path, **environment})


@inside
def pipeline(session: nox.Session) -> None:
    """Fetch data, train, evaluate, report.   ./ci/nox -s pipeline   (no network: -- --data synthetic)"""
    arguments = [part for argument in session.posargs for part in argument.split("=", 1)]
    named = {"--recipe", "--resume"} & set(arguments)  # a resumed run has its recipe in its directory
    run(session, "gemline", "train", *([] if named else ["--recipe", recipe_for(arguments)]), *session.posargs)


def recipe_for(arguments: list[str]) -> str:
    """The CPU recipe that fits the data named on the command line."""
    data = arguments[arguments.index("--data") + 1] if "--data" in arguments[:-1] else "ml-100k"
    return "synthetic_cpu" if data == "synthetic" else "ml100k_cpu"


@inside
def tests(session: nox.Session) -> None:
    """The default test suite.   ./ci/nox -s tests [-- pytest arguments, e.g. -m slow]"""
    run(session, "pytest", *(session.posargs or ["-n", "2", "--dist", "loadfile"]), **THREADS)


@inside
def lint(session: nox.Session) -> None:
    """ruff, and mypy --strict on the public interfaces."""
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")
    run(session, "mypy")


@inside
def alone(session: nox.Session) -> None:
    """Each package's tests with its siblings, and what it does not need, refused.   [-- gem_data ...]

    Refused in the processes that the tests start too (ci/blocked_imports.py).
    """
    known = tomllib.loads((ROOT / "ci" / "alone.toml").read_text())
    folders = [*ROOT.glob("packages/*/gem_*"), ROOT / "datasets" / "gem_datasets"]
    ours = {"gem_pipelines", *(folder.name for folder in folders)}
    for name in session.posargs or sorted(ours - {"gem_pipelines"}):
        blocked = ",".join(sorted((ours - {name}) | set(known[name]["not_needed"])))
        tests = f"tests/{name.removeprefix('gem_')}"
        left_out = [f"--ignore-glob=*/{pattern}" for pattern in known[name].get("ignore", ())]
        arguments = ("-p", "blocked_imports", "--blocked", blocked, *left_out, tests)
        run(session, "pytest", *arguments, PYTHONPATH="ci", **THREADS)


@inside
def distributed(session: nox.Session) -> None:
    """Several gloo processes against one: factorizations, tables, collectives, balance.   [-- pytest arguments]

    Kills, hangs and strangers at the port are in session reliability; dry runs of GPU scripts, and the larger worlds
    of the packages' own tests, in `tests -- -m slow`.
    """
    whole = ("tests/distributed", "--ignore=tests/distributed/test_gpu_script.py")
    run(session, "pytest", *whole, "-m", "distributed and not gpu", *session.posargs, **THREADS)
    # Named, because collecting all files for a handful of tests takes as long as some of them.
    files = [path.relative_to(ROOT) for path in sorted(ROOT.glob("tests/**/test_*.py"))]
    elsewhere = [path for path in files if path.parts[1] not in ("reliability", "distributed")]
    others = [str(path) for path in elsewhere if "mark.distributed" in (ROOT / path).read_text()]
    run(session, "pytest", *others, "-m", "distributed and not gpu and not slow", *session.posargs, **THREADS)


@inside
def reliability(session: nox.Session) -> None:
    """Kills, hangs, corruption, full disks: nothing lost.   [-- --full, --seed N, other pytest arguments]"""
    run(session, "pytest", "tests/reliability", "-m", "not gpu", *session.posargs, **THREADS)


@inside
def gate(session: nox.Session) -> None:
    """Exact counters against their record; fails on a regression.   [-- another command of ci/gate.py]"""
    run(session, "python", "-W", "ignore", "ci/gate.py", *(session.posargs or COUNTERS), **THREADS)


@inside
def bench(session: nox.Session) -> None:
    """The whole gate: counters, then times of GATE_BASE against HEAD.   [-- desk: pytest-benchmark at the desk]"""
    if session.posargs[:1] == ["desk"]:
        run(session, "pytest", "benchmarks/desk", *session.posargs[1:], **THREADS)
        return
    run(session, "python", "-W", "ignore", "ci/gate.py", *COUNTERS, **THREADS)
    run(session, "python", "-W", "ignore", "ci/gate.py", "times", *session.posargs, **THREADS)


@inside
def publish(session: nox.Session) -> None:
    """asv's pages from benchmarks/results into benchmarks/html; fails if a recorded value is missing on them."""
    run(session, "python", "ci/gate.py", "publish")


@inside
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; a warning is an error."""
    run(session, "sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")
