"""Runs as a record would hold them, made up: smooth curves with noise, the same for the same arguments."""

import math
import random
from pathlib import Path
from typing import Any

from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.step_record import StepRecord

N = 167_178
ACCURACY = {"name": "accuracy", "higher_is_better": True, "percent": True}
CONDITIONS = {
    "gradsieve": "0.1.0",
    "python": "3.12.1",
    "torch": "2.9.0+cpu",
    "numba": "0.62.1",
    "numpy": "2.3.4",
    "machine": "AMD EPYC 7B13, 8 cores, Linux x86_64",
    "date": "2026-11-15",
}


def make_run(
    name: str = "exdyna",
    *,
    steps: int = 300,
    density: float = 0.01,
    final: float = 0.973,
    every: int = 25,
    metric: dict[str, Any] = ACCURACY,
    end: str | None = "finished",
    **settings: Any,
) -> Run:
    """A run of the method that `name` begins with."""
    chance = random.Random(f"{name}{steps}{settings}")
    method = name.split()[0]
    hook, workers = method in ("dense", "fp16", "powersgd", "alone"), settings.get("workers", 4)
    density = 1.0 if hook else density
    dense_bytes = 2 * 4 * N * (workers - 1) / workers
    sent = {"dense": 1.0, "alone": 0.0, "fp16": 0.5, "powersgd": 0.022}.get(method, 2 * density)
    lines, metrics, done_bytes, done_seconds = [], [], 0.0, 0.0
    for step in range(steps + 1):
        part = step / max(1, steps)
        if step % every == 0:
            value = final - (final - 0.1) * math.exp(-9 * part) + chance.gauss(0, 0.003)
            metrics.append(
                {"kind": "metric", "step": step, "value": value, "bytes": done_bytes, "seconds": done_seconds}
            )
        if step == steps:
            break
        union = {"topk": 3.1 - 0.7 * part}.get(method, 1 + 0.9 * math.exp(-20 * part)) * math.exp(
            chance.gauss(0, 0.04)
        )
        real = float(sent > 0) if hook else density * union
        k = round(N * density)
        norm = (
            None if hook else 4 * (1 - math.exp(-8 * part)) * (0.8 if method == "topk" else 1) + chance.random() / 9
        )
        seconds = {
            "forward": 0.0011 * math.exp(chance.gauss(0, 0.1)),
            "backward": 0.0024 * math.exp(chance.gauss(0, 0.1)),
            "select": {"topk": 0.0019, "powersgd": 0.0008, "dense": 0.0}.get(method, 0.0004),
            "communicate": 0.0002 + 0.004 * sent * chance.uniform(0.9, 1.3),
        }
        seconds["step"] = sum(seconds.values()) + 0.0009
        spent = dense_bytes * sent * (1 if hook else union)
        lines.append(
            {
                "kind": "step",
                "step": step,
                "loss": 2.3 * math.exp(-7 * part) + 0.09 + abs(chance.gauss(0, 0.06)),
                "lr": 0.1,
                "finite": True,
                "density": real,
                "k": k,
                "union": round(N * real),
                "selected": round(N * real),
                "imbalance": 1.0 if hook else 1 + abs(chance.gauss(0.15, 0.05)),
                "buildup": None if hook else union,
                "threshold": 0.004 * math.exp(-part + chance.gauss(0, 0.05)) if method == "exdyna" else None,
                "error": None if norm is None else norm**2,
                "residual_norm": norm,
                "bytes": spent,
                "collectives": 1 if hook else 3,
                "seconds": seconds,
            }
        )
        done_bytes, done_seconds = done_bytes + spent, done_seconds + seconds["step"]
    common: dict[str, Any] = {
        "task": "mlp",
        "dataset": "digits",
        "model": "mlp",
        "sparsifier": method,
        "options": {},
        "density": density,
        "workers": workers,
        "virtual": False,
        "steps": steps,
        "batch": 16,
        "optimizer": "sgd",
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "seed": 0,
        "skew": 0.0,
    }
    header = {
        "kind": "run",
        "version": 1,
        "name": name,
        "settings": common | settings,
        "n": N,
        "metric": metric,
        "command": "gradsieve compare mlp --sparsifiers dense,topk,powersgd,exdyna --density 0.01 --workers 4",
        "conditions": CONDITIONS,
    }
    return Run(
        header,
        [*map(StepRecord.from_line, lines)],
        metrics,
        end and {"kind": "end", "reason": end, "step": steps},
        Path("runs") / method,
    )


def four_runs(**settings: Any) -> list[Run]:
    """The usual comparison."""
    finals = {"dense": 0.977, "topk": 0.975, "powersgd": 0.968, "exdyna": 0.973}
    return [make_run(name, final=final, **settings) for name, final in finals.items()]
