#!/bin/bash
# attention_first.sh OUT: tune and check in one go on a bare GPU host (torch and triton only).
out=$1; here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/../../packages/attention PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton-cache PYTHONWARNINGS=ignore
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader
python3 $here/attention_tune.py --shapes ${SHAPES:-B1 B2jag B3b} --kernels ${KERNELS:-forward dq dkv short} --out $out/tune.json 2>&1 | tee $out/tune.log
parts=${PARTS:-15}
for i in $(seq 0 $((parts - 1))); do
  OMP_NUM_THREADS=1 timeout 200 python3 $here/attention_check.py --impl ${IMPLS:-triton} --part $i $parts > $out/check.$i 2>&1 &
done
wait
cat $out/check.* > $out/check.log; rm $out/check.[0-9]*
grep -E '^(BAD|STOPPED|Traceback|\w*Error)|moves' $out/check.log | cut -c1-420 | head -40
grep -c '^ok' $out/check.log
