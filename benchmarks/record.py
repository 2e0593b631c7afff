"""The file of measurements that a benchmark on a GPU host writes: numbers with everything they must be read with.

    write_measurements(path, [Measurement(case="ceilings.bf16_matmul", unit="ms", samples=(1.41, 1.40), ...)],
                       ceilings={"bf16_matmul_flop_per_s": 7.8e14}, before=describe_device(0))

`convert.py` turns such files into asv results. Needs torch and nothing else, so that a bare host can write one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from device import DeviceRecord, describe_device

FORMAT = "gemline-measurements-1"
UNITS = {"ms": ("seconds", 1e-3), "J": ("joules", 1.0), "bytes": ("bytes", 1.0), "count": ("count", 1.0)}
NAME = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured cost; larger is worse.

    case     "<group>.<what>", identifiers both, e.g. "attention_gpu.hstu_b1_forward"
    unit     "ms", "J" (energy of one sample), "bytes" or "count"
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


def commit_at_hand() -> str | None:
    """The measured commit: GEMLINE_COMMIT, or what git says, or None."""
    if os.environ.get("GEMLINE_COMMIT"):
        return os.environ["GEMLINE_COMMIT"]
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def versions() -> dict[str, str]:
    """Python, torch, CUDA and triton of this process."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    try:
        import triton
    except ImportError:
        return {**found, "triton": "none"}
    return {**found, "triton": triton.__version__}


def write_measurements(
    path: Path,
    measurements: Sequence[Measurement],
    *,
    ceilings: Mapping[str, float],
    before: DeviceRecord,
    after: DeviceRecord | None = None,
) -> None:
    """Write the file, whole or not at all. `before` and `after`: the device before and after measuring.

    ceilings: what this device reached in the same process, e.g. bf16_matmul_flop_per_s and copy_bytes_per_s.
    Raises ValueError when nothing was measured: then there is no file.
    """
    if not measurements:
        raise ValueError(f"nothing was measured: {path} is not written")
    tree = {
        "format": FORMAT,
        "commit": commit_at_hand(),
        "device_before": before.to_json(),
        "device_after": (after or describe_device(0)).to_json(),
        "host": {"os": platform.system(), "arch": platform.machine(), "num_cpu": str(os.cpu_count())},
        "versions": versions(),
        "ceilings": dict(ceilings),
        "measurements": [asdict(measurement) for measurement in measurements],
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(tree, indent=1, allow_nan=False) + "\n")
    temporary.replace(path)


def read_measurements(path: Path) -> dict[str, Any]:
    """The content of a file of measurements; ValueError for another format or a case without samples."""
    tree: dict[str, Any] = json.loads(path.read_text())
    if tree.get("format") != FORMAT:
        raise ValueError(f"{path}: format {tree.get('format')!r}, expected {FORMAT!r}")
    tree["measurements"] = [Measurement(**{**m, "samples": tuple(m["samples"])}) for m in tree["measurements"]]
    return tree
