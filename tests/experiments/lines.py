"""Lines of a record, made by hand."""

from typing import Any

HEADER: dict[str, Any] = {
    "kind": "run",
    "version": 1,
    "name": "topk",
    "settings": {"task": "mlp", "dataset": "digits", "density": 0.01, "workers": 4, "virtual": True},
    "n": 1000,
    "metric": {"name": "accuracy", "higher_is_better": True, "percent": True},
    "command": "gradsieve train mlp",
    "conditions": {"torch": "2"},
}


def step(number: int, **changes: Any) -> dict[str, Any]:
    seconds = {"forward": 0.001, "backward": 0.002, "select": 0.003, "communicate": 0.004, "step": 0.011}
    line = {"kind": "step", "step": number, "loss": 1.0, "density": 0.01, "bytes": 100.0, "seconds": seconds}
    return {**line, **changes}


def metric(done: int, value: float) -> dict[str, Any]:
    return {"kind": "metric", "step": done, "value": value, "bytes": 0.0, "seconds": 0.0}
