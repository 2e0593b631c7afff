#!/bin/bash
# attention_round2.sh OUT [PEERS]: check, time and profile in one go, under 540 s on a bare GPU host (torch and triton only).
# PEERS, a folder as attention_peers.py describes it (a packed hstu/hstu.so.xz is unpacked), adds the public kernels that
# are not part of PyTorch. Set SHAPES, IMPLS, ROUNDS, VARIANTS="" or NCU="" to do less. A short table last.
out=$(cd "$1" && pwd); peers=$2; here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH=$here/../../packages/attention PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore OMP_NUM_THREADS=1
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton-cache} TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor-cache}
shapes=${SHAPES:-B1 B1w B1r B2jag B3b S1 S1f}; parts=${PARTS:-12}
cd "$here"; nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader

arguments=(--rounds "${ROUNDS:-25}" --impls ${IMPLS:-gluon triton})
if [ -n "$peers" ]; then
  mkdir -p /tmp/peers && cp -r "$peers"/. /tmp/peers/
  [ -f /tmp/peers/hstu/hstu.so.xz ] && xz -df /tmp/peers/hstu/hstu.so.xz
  arguments+=(--peers /tmp/peers)
fi

at_most() {  # at_most LIMIT END: seconds until END of this script's run, at most LIMIT, at least 1
  local left=$(($2 - SECONDS)); left=$((left < $1 ? left : $1)); echo $((left > 1 ? left : 1))
}

# Compiling takes the time here: the checks and the caches of the timed kernels at once.
for shape in $shapes; do
  timeout 220 python3 attention_compare.py "${arguments[@]}" --warm $shape > "$out/warm.$shape.log" 2>&1 &
done
if [ -n "${VARIANTS-1}" ]; then
  for shape in B1 B1w B1r B2jag; do
    timeout 220 python3 attention_variants.py --warm $shape > "$out/warm.variants.$shape.log" 2>&1 &
  done
  for i in 0 1 2; do
    timeout 220 python3 attention_check.py --impl gluon --own --limit-s 210 --part $i 3 > "$out/check.own$i" 2>&1 &
  done
fi
for i in $(seq 0 $((parts - 1))); do
  timeout 220 python3 attention_check.py --impl triton gluon --limit-s 210 --part $i $parts > "$out/check.$i" 2>&1 &
done
wait
cat "$out"/check.* > "$out/check.all"; rm -f "$out"/check.[0-9]* "$out"/check.own*; mv "$out/check.all" "$out/check.log"
cat "$out"/warm.*.log > "$out/warm.log"; rm "$out"/warm.*.log
echo "== checked and warm after $SECONDS s"

timeout $(at_most 170 400) python3 attention_compare.py "${arguments[@]}" --shapes $shapes --out "$out/compare.json" > "$out/compare.log" 2>&1
echo "== compared (exit $?) after $SECONDS s"
if [ -n "${VARIANTS-1}" ]; then
  timeout $(at_most 50 440) python3 attention_variants.py --out "$out/variants.json" > "$out/variants.log" 2>&1
  echo "== variants (exit $?) after $SECONDS s"
fi
if [ -n "${NCU-1}" ]; then
  NCU_LIMIT=$(at_most 150 525) ./attention_ncu.sh "$out" ${NCU_SHAPES:-B1 B1w B1r B2jag B3b} > "$out/ncu_table.log" 2>&1
  echo "== profiled (exit $?) after $SECONDS s"
fi

echo "== correctness: $(grep -c '^ok' "$out/check.log") ok, $(grep -c '^BAD' "$out/check.log") bad, $(grep -c moves "$out/check.log") not repeatable, $(grep -c '^refused' "$out/check.log") refused, $(grep -c '^[0-9]* of' "$out/check.log") of $parts parts${VARIANTS-, and 3 for variants,} ended"
grep -E '^(BAD|STOPPED|Traceback|\w*Error)|moves' "$out/check.log" | cut -c1-300 | head -20
grep -E 'Error|Traceback' "$out/warm.log" | sort | uniq -c | cut -c1-200 | head -5
echo "== times"; grep -E '^(B|S)[0-9]' "$out/compare.log" | cut -c1-150
[ -f "$out/variants.log" ] && { echo "== variants"; grep -E '^B[0-9]|Error' "$out/variants.log" | cut -c1-140; }
[ -f "$out/ncu_table.log" ] && { echo "== counters"; cut -c1-150 "$out/ncu_table.log"; }
