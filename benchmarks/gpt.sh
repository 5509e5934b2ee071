#!/bin/sh
# The small GPT with AdamW, 4 virtual workers, at densities a user can choose from; more learning rates for the methods
# that are judged. Needs GRADSIEVE_DATA (Tiny Shakespeare). Writes benchmarks/data/gpt-LR.json; 1.5 hours on one core.
set -eu
cd "$(dirname "$0")/.."
few="dense,alone,share:noise=averaged:values=fp8:density=0.027,share:noise=averaged:values=fp8:density=0.27"
all="$few,share:values=fp8:density=0.027,share,share:density=0.1,average,share:judge=drift,exdyna,share:density=0.001"
for trial in "0.006 $all" "0.004 $few" "0.009 $few"; do
    lr=${trial%% *}
    out=runs/gpt-$lr
    rm -rf "$out"
    .venv/bin/gradsieve compare gpt --virtual --dataset tiny_shakespeare --width 0.5 --batch 8 --workers 4 \
        --steps "${STEPS:-3000}" --eval-every "${EVAL_EVERY:-500}" --density 0.01 --lr "$lr" \
        --sparsifiers "${trial#* }" --out "$out" --json > "benchmarks/data/gpt-$lr.json.partial"
    mv "benchmarks/data/gpt-$lr.json.partial" "benchmarks/data/gpt-$lr.json"
done
