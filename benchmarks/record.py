"""The files that programs on a GPU host write: numbers with everything they must be read with.

    write_measurements(path, [Measurement(case="ceilings.bf16_matmul", unit="ms", samples=(1.41, 1.40), ...)],
                       ceilings={"bf16_matmul_flop_per_s": 7.8e14}, before=describe_working_device(0))
    write_record(path, {"rows": [...]}, ceilings=..., before=..., without={"energy": "a profiler was attached"})

`convert.py` turns files of measurements into asv results; a record is a table of a form of its own, with the same
facts: the commit and whether the tree was as committed, the device before (at work) and after, the host, versions, and
what the device reached in the same process. Needs torch and nothing else, so that a bare host can write one.

    python benchmarks/record.py            prints GEMLINE_COMMIT for a copy without git: "<commit>-clean" or "-dirty"
    python benchmarks/record.py FILE ...   prints which facts each file lacks; ends with 1 if one does
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from device import DeviceRecord, describe_device

FORMAT = "gemline-measurements-1"
RECORD_FORMAT = "gemline-record-1"
HERE = Path(__file__).resolve().parent
UNITS = {"ms": ("seconds", 1e-3), "J": ("joules", 1.0), "bytes": ("bytes", 1.0), "count": ("count", 1.0)}
NAME = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured cost; larger is worse.

    case     "<group>.<what>", identifiers both, e.g. "attention_gpu.hstu_b1_forward"
    unit     "ms", "J" (energy of one sample, or of one call of what has no samples), "bytes" or "count"
    samples  at least one; the median is what is compared
    facts    what explains the number: FLOPs, bytes, shares of a ceiling, ratio to a peer of the same run, its name
    """

    case: str
    unit: str
    samples: tuple[float, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.case):
            raise ValueError(f"case {self.case!r}: expected two identifiers in small letters with a dot between")
        if self.unit not in UNITS:
            raise ValueError(f"{self.case}: unit {self.unit!r}, expected one of {', '.join(UNITS)}")
        if not self.samples:
            raise ValueError(f"{self.case}: no samples")


def commit_at_hand() -> tuple[str | None, bool | None]:
    """(the measured commit, whether the tree differs from it); None: nothing says.

    Asked are git, in this repository, and GEMLINE_COMMIT, which is for copies without git: "<commit>-clean" or
    "<commit>-dirty" as this program prints it, or a commit alone. ValueError when both speak and disagree.
    """
    given = os.environ.get("GEMLINE_COMMIT") or None
    named, _, state = (given or "").partition("-")
    if state not in ("", "clean", "dirty"):
        raise ValueError(f"GEMLINE_COMMIT is {given}: expected a commit, alone or with -clean or -dirty behind it")
    top = git_says("rev-parse", "--show-toplevel")
    commit = git_says("rev-parse", "HEAD")
    if not top or not commit or Path(top).resolve() != HERE.parent:  # no git, or somebody else's around this copy
        return named or None, None if not state else state == "dirty"
    if named and not commit.startswith(named):
        raise ValueError(
            f"GEMLINE_COMMIT is {given}, but {HERE.parent} is at {commit}: unset it, or check that one out"
        )
    return commit, state == "dirty" or bool(git_says("status", "--porcelain", "--untracked-files=no"))


def git_says(*arguments: str) -> str | None:
    """Output of a git command here; None where there is no git or it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout.strip()


def versions() -> dict[str, str]:
    """Python, torch, CUDA and triton of this process."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    try:
        import triton
    except ImportError:
        return {**found, "triton": "none"}
    return {**found, "triton": triton.__version__}


def facts(*, ceilings: Mapping[str, float], before: DeviceRecord, after: DeviceRecord | None = None) -> dict[str, Any]:
    """Everything beside the numbers. `before` and `after`: the device before (at work) and after measuring.

    ceilings: what this device reached in the same process, e.g. bf16_matmul_flop_per_s and copy_bytes_per_s.
    """
    try:
        commit, dirty = commit_at_hand()
    except ValueError as error:  # what was measured is worth more than its name: `lacking` and convert.py ask for it
        print(f"record: the commit is left open: {error}", file=sys.stderr)
        commit, dirty = None, None
    return {
        "commit": commit,
        "dirty": dirty,
        "device_before": before.to_json(),
        "device_after": (after or describe_device(0)).to_json(),
        "host": {"os": platform.system(), "arch": platform.machine(), "num_cpu": str(os.cpu_count())},
        "versions": versions(),
        "ceilings": dict(ceilings),
    }


