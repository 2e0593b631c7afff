#!/bin/bash
# blocks_first.sh OUT: check, tune and time the block's kernels in one go on a bare GPU host (torch and triton only).
out=$1; here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/../../packages/attention PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton-cache PYTHONWARNINGS=ignore
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader
parts=${PARTS:-15}
for i in $(seq 0 $((parts - 1))); do
  OMP_NUM_THREADS=1 timeout 240 python3 $here/bench_blocks.py --part $i $parts > $out/part.$i 2>&1 &
done
wait
cat $out/part.* > $out/parts.log; rm $out/part.[0-9]*
grep -E '^(BAD|Traceback|\w*Error)' $out/parts.log | sort | uniq -c | cut -c1-330 | head -30
grep -E '^suite' $out/parts.log | awk '{good += $2; all += $4} END {print good, "of", all, "checks passed"}'
timeout ${LIMIT:-280} python3 $here/bench_blocks.py --out $out/blocks.json --tune 2>&1 | tee $out/blocks.log
