"""`gemline doctor`: what is installed, whether it fits together, what can run here, and what to do about the rest.

It must speak exactly where the rest of the program cannot start, so nothing but the standard library and rich is
imported at the top: torch, torchrec, fbgemm, triton and pyarrow are imported one by one inside the checks, and whatever
they raise is shown (a library of another version raises ImportError, OSError, RuntimeError, AttributeError, NameError).

The usual trouble it looks for: `pip install torchrec` pulls in `fbgemm-gpu`, the CUDA build, which unpacks over the
files of `fbgemm-gpu-cpu`. Both then count as installed and the import dies of a missing CUDA library or an undefined
symbol. It shows in the metadata (both distributions present) and, when one of them was removed again, in the files (the
library on disk is not the one that the installed distribution brought): both are checked.
"""

from __future__ import annotations

import csv
import importlib
import importlib.metadata
import platform
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape

from gem_pipelines.contract import check_versions, installed_versions
from gem_pipelines.errors import RunError

Status = Literal["ok", "warning", "error", "info"]
CPU_BUILD, CUDA_BUILD = "fbgemm-gpu-cpu", "fbgemm-gpu"
OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True, kw_only=True)
class FittingSet:
    """Versions that are known to work together (see docs/install.md)."""

    name: str
    torch: str
    torchrec: str
    fbgemm_package: str
    fbgemm: str
    triton: str
    constraints: str