def write_measurements(
    path: Path,
    measurements: Sequence[Measurement],
    *,
    ceilings: Mapping[str, float],
    before: DeviceRecord,
    after: DeviceRecord | None = None,
    without: Mapping[str, str] | None = None,
) -> None:
    """Write the file, whole or not at all; the other arguments are those of `facts`, and `without` of `write_record`.

    Raises ValueError when nothing was measured: then there is no file.
    """
    if not measurements:
        raise ValueError(f"nothing was measured: {path} is not written")
    tree = {"format": FORMAT, **facts(ceilings=ceilings, before=before, after=after), "without": dict(without or {})}
    tree["measurements"] = [asdict(measurement) for measurement in measurements]
    write_whole(path, json.dumps(tree, indent=1, allow_nan=False))


def write_record(
    path: Path,
    found: Mapping[str, Any],
    *,
    ceilings: Mapping[str, float],
    before: DeviceRecord,
    after: DeviceRecord | None = None,
    without: Mapping[str, str] | None = None,
) -> None:
    """Write a record of any form, `found`, whole or not at all; the other arguments are those of `facts`.

    without: fact that does not apply ("energy", "ceilings", "device_before") -> why. On a GPU a fact that is
    lacking without a reason is named on standard error. ValueError where `found` has a key of the facts.
    """
    about = {"format": RECORD_FORMAT, **facts(ceilings=ceilings, before=before, after=after), "without": without or {}}
    if clash := sorted(about.keys() & found.keys()):
        raise ValueError(f"{path}: the record's own keys are the writer's too: {', '.join(clash)}")
    tree = {**about, **found}
    text = json.dumps(tree, indent=1)
    write_whole(path, text)
    if before.name != "none" and (lacks := lacking(json.loads(text))):  # as it is read: keys of numbers are text there
        print(f"{path} lacks {', '.join(lacks)}", file=sys.stderr)


def write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)


def lacking(tree: Any) -> list[str]:
    """Which facts a file of measurements or a record lacks without giving a reason; [] when it is whole."""
    if not isinstance(tree, dict) or tree.get("format") not in (FORMAT, RECORD_FORMAT):
        return ["all facts"]
    without = tree.get("without", {})
    lacks = [name for name in ("commit", "dirty") if tree.get(name) is None]
    for name in ("device_before", "device_after"):
        device = tree.get(name) or {}
        asked = ("driver", "sm_clock_mhz", "power_cap_w", "throttle_reasons")
        lacks += [
            f"{name}.{key}" for key in asked if device.get(key) is None and key not in device.get("unavailable", {})
        ]
    if "gpu_idle" in ((tree.get("device_before") or {}).get("throttle_reasons") or ()):
        lacks.append("device_before at work (it is the idle card)")
    if not tree.get("ceilings"):
        lacks.append("ceilings")
    if not has_energy(tree):
        lacks.append("energy")
    return [fact for fact in lacks if fact.split(".")[0].split(" ")[0] not in without]


def has_energy(tree: Any) -> bool:
    """Whether anything below says how much energy it took, or why that is not known."""
    if isinstance(tree, list):
        return any(has_energy(one) for one in tree)
    if not isinstance(tree, dict):
        return False
    if tree.get("unit") == "J" or tree.get("energy_unavailable"):
        return True
    told = any("joules" in key and value is not None for key, value in tree.items())
    return told or any(has_energy(value) for value in tree.values())


def read_measurements(path: Path) -> dict[str, Any]:
    """The content of a file of measurements; ValueError for another format or a case without samples."""
    tree: dict[str, Any] = json.loads(path.read_text())
    if tree.get("format") != FORMAT:
        raise ValueError(f"{path}: format {tree.get('format')!r}, expected {FORMAT!r}")
    tree["measurements"] = [Measurement(**{**m, "samples": tuple(m["samples"])}) for m in tree["measurements"]]
    return tree


def main(files: Sequence[str]) -> int:
    """See the top of the file."""
    if not files:
        commit, dirty = commit_at_hand()
        if commit is None:
            print("record: no git here that knows the commit", file=sys.stderr)
            return 1
        print(commit if dirty is None else f"{commit}-{'dirty' if dirty else 'clean'}")
        return 0
    found = {file: lacking(json.loads(Path(file).read_text())) for file in files}
    for file, lacks in found.items():
        print(f"{file}: " + (f"lacks {', '.join(lacks)}" if lacks else "has all facts, or says why not"))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
