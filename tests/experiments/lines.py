"""Lines of a record, made by hand."""

from typing import Any

from gradsieve_lab.runs.step_record import StepRecord

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
    sent = {
        "finite": True,
        "density": 0.01,
        "k": 10,
        "union": 10,
        "selected": 10,
        "imbalance": 1.0,
        "collectives": 3,
    }
    line = {"kind": "step", "step": number, "lr": 0.1, "loss": 1.0, **sent, "bytes": 100.0, "seconds": seconds}
    return {**line, **changes}


def record(number: int, **changes: Any) -> StepRecord:
    return StepRecord.from_line(step(number, **changes))


def metric(done: int, value: float) -> dict[str, Any]:
    return {"kind": "metric", "step": done, "value": value, "bytes": 0.0, "seconds": 0.0}
