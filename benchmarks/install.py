"""Installs a built wheel of the project and, when they have changed, the packages it needs, into asv's environment.

    python install.py gemline-0.1.0-py3-none-any.whl

asv's own way would be to name requirements in asv.conf.json and let pip resolve the project's: that pulls in the CUDA
build of FBGEMM, which overwrites the CPU build. So the pinned set of ci/constraints-*.txt goes in as in noxfile.py,
once; a change of commit then only exchanges the wheel.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ALONE = ("torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu")
CI = Path(__file__).resolve().parents[1] / "ci"


def pip(*arguments: str) -> None:
    """pip install, which must succeed."""
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


def requirements_of(wheel: Path) -> str:
    """The lines of the wheel's metadata that name what it needs."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    wanted = re.compile(r"Requires-Dist: (?:[^;]*|.*; extra == .(?:torchrec|triton).)")
    return "\n".join(line for line in metadata.splitlines() if wanted.fullmatch(line))


def main(wheel: Path) -> None:
    constraints = CI / ("constraints-cuda.txt" if shutil.which("nvidia-smi") else "constraints-cpu.txt")
    stamp = Path(sys.prefix) / "gemline-stamp"
    wanted = hashlib.sha256(constraints.read_bytes() + requirements_of(wheel).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        pinned = dict(re.findall(r"^([\w.-]+)(==\S+)", constraints.read_text(), re.MULTILINE))
        pip("torch" + pinned["torch"], "-c", str(constraints))
        pip("--no-deps", *(name + pinned[name] for name in ALONE if name in pinned))
        pip(f"gemline[torchrec,triton] @ file://{wheel.resolve()}", "-c", str(constraints))
        stamp.write_text(wanted)
    pip("--no-deps", "--no-index", "--no-compile", "--force-reinstall", str(wheel))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
