"""Final scores of runs, on a scale on which runs with different seeds can be averaged."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from gradsieve_lab.runs.records import Run
from gradsieve_lab.tasks.base import Metric

TINY = 1e-15  # below it a difference is rounding


@dataclass(frozen=True)
class Scale:
    """Points if more is better, powers of ten if less is better: a higher score is always better."""

    metric: Metric

    @property
    def unit(self) -> str:
        return (
            f"points of {self.metric.name}"
            if self.metric.higher_is_better
            else f"powers of ten of {self.metric.name}"
        )

    def score(self, value: float | None) -> float:
        """
        >>> Scale(Metric("f - f*", higher_is_better=False)).score(0.01)
        2.0
        """
        if self.metric.higher_is_better:
            return 100 * (value or 0.0)
        return -math.inf if value is None else -math.log10(max(value, TINY))

    def value(self, score: float) -> float:
        """The metric that has this score."""
        return score / 100 if self.metric.higher_is_better else 10**-score


def score(run: Run, late: int = 1) -> float:
    """The mean over the run's last evaluations."""
    return fmean(Scale(run.metric).score(line["value"]) for line in run.metrics[-late:])


def gain(scores: Sequence[float], base: Sequence[float]) -> tuple[float, float | None]:
    """Mean difference of runs with the same seeds, and its standard error, or None if there is none.

    >>> gain([2.0, 4.0], [1.0, 1.0])
    (2.0, 1.0)
    """
    differences = [one - other for one, other in zip(scores, base, strict=True)]
    known = len(differences) > 1 and all(map(math.isfinite, differences))
    return fmean(differences), stdev(differences) / math.sqrt(len(differences)) if known else None
