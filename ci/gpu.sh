#!/usr/bin/env bash
# GPU tests and GPU benchmarks on a host that has only a Python with torch: no nox, no network.
#
#   OUT=results ./ci/gpu.sh            tests, then every benchmarks/gpu/bench_*.py
#   ./ci/gpu.sh tests | bench          one of them
#
# PYTHON names the interpreter (default python3); SITE one more folder of packages, e.g. one with torchrec and FBGEMM.
# GEMLINE_COMMIT names the commit where there is no git; `python benchmarks/record.py` prints it where there is. Writes
# into $OUT (default ./gpu-results): device.json, tests.xml and one JSON of measurements per benchmark; `python
# benchmarks/convert.py $OUT/bench_*.json` stores those as asv results, on a machine with asv. Ends with 1 if a test or a
# benchmark failed, after running the others; with 2, and nothing run, without a GPU, and before benchmarks whose numbers
# would lack their facts (no clocks, power, driver).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
out=${OUT:-gpu-results}
what=${1:-all}
mkdir -p "$out"
packages=$(printf '%s:' packages/*/ pipelines/ datasets/ benchmarks/)
export PYTHONPATH="${packages}${SITE:+$SITE:}${PYTHONPATH:-}"

"$python" - "$out" "$what" <<'PYTHON' || exit 2
import json, sys
from pathlib import Path
import torch
from device import describe_device
from record import commit_at_hand
if not torch.cuda.is_available():
    sys.exit(f"ci/gpu.sh: torch {torch.__version__} sees no CUDA device")
record = describe_device(0)
if record.name.startswith(("none", "unknown")) and sys.argv[2] != "tests":
    sys.exit(f"ci/gpu.sh: a GPU, but nothing tells its driver, clocks and power cap ({record.name}: {record.unavailable}), and numbers without them are not stored: carry nvidia-ml-py (one file, pynvml.py) and name its folder in SITE, or run: ./ci/gpu.sh tests")
commit, dirty = commit_at_hand()  # now, so that a wrong GEMLINE_COMMIT does not cost the run
Path(sys.argv[1], "device.json").write_text(json.dumps(record.to_json(), indent=1))
print(f"{record.name}, driver {record.driver}, torch {torch.__version__}, {torch.cuda.device_count()} device(s), commit {commit}{' and more' if dirty else ''}")
PYTHON

failed=0
if [ "$what" != bench ]; then
    if "$python" -c 'import pytest' 2>/dev/null; then
        # only files with GPU tests: the others may import what a bare host lacks
        mapfile -t files < <(grep -rl --include='*.py' 'mark\.gpu' tests)
        "$python" -m pytest -m gpu -p no:cacheprovider --junitxml "$out/tests.xml" "${files[@]}" || failed=1
    else
        echo "ci/gpu.sh: this Python has no pytest, so the GPU tests did not run; carry it as a wheel (needs pluggy, iniconfig, packaging, pygments) and name its folder in SITE, or run: ./ci/gpu.sh bench" >&2
        failed=1
    fi
fi
if [ "$what" != tests ]; then
    for script in benchmarks/gpu/bench_*.py; do
        name=$(basename "$script" .py)
        echo "== $name"
        "$python" "$script" --out "$out/$name.json" || failed=1
    done
fi
exit "$failed"
