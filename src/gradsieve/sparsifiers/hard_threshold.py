"""Hard threshold: one constant threshold for the whole run, so that the total error over the run is minimal.

Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradsieve import exchange
from gradsieve._check import one_of, positive
from gradsieve.collectives import Program
from gradsieve.exchange import Exchanged, Step
from gradsieve.sparsifiers.base import Sparsifier, Window


@dataclass(eq=False)
class HardThreshold(Sparsifier):
    """`S_r = {i: |acc_r[i]| >= threshold}`; how many that are floats with the gradient.

    An absolute compressor: after every step `|residual| < threshold` everywhere. threshold: the constant, or None
    for the rule of the authors' scripts, `1 / (2 sqrt(k))`, which suits some models and not others.
    aggregation: "union" sends everybody's values wherever anybody picked; "own" sends only a worker's own values at
    its own picks (the paper's form).
    """

    threshold: float | None = None
    aggregation: str = "union"
    SHARED: ClassVar[tuple[str, ...]] = ("scale",)

    def __post_init__(self) -> None:
        if self.threshold is not None:
            positive("threshold", self.threshold)
        one_of("aggregation", self.aggregation, exchange.AGGREGATIONS)

    def setup(self, step: Step, sizes: Sequence[int]) -> None:
        self.scale = 1.0  # the threshold is meant for gradients as they are, not for a loss scale's multiples
        self._used: float | None = None

    def window(self, step: Step) -> Window:
        self._used = self.scale * (authors_rule(step.k) if self.threshold is None else self.threshold)
        return Window(self._used, 0, step.n)

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        return hits

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        return exchange.AGGREGATIONS[self.aggregation](acc, picked, pulse, step)

    def rescale(self, factor: float) -> None:
        self.scale *= factor

    @property
    def threshold_in_use(self) -> float | None:
        return self._used


def authors_rule(k: int) -> float:
    """The start of both papers' thresholds: it knows the model's size, but not the gradient's scale."""
    return 1 / (2 * math.sqrt(k))
