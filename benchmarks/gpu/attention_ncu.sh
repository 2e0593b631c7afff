#!/bin/bash
# attention_ncu.sh OUT [SHAPE ...]: hardware counters of every attention kernel, one launch each; a short table last.
# OUT gets ncu.json, ncu.csv and ncu.log. Kernel caches are filled first if they are not. Clocks are left alone.
out=$1; shift; here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/../../packages/attention PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore OMP_NUM_THREADS=4
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton-cache}
chosen=(); [ $# -gt 0 ] && chosen=(--shapes "$@")
ncu=$(command -v ncu || ls /usr/local/cuda*/bin/ncu /opt/nvidia/nsight-compute/*/ncu 2>/dev/null | head -1)
[ -n "$ncu" ] || { echo "ncu not found"; exit 1; }
start=$SECONDS
timeout ${NCU_LIMIT:-150} "$ncu" --clock-control none --profile-from-start off --target-processes all \
  --kernel-name "regex:.*(forward|dq|dkv|short_query)_kernel.*" --kernel-name-base function \
  --section SpeedOfLight --section LaunchStats --section Occupancy --section WarpStateStats --section ComputeWorkloadAnalysis \
  --metrics l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum,l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum,dram__bytes.sum.per_second \
  --csv --page raw --print-units base --log-file "$out/ncu.csv" \
  python3 "$here/attention_ncu.py" run --out "$out/ncu_order.json" "${chosen[@]}" > "$out/ncu.log" 2>&1
echo "ncu: exit $? after $((SECONDS - start)) s"; tail -3 "$out/ncu.log"
grep -E "==ERROR==|==WARNING==" "$out/ncu.csv" | head -5
python3 "$here/attention_ncu.py" table "$out/ncu.csv" "$out/ncu_order.json" "$out/ncu.json"
