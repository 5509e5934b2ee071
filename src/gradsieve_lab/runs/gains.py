"""The fraction of data-parallel training's gain over training alone that a run keeps."""

import math
from collections.abc import Sequence

from gradsieve_lab.runs.methods import ALONE, DENSE
from gradsieve_lab.runs.records import Line, Run
from gradsieve_lab.tasks.base import Metric

# A run and its baselines do the same work on the same data; learning rates may differ.
_SAME = ("task", "dataset", "model", "width", "limit", "workers", "skew", "batch", "seed", "lab_hosts", "lab_rate")


def gain_kept(value: float, alone: float, dense: float, metric: Metric) -> float | None:
    """`(value - alone) / (dense - alone)`, with logarithms of perplexities.

    0 is as good as alone, 1 as good as dense; it may lie outside. None if there is nothing to gain.

    >>> round(gain_kept(0.9, alone=0.8, dense=1.0, metric=Metric("accuracy", True)), 6)
    0.5
    """
    if metric.name == "perplexity":
        value, alone, dense = (math.log(x) if x > 0 else math.nan for x in (value, alone, dense))
    kept = (value - alone) / (dense - alone) if dense != alone else math.nan
    return kept + 0.0 if math.isfinite(kept) else None  # 0.0, not -0.0


def gains_kept(runs: Sequence[Run]) -> list[float | None]:
    """The gain each run keeps; None if its dense or alone baseline is missing or ended at another step."""
    return [_gain(run, runs) for run in runs]


def _gain(run: Run, runs: Sequence[Run]) -> float | None:
    values = [_final(found, run) for found in (run, _baseline(ALONE, run, runs), _baseline(DENSE, run, runs))]
    value, alone, dense = values
    if value is None or alone is None or dense is None:
        return None
    return gain_kept(value, alone, dense, run.metric)


def _baseline(method: str, run: Run, runs: Sequence[Run]) -> Run | None:
    def same(other: Run) -> bool:
        return all(other.settings.get(key) == run.settings.get(key) for key in _SAME)

    return next((other for other in runs if other.settings.get("sparsifier") == method and same(other)), None)


def _final(found: Run | None, run: Run) -> float | None:
    """The last value of a run, if it is from after as many steps as that of `run`."""
    if found is None or not found.metrics or not run.metrics:
        return None
    last: Line = found.metrics[-1]
    value: float | None = last["value"] if last["step"] == run.metrics[-1]["step"] else None
    return value
