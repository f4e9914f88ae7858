#!/usr/bin/env bash
# The runs behind docs/reproduction.md, ranking.md, second-look.md and threat-model.md, anew: from the repository root, with a GPU, as
#   bash benchmarks/run_recipes.sh DATA HEADS OUT [NAME ...]
# DATA holds <set>/{test,train}/<class>/ photos, HEADS the class features <set>.npz. Interrupted runs continue.
# Towers run in bf16 (features, noise and reductions in fp32); results/precision.json is the control in fp32.
# The files in benchmarks/results were made by earlier recipes, some under other names: step-quarter is table1-quarter now, anchor-scale,
# sweep-views and sweep-alpha are sweeps, ttc-tau, doc-tau and anti-adv-step are rival-constants, extended is finetuned. Not made here:
# transfer-adamw, whose tower an earlier release trained, and second-look-search.json, whose photos were not listed.
set -euo pipefail
data=$1 heads=$2 out=$3
shift 3
wanted=("$@")

evaluate() { # NAME RECIPE LIMIT OPTION...
  local name=$1 recipe=$2 limit=$3
  shift 3
  if ((${#wanted[@]})) && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
  local begin=$SECONDS
  python3 -m react_clip evaluate "recipes/$recipe.yaml" --model clip-vit-b-16 --data "$data" --heads "$heads" \
    --limit "$limit" --batch 256 --quiet --out "$out/$name" "$@"
  echo "-- $name: $((SECONDS - begin)) s"
}
bf16=(--dtype bf16 --attack-dtype bf16)
# All rows of tables 1 and 5 to 8 but SS-TPT's: it tunes prompts, and this tower has no text tower.
rows="CLIP,TTC,DOC,AOM,MAC,Defend-CLIP,ReACT (paper),ReACT (calibrated)"
# Those of the nine sets of tables 5 to 7 that are here: no FGVC-Aircraft, ten classes of DTD, and 391 photos of StanfordCars.
nine=caltech101,cars196,cifar10,cifar100,dtd10,flowers102,oxford_pets,stl10

evaluate first-look first-look 320 "${bf16[@]}"
evaluate table1 table1 100 --datasets all --defenses "Anti-Adv,$rows" "${bf16[@]}"
evaluate table1-quarter table1-quarter 100 "${bf16[@]}"
evaluate table5-pgd100 table5 50 --datasets $nine --defenses "$rows" "${bf16[@]}"
evaluate table6-cw table6 50 --datasets $nine --defenses "$rows" "${bf16[@]}"
evaluate table7-autoattack table7 50 --datasets $nine --defenses "$rows" "${bf16[@]}"
evaluate table8 table8 1000 --datasets imagenet --defenses "$rows" "${bf16[@]}"
evaluate full table1 1000 --datasets caltech101,imagenet,cars196 --defenses "Anti-Adv,$rows" "${bf16[@]}"
evaluate table1-extended table1-extended 50 --datasets all --defenses "Anti-Adv,$rows" "${bf16[@]}"
evaluate table2 table2 100 --datasets all "${bf16[@]}"
evaluate anchors anchors 100 "${bf16[@]}"
evaluate table3 table3 100 --datasets all "${bf16[@]}"
evaluate table4 table4 100 --datasets all "${bf16[@]}"
evaluate sweeps sweeps 50 --datasets all "${bf16[@]}"
evaluate mappings mappings 100 "${bf16[@]}"
evaluate mappings-imagenet mappings 128 --datasets imagenet "${bf16[@]}"
evaluate leakage leakage 100 --datasets all "${bf16[@]}"
evaluate rivals rivals 100 "${bf16[@]}"
evaluate second-look second-look 100 --batch 100 "${bf16[@]}"
evaluate second-look-honest second-look-honest 1000 --batch 100 "${bf16[@]}"
evaluate standard standard 20 --batch 20 "${bf16[@]}"
# Constants of rivals that belong to another encoder, or that nobody published.
evaluate rival-constants rival-constants 50 "${bf16[@]}"
# Finetuned towers, each attacked as it is; benchmarks/finetune.sh trains them.
for method in TeCoA PMG-AFT FARE CLIP-FT; do
  if [[ -d "$out/towers/$method" ]]; then
    evaluate "finetuned-$method" finetuned 100 "${bf16[@]}" --model "$out/towers/$method"
    evaluate "standard-$method" finetuned-standard 20 --batch 20 "${bf16[@]}" --model "$out/towers/$method"
  fi
done
# The runs of the towers are one folder each in benchmarks/results:
#   python3 benchmarks/collect.py join benchmarks/results/finetuned OUT/finetuned-{TeCoA,PMG-AFT,FARE,CLIP-FT}
#   python3 benchmarks/collect.py join benchmarks/results/standard OUT/standard OUT/standard-{TeCoA,PMG-AFT,FARE,CLIP-FT}
# docs/threat-model.md, and images crafted on a tower of benchmarks/finetune.sh. The suite of costly defences is shorter.
evaluate adaptive adaptive 24 --defenses "SecondLook,ReACT,AOM,TTC,CLIPure-Cos,CSR,ET3,Defend-CLIP,AGC,TTE,DOC,Anti-Adv" --batch 8
evaluate adaptive-costly adaptive-costly 24 --defenses HD,MAC,DBD --batch 8
evaluate adaptive-members adaptive-members 16 --batch 16 --datasets oxford_pets,caltech101
if [[ -d "$out/towers/TeCoA" ]]; then
  evaluate transfer transfer 48 --transfer-model "$out/towers/TeCoA"
fi
