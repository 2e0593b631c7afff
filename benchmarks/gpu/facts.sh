#!/bin/bash
# facts.sh OUT: whether the programs of one GPU still run and write all facts beside their numbers, in about three minutes.
#
# Small sizes, few rounds: nothing here is a result to keep. Needs torch and triton; request_level.py also TorchRec and
# FBGEMM, from SITE as in ci/gpu.sh, and is left out without. Ends with 1 if a program failed or a file lacks a fact.
# GEMLINE_COMMIT as for ci/gpu.sh. PYTHON names the interpreter (default python3).
set -uo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
packages=$(printf '%s:' packages/*/ pipelines/ datasets/ benchmarks/)
export PYTHONPATH="${packages}${SITE:+$SITE:}${PYTHONPATH:-}" PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore OUT=$out
failed=0
run() {  # run LIMIT PROGRAM ...: its last lines, and how long it took
    local start=$SECONDS name
    name=$(basename "$2" .py)
    timeout "$1" "$python" "${@:2}" > "$out/$name.log" 2>&1 || { failed=1; echo "== $name FAILED"; tail -15 "$out/$name.log"; }
    echo "== $name: $((SECONDS - start)) s"
    grep -E 'lacks|BAD' "$out/$name.log"
}
run 40 benchmarks/gpu/bench_ceilings.py --out "$out/bench_ceilings.json"
run 60 benchmarks/gpu/bench_attention.py --out "$out/bench_attention.json" --shapes B1 --rounds 3
run 60 benchmarks/gpu/attention_compare.py --out "$out/attention_compare.json" --shapes B1 --impls triton --rounds 3
run 60 benchmarks/gpu/host_time.py
if "$python" -c 'import torchrec' 2>/dev/null; then
    run 75 benchmarks/request_level.py --device cuda --requests 16 --steps 4 --limit-s 40
else
    echo "== request_level left out: no torchrec"
fi
run 120 benchmarks/gpu/bench_blocks.py --out "$out/bench_blocks.json" --tokens 16384 --rounds 3 --budget-s 90
"$python" benchmarks/record.py "$out"/*.json || failed=1
"$python" - "$out" <<'PYTHON'
import json, sys
from pathlib import Path
for path in sorted(Path(sys.argv[1]).glob("*.json")):
    tree = json.loads(path.read_text())
    for key in ("device_before", "device_after"):
        d = tree[key]
        print(path.name, key, *(d[x] for x in ("name", "driver", "sm_clock_mhz", "power_w", "power_cap_w", "throttle_reasons")))
PYTHON
exit "$failed"
