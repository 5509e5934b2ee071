#!/bin/sh
# Comparisons on real data sets, in 4 gloo processes each. Needs GRADSIEVE_DATA; see docs/data.md.
set -eu
cd "$(dirname "$0")/.."

compare() {
    name=$1
    shift
    rm -rf "benchmarks/reports/$name"
    .venv/bin/gradsieve compare "$@" --workers 4 --out "benchmarks/reports/$name"
    gzip -9 -n "benchmarks/reports/$name"/*/records.jsonl
}

compare mnist resnet --dataset mnist --steps 3000 --eval-every 300 \
    --sparsifiers dense,exdyna:density=0.01,exdyna:density=0.001
compare wikitext-2 lstm --dataset wikitext-2 --eval-every 30 \
    --sparsifiers dense,exdyna:density=0.01,exdyna:density=0.001
compare sst2 bert --dataset sst2 --eval-every 100 \
    --sparsifiers dense,exdyna:density=0.01,exdyna:density=0.001
