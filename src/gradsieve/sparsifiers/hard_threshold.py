"""Hard threshold: one constant threshold for the whole run, so that the total error over the run is minimal.

Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from gradsieve._check import positive
from gradsieve.sparsifiers.base import Sparsifier, Step, Window


@dataclass(eq=False)
class HardThreshold(Sparsifier):
    """`S_r = {i: |acc_r[i]| >= threshold}`; how many that are floats with the gradient.

    An absolute compressor: after every step `|residual| < threshold` everywhere. threshold: the constant, or None
    for the rule of the authors' scripts, `1 / (2 sqrt(k))`, which suits some models and not others.
    """

    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None:
            positive("threshold", self.threshold)

    def window(self, step: Step) -> Window:
        threshold = authors_rule(step.k) if self.threshold is None else self.threshold
        return Window(threshold, 0, step.n)

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        return hits


def authors_rule(k: int) -> float:
    """The start of both papers' thresholds: it knows the model's size, but not the gradient's scale."""
    return 1 / (2 * math.sqrt(k))
