"""SAGE: each worker scales its threshold from step to step, by two factors that it reads off its accumulator.

Yoon, Jeong and Oh, "SAGE: toward on-the-fly gradient compression ratio scaling", The Journal of Supercomputing,
2023. The rule is the one of the authors' public code; the paper's text was not at hand.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gradsieve._check import at_least, positive
from gradsieve.exchange import Exchanged, Step
from gradsieve.sparsifiers.base import Sparsifier, select_from
from gradsieve.sparsifiers.hard_threshold import authors_rule

MARGIN = 0.05  # Slovin's formula: how far off a sample's average may be
BALANCE = 0.99975  # a little below 1, so that the threshold rises slowly where the density is met


@dataclass(eq=False)
class SAGE(Sparsifier):
    """`S_r = {i: |acc_r[i]| >= threshold_r}`, with `threshold <- threshold * alpha * beta` from step to step.

    alpha is how much the average magnitude of a sample (400 elements at the most) has grown since the last step;
    beta = `2 / (0.99975 + exp(d - c))`, for the density c that `threshold * alpha` would give where d is asked
    for. As d - c is small, so is each correction: at d = 0.001 a threshold that is too high falls by less than
    0.04 % a step. Every worker looks at the whole vector, so the union still grows with the workers.

    threshold: where it starts, or None for the rule of the hard threshold, `1 / (2 sqrt(k))`.
    seed: another seed, other samples; each step and worker has its own.
    """

    threshold: float | None = None
    seed: int = 0
    LOCAL: ClassVar[tuple[str, ...]] = ("current", "average")

    def __post_init__(self) -> None:
        if self.threshold is not None:
            positive("threshold", self.threshold)
        at_least("seed", self.seed, 0)

    def setup(self, step: Step, sizes: Sequence[int]) -> None:
        self._sizes = np.array([size for size in sizes if size])
        self._starts = self._sizes.cumsum() - self._sizes
        self.current = authors_rule(step.k) if self.threshold is None else float(self.threshold)
        self.average = 0.0  # magnitude in the last sample that was not all zero; 0 before there was one
        self._next = self.current, self.average

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        average, threshold = self._sampled(acc, step), self.current
        if average and self.average:
            threshold *= average / self.average
        if self.average:
            threshold *= beta(step.k / step.n, len(select_from(acc, threshold)) / step.n)
        self._next = threshold, average or self.average
        return select_from(acc, threshold)

    def observe(self, sent: Exchanged, step: Step) -> None:
        self.current, self.average = self._next

    def rescale(self, factor: float) -> None:
        self.current *= factor
        self.average *= factor

    @property
    def threshold_in_use(self) -> float | None:
        return self._next[0]

    def _sampled(self, acc: Tensor, step: Step) -> float:
        """The average magnitude of a sample. As released, small tensors are drawn as often as large ones."""
        chance = np.random.default_rng([self.seed, step.index, step.rank])
        drawn = chance.integers(len(self._sizes), size=sample_size(step.n))
        places = self._starts[drawn] + chance.integers(self._sizes[drawn])
        return float(acc[torch.from_numpy(places).to(acc.device)].abs().mean(dtype=torch.float64))


def sample_size(n: int) -> int:
    """Slovin's formula; one at least."""
    return max(1, int(n / (1 + n * MARGIN * MARGIN)))


def beta(wanted: float, found: float) -> float:
    """Above 1 where more was found than wanted, below 1 where less was."""
    return 2 / (BALANCE + math.exp(wanted - found))
