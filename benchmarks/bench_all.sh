#!/usr/bin/env bash
# The numbers of docs/performance.md: run from the repository root, on a machine that does nothing else, as
#   bash benchmarks/bench_all.sh gpu|cpu PHOTOS OUT
# PHOTOS is a folder of photos, whose labels are those of the label table. A report takes ten minutes at most.
set -euo pipefail
device=$1 photos=$2 out=$3
case $device in
  gpu) options=(--device cuda --dtype "${DTYPE:-bf16}" --compile) batches=(1 8 64 256) ;;
  cpu) options=(--device cpu --dtype "${DTYPE:-fp32}") batches=(1 8) ;;
  *) echo "the device is gpu or cpu, not $device" >&2; exit 2 ;;
esac
mkdir -p "$out"
for attacked in 0 1; do
  for batch in "${batches[@]}"; do
    images=$((batch < 16 ? 16 : 2 * batch))
    react-clip bench "$photos" --model clip-vit-b-16 "${options[@]}" --images "$images" --batch "$batch" --rounds 7 \
      --attacked "$attacked" --defenses react --quiet --out "$out/$device-batch-$batch-attacked-$attacked.json"
  done
done
python3 benchmarks/collect.py bench "benchmarks/results/bench/$device.json" "$out/$device"-*.json
if [[ $device == gpu ]]; then
  rivals=aom,ttc,doc,mac,anti-adv,hd,tte,clipure,csr,agc,et3,dbd,react,defend-clip,undefended
  for state in clean attacked; do
    react-clip bench "$photos" --model clip-vit-b-16 "${options[@]}" --images 256 --batch 256 --rounds 5 \
      --attacked "$([[ $state == clean ]] && echo 0 || echo 1)" --defenses "$rivals" --quiet \
      --out "benchmarks/results/bench/rivals-$state.json"
  done
fi
