#!/usr/bin/env bash
# Every number in docs/performance.md and performance-details.md: run from the repository root, on a machine that does
# nothing else, as
#   bash benchmarks/bench_all.sh gpu|cpu PHOTOS OUT [PART ...]
# PHOTOS is a folder of photos; a part is one file, such as vit-b-16-table-clean, and takes ten minutes at most. The
# files DEVICE-PART.json in OUT belong into benchmarks/results/bench; then run tools/draw_figures.py and
# tools/fill_docs.py. ViT-B/16 is the real tower; ViT-B/32 has random weights, whose gate is set to open for the
# attacked share. DTYPE=fp32 measures another precision.
set -euo pipefail
device=$1 photos=$2 out=$3
shift 3
wanted=("$@")
dtype=${DTYPE:-bf16}
case $device in
  gpu) where=cuda ;;
  cpu) where=cpu ;;
  *) echo "the device is gpu or cpu, not $device" >&2; exit 2 ;;
esac

bench() { # MODEL PART OPTION...
  local model=$1 part=$2
  shift 2
  if ((${#wanted[@]})) && [[ " ${wanted[*]} " != *" $model-$part "* ]]; then return; fi
  local weights=("$photos") begin=$SECONDS
  if [[ $model == vit-b-32 ]]; then weights=(--shapes ViT-B-32); fi
  python3 -m react_clip bench "${weights[@]}" --device "$where" --dtype "$dtype" --quiet \
    --out "$out/$device-$model-$part.json" "$@"
  if [[ $part == sweep-batch ]]; then python3 benchmarks/roofline.py "$out/$device-$model-$part.json"; fi
  echo "-- $device-$model-$part: $((SECONDS - begin)) s"
}

if [[ $device == gpu ]]; then
  # Compiled, as the service runs.
  look=(--compile --images 512 --batch 256 --defenses second_look)
  bench vit-b-16 second-look-clean "${look[@]}" --rounds 7 --singles 50
  bench vit-b-16 second-look-attacked "${look[@]}" --rounds 7 --singles 20 --attacked 1
  bench vit-b-16 uncompiled --images 512 --batch 256 --defenses second_look --rounds 7 --singles 50
  swept=(--compile --defenses second_look --singles 1)
  bench vit-b-16 second-look-batch "${swept[@]}" --sweep batch --images 256 --rounds 5
  bench vit-b-16 second-look-batch-attacked "${swept[@]}" --sweep batch --images 256 --rounds 5 --attacked 1
  bench vit-b-16 second-look-classes "${swept[@]}" --sweep classes --images 256 --batch 256 --rounds 9
  bench vit-b-16 second-look-images "${swept[@]}" --sweep images --images 1024 --batch 128 --rounds 8
  # A short list of labels: PETS is a folder of pet photos.
  if [[ -n ${PETS:-} ]]; then
    photos=$PETS bench vit-b-16 second-look-pets "${look[@]}" --rounds 7 --singles 20 \
      --labels-file benchmarks/pet_breeds.txt
  fi
  for model in vit-b-16 vit-b-32; do
    bench $model table-clean --compile --images 512 --batch 256 --rounds 7 --singles 100
    bench $model table-clean-large --compile --images 2048 --batch 1024 --rounds 3 --singles 5
    bench $model table-attacked --compile --images 512 --batch 256 --rounds 5 --singles 50 --attacked 1
    bench $model sweep-batch --compile --sweep batch --images 1024 --rounds 5 --singles 1
    bench $model sweep-images --compile --sweep images --images 4096 --batch 256 --rounds 5 --singles 1
    bench $model sweep-classes --compile --sweep classes --images 512 --batch 256 --rounds 7 --singles 1
    bench $model sweep-attacked --compile --sweep attacked --images 1024 --batch 256 --rounds 5 --singles 1
  done
else
  dtype=${DTYPE:-fp32} bench vit-b-16 second-look-batch --sweep batch --images 16 --rounds 12 --singles 1 \
    --defenses second_look
  # On an x86 processor that multiplies bf16 matrices (AMX); two of its cores: OMP_NUM_THREADS=2 taskset -c 0,1 bash ...
  if grep -q amx_bf16 /proc/cpuinfo; then
    dtype=bf16 bench vit-b-16 amx-second-look-batch --compile --sweep batch --images 16 --rounds 8 --singles 1 \
      --defenses second_look
  fi
  bench vit-b-16 table-clean --images 32 --batch 4 --rounds 4 --singles 10
  bench vit-b-16 table-attacked --images 16 --batch 4 --rounds 5 --singles 5 --attacked 1
  bench vit-b-16 sweep-batch --sweep batch --images 16 --rounds 3 --singles 1
  bench vit-b-16 sweep-images --sweep images --images 128 --batch 4 --rounds 3 --singles 1
  bench vit-b-16 sweep-classes --sweep classes --images 8 --batch 2 --rounds 7 --singles 1
  bench vit-b-32 table-clean --images 64 --batch 32 --rounds 8 --singles 20
  bench vit-b-32 table-attacked --images 32 --batch 32 --rounds 5 --singles 5 --attacked 1
  bench vit-b-32 sweep-batch --sweep batch --images 64 --rounds 3 --singles 1
  bench vit-b-32 sweep-images --sweep images --images 256 --batch 16 --rounds 3 --singles 1
  bench vit-b-32 sweep-classes --sweep classes --images 64 --batch 32 --rounds 11 --singles 1
  # One image in a hundred needs a hundred images; on the real tower they would take a quarter of an hour.
  bench vit-b-32 sweep-attacked --sweep attacked --images 100 --batch 20 --rounds 2 --singles 1
fi
