#!/bin/bash
# blocks_first.sh OUT: check, time and tune the block's kernels in one go on a bare GPU host (torch and triton only).
# At most TOTAL (250) seconds: PREPARE (90) for checks and compilations in parallel, the rest for the measurements.
out=$1; here=$(cd "$(dirname "$0")" && pwd)
total=${TOTAL:-250}; parts=${PARTS:-15}
export PYTHONPATH=$here/../../packages/attention PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export TRITON_CACHE_DIR=/tmp/triton-cache TORCHINDUCTOR_CACHE_DIR=/tmp/inductor-cache TORCHINDUCTOR_COMPILE_THREADS=2
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader
for i in $(seq 0 $((parts - 1))); do
  OMP_NUM_THREADS=1 timeout -k 2 ${PREPARE:-90} python3 $here/bench_blocks.py --part $i $parts > $out/part.$i 2>&1 \
    || echo "BAD part $i of $parts: exit $? (124: out of time)" >> $out/part.$i &
done
wait
cat $out/part.* > $out/parts.log; rm $out/part.[0-9]*
echo "prepared in $SECONDS s"
left=$((total - SECONDS - 5))
timeout -k 2 $left python3 $here/bench_blocks.py --out $out/blocks.json --tune --budget-s $((left - 25)) > $out/blocks.log 2>&1
rc=$?
echo "== tiles (forward and dx, ms)"; grep '^tune' $out/blocks.log | cut -c1-230
echo "== wrong or left out"
grep -hE '^(BAD|LEFT OUT|Traceback|[A-Za-z.]*Error)' $out/parts.log $out/blocks.log | sort | uniq -c | cut -c1-420 | head -30
echo "== results"
grep -E '^(suite|\{|projection|gate|everything|NOT)' $out/blocks.log
echo "exit $rc (124: out of time) after $SECONDS s"
exit $rc
