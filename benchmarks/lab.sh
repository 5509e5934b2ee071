#!/bin/sh
# Time to accuracy between hosts with slow links: real MNIST, ResNet-20. Needs root, iproute2 and GRADSIEVE_DATA.
set -eu
cd "$(dirname "$0")/.."
rm -rf benchmarks/reports/lab
.venv/bin/gradsieve compare resnet --dataset mnist --steps "${STEPS:-480}" --eval-every "${EVAL_EVERY:-60}" \
    --sparsifiers dense,alone,fp16,powersgd,topk,exdyna,shared_threshold,share:values=fp8:density=0.027:delay=1,average \
    --lab-hosts 4 --lab-rate 100mbit --out benchmarks/reports/lab
gzip -9 -n benchmarks/reports/lab/*/records.jsonl
rm -f benchmarks/reports/lab/report.html