FITTING_SETS = (
    FittingSet(
        name="CPU",
        torch="2.13.0",
        torchrec="1.8.0",
        fbgemm_package=CPU_BUILD,
        fbgemm="1.8.0",
        triton="3.7.1",
        constraints="ci/constraints-cpu.txt",
    ),
    FittingSet(
        name="CUDA",
        torch="2.11.0",
        torchrec="1.6.1",
        fbgemm_package=CUDA_BUILD,
        fbgemm="1.6.0",
        triton="3.6.0",
        constraints="ci/constraints-cuda.txt",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One finding. `needed` says whether training depends on it: only a needed error makes the exit code 1.

    found   what is here, or the message of what went wrong
    advice  what to do; empty when there is nothing to do
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    needed: bool = False


def run_doctor(console: Console) -> int:
    """Prints every finding; returns 0 if training can run here, else 1."""
    checks = diagnose()
    width = max(len(check.name) for check in checks)
    marks = {"ok": "[green]ok     [/]", "info": "       ", "warning": "[yellow]warning[/]", "error": "[red]error  [/]"}
    for check in checks:
        console.print(f"{marks[check.status]} {check.name.ljust(width)}  {escape(check.found)}", soft_wrap=True)
        if check.advice:
            console.print(f"{' ' * (width + 10)}{escape('-> ' + check.advice)}", soft_wrap=True)
    broken = [check.name for check in checks if check.needed and check.status == "error"]
    console.print()
    if broken:
        console.print(f"Training cannot run here: {escape(', '.join(broken))}.", soft_wrap=True)
        return 1
    console.print("Training can run here.")
    return 0


def diagnose() -> list[Check]:
    """All findings, in the order in which to read them."""
    return [
        check_python(),
        *(check_import(name) for name in ("torch", "pyarrow")),
        *check_fbgemm(),
        check_import("torchrec"),
        check_set(),
        check_interfaces(),
        check_triton(),
        *check_devices(),
        *check_backends(),
        *check_attention(),
    ]


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def load(module: str) -> Any:
    """The imported module; raises whatever its import raises."""
    return importlib.import_module(module)


def check_python() -> Check:
    """Python is new enough."""
    version = platform.python_version()
    if tuple(map(int, platform.python_version_tuple()[:2])) >= OLDEST_PYTHON:
        return Check(name="python", status="ok", found=version, needed=True)
    wanted = ".".join(map(str, OLDEST_PYTHON))
    return Check(name="python", status="error", found=version, advice=f"use Python {wanted} or newer", needed=True)


def check_import(name: str) -> Check:
    """A needed library is installed and imports."""
    version = version_of(name)
    if version is None:
        advice = f"install {name}: docs/install.md has the commands"
        return Check(name=name, status="error", found="not installed", advice=advice, needed=True)
    try:
        load(name)
    except Exception as error:
        advice = "see the fbgemm lines" if name == "torchrec" else f"reinstall {name} (docs/install.md)"
        return Check(
            name=name,
            status="error",
            found=f"{version}, but its import fails: {_first_line(error)}",
            advice=advice,
            needed=True,
        )
    return Check(name=name, status="ok", found=version, needed=True)


def check_fbgemm() -> list[Check]:
    """Which build of FBGEMM is installed, whether it is whole, and whether it loads."""
    builds = {name: version for name in (CPU_BUILD, CUDA_BUILD) if (version := version_of(name)) is not None}
    if not builds:
        advice = f"install {CPU_BUILD} (CPU) or {CUDA_BUILD} (CUDA) with --no-deps: docs/install.md"
        return [Check(name="fbgemm", status="error", found="not installed", advice=advice, needed=True)]
    found = ", ".join(f"{name} {version}" for name, version in builds.items())
    checks = []
    if len(builds) == 2:
        text = f"{found}: both builds are installed, and the later one overwrote files of the other"
        checks.append(Check(name="fbgemm", status="error", found=text, advice=_repair_advice(), needed=True))
    else:
        damaged = damaged_file(next(iter(builds)))
        if damaged:
            text = f"{found}: {damaged}"
            checks.append(Check(name="fbgemm", status="error", found=text, advice=_repair_advice(), needed=True))
        else:
            checks.append(Check(name="fbgemm", status="ok", found=found, needed=True))
    checks.append(_check_fbgemm_loads())
    return checks


def _check_fbgemm_loads() -> Check:
    try:
        module = load("fbgemm_gpu")
        operators = load("torch").ops.fbgemm
        operators.asynchronous_complete_cumsum  # noqa: B018  (an attribute error says that the operators did not load)
    except Exception as error:
        found = f"its operators do not load: {_first_line(error)}"
        return Check(name="fbgemm operators", status="error", found=found, advice=_repair_advice(), needed=True)
    variant = str(getattr(module, "__variant__", "unknown"))
    return Check(name="fbgemm operators", status="ok", found=f"loaded, {variant} build", needed=True)


def damaged_file(distribution: str) -> str | None:
    """The first shared library of a distribution that is absent or not of the installed size; None if all are right.

    From RECORD itself: `importlib.metadata.files` leaves out what is missing in newer Pythons, and in older ones as
    soon as anything has imported the importlib_metadata package.
    """
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    for name, _, size in csv.reader((found.read_text("RECORD") or "").splitlines()):
        if not name.endswith(".so"):
            continue
        path = Path(str(found.locate_file(name)))
        if not path.is_file():
            return f"its file {name} is missing"
        if size and path.stat().st_size != int(size):
            return f"its file {name} was overwritten ({path.stat().st_size:,} bytes, installed {int(size):,})"
    return None


def _repair_advice() -> str:
    wanted = _nearest_set()
    return (
        f"pip uninstall -y {CUDA_BUILD} {CPU_BUILD}; "
        f"pip install --no-deps {wanted.fbgemm_package}=={wanted.fbgemm} torchrec=={wanted.torchrec}"
    )


def _nearest_set() -> FittingSet:
    """The set whose torch is installed; else the CUDA one for a CUDA build of torch, else the CPU one."""
    version = version_of("torch") or ""
    for fitting in FITTING_SETS:
        if version.split("+")[0] == fitting.torch:
            return fitting
    return FITTING_SETS[1 if "+cu" in version else 0]


def check_set() -> Check:
    """torch, torchrec and FBGEMM are a set that is known to work."""
    name = "torch + torchrec + fbgemm"
    versions = {n: (version_of(n) or "").split("+")[0] for n in ("torch", "torchrec", CPU_BUILD, CUDA_BUILD)}
    for fitting in FITTING_SETS:
        expected = {"torch": fitting.torch, "torchrec": fitting.torchrec, fitting.fbgemm_package: fitting.fbgemm}
        if all(versions[key] == value for key, value in expected.items()):
            return Check(name=name, status="ok", found=f"the {fitting.name} set, known to fit")
    known = "; ".join(
        f"{s.name}: torch {s.torch}, torchrec {s.torchrec}, {s.fbgemm_package} {s.fbgemm} ({s.constraints})"
        for s in FITTING_SETS
    )
    here = ", ".join(f"{key} {value}" for key, value in versions.items() if value) or "none of them"
    return Check(
        name=name, status="warning", found=f"not a set that was tried: {here}", advice=f"known to fit: {known}"
    )


def check_interfaces() -> Check:
    """The packages have the interface versions that the pipeline was written against."""
    try:
        found = installed_versions()
        check_versions(found)
    except RunError as error:
        advice = "install packages and pipeline of one version"
        return Check(name="interfaces", status="error", found=str(error), advice=advice, needed=True)
    text = ", ".join(f"{name} {major}.{minor}" for name, (major, minor) in found.items())
    return Check(name="interfaces", status="ok", found=text, needed=True)


def check_triton() -> Check:
    """Triton, which only the GPU kernels need."""
    version = version_of("triton")
    if version is None:
        found = "not installed: the triton kernels cannot run, the others can"
        return Check(name="triton", status="info", found=found, advice="pip install 'gemline[triton]' for GPU kernels")
    try:
        load("triton")
    except Exception as error:
        found = f"{version}, but its import fails: {_first_line(error)}"
        return Check(name="triton", status="warning", found=found, advice="reinstall triton, or do without its kernels")
    return Check(name="triton", status="ok", found=version)


def check_devices() -> list[Check]:
    """What can compute here."""
    try:
        torch = load("torch")
    except Exception:
        return []
    checks = [
        Check(name="cpu", status="ok", found=f"{platform.machine()}, torch uses {torch.get_num_threads()} threads")
    ]
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = (
            f"torch is built for CUDA {built}, but sees no GPU or driver" if built else "torch is a build without CUDA"
        )
        return [*checks, Check(name="cuda", status="info", found=f"none: {reason}")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        found = f"{properties.name}, {memory:.0f} GiB, compute capability {properties.major}.{properties.minor}"
        checks.append(Check(name=f"cuda:{index}", status="ok", found=found))
    return checks


def check_backends() -> list[Check]:
    """Which backends carry a process group. gloo is needed on CPU, and at world size 1 too."""
    try:
        dist = load("torch.distributed")
    except Exception:
        return []
    if not dist.is_available():
        found = "this torch is built without torch.distributed"
        return [
            Check(name="gloo", status="error", found=found, advice="install an ordinary build of torch", needed=True)
        ]
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    return [
        Check(name="gloo", status="ok", found="available", needed=True)
        if gloo
        else Check(
            name="gloo",
            status="error",
            found="not in this torch",
            advice="install an ordinary build of torch",
            needed=True,
        ),
        Check(name="nccl", status="ok", found="available")
        if nccl
        else Check(name="nccl", status="info", found="not in this torch: several GPUs cannot train together"),
    ]


def check_attention() -> list[Check]:
    """Every attention implementation is asked to run two tiny sequences here; what refuses says why."""
    try:
        torch = load("torch")
        api = load("gem_attention.api")
        interface = load("gem_attention.interface")
    except Exception as error:
        return [Check(name="attention", status="error", found=f"does not import: {_first_line(error)}", needed=True)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [name for name in typing.get_args(interface.Impl) if name != "auto"]
    return [_try_attention(name, device, torch, api, interface) for name in names]


def _try_attention(impl: str, device: str, torch: Any, api: Any, interface: Any) -> Check:
    name, needed = f"attention {impl}", impl == "eager"
    spec = interface.AttentionSpec(activation="silu", scale=0.25, divisor=8.0, mask=interface.MaskSpec(causal=True))
    q_THD = torch.ones(5, 1, 16, device=device)
    layout = api.make_layout(q_offsets=torch.tensor([0, 3, 5], device=device))
    try:
        out_THD = api.attention(q_THD, q_THD, q_THD, spec=spec, layout=layout, impl=impl)
    except interface.CannotRunError as error:
        return Check(name=name, status="info", found=_first_line(error, with_type=False), needed=needed)
    except Exception as error:
        found = f"fails on {device}: {_first_line(error)}"
        return Check(name=name, status="error", found=found, advice="this is a bug: please report it", needed=needed)
    if not bool(torch.isfinite(out_THD).all()):
        return Check(
            name=name, status="error", found=f"ran on {device} and returned numbers that are not finite", needed=needed
        )
    return Check(name=name, status="ok", found=f"runs on {device}", needed=needed)


def _first_line(error: BaseException, *, with_type: bool = True) -> str:
    text = str(error).strip().split("\n")[0]
    text = f"{type(error).__name__}: {text}" if with_type else text
    return text if len(text) <= 200 else text[:197] + "..."
