#!/bin/sh
# The small GPT with AdamW, 4 virtual workers, at densities a user can choose from; three learning rates for each of
# the methods that are judged. Needs GRADSIEVE_DATA (Tiny Shakespeare). Writes benchmarks/data/gpt-LR.json; 2 hours.
set -eu
cd "$(dirname "$0")/.."
all="dense,alone,share:values=fp8:density=0.027,share,share:density=0.1,average,share:judge=drift,exdyna,share:density=0.001"
all="$all,share:delay=1,share:density=0.03,share:density=1,shared_threshold"
few="dense,alone,share:values=fp8:density=0.027,share,share:density=0.1,average"
for trial in "0.006 $all" "0.003 $few" "0.012 $few"; do
    lr=${trial%% *}
    out=runs/gpt-$lr
    rm -rf "$out"
    .venv/bin/gradsieve compare gpt --virtual --dataset tiny_shakespeare --width 0.5 --batch 8 --workers 4 \
        --steps "${STEPS:-3000}" --eval-every "${EVAL_EVERY:-500}" --density 0.01 --lr "$lr" \
        --sparsifiers "${trial#* }" --out "$out" --json > "benchmarks/data/gpt-$lr.json.partial"
    mv "benchmarks/data/gpt-$lr.json.partial" "benchmarks/data/gpt-$lr.json"
done
