"""SAGE: each worker scales its threshold from step to step by two factors computed from its accumulator.

Yoon, Jeong and Oh, "SAGE: toward on-the-fly gradient compression ratio scaling", The Journal of Supercomputing,
2023. The rule is the one of the authors' public code; the paper's text was not at hand.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradsieve import ops
from gradsieve._check import at_least, positive
from gradsieve.comm.collectives import Program, immediately
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.sparsifiers.base import Shape, Sparsifier, select_from
from gradsieve.sparsifiers.hard_threshold import authors_rule
from gradsieve.states import State, local

MARGIN = 0.05  # Slovin's formula: how far off a sample's average may be
BALANCE = 0.99975  # a little below 1, so that the threshold rises slowly where the density is met


@dataclass(frozen=True)
class SAGEState(State):
    threshold: float = local(power=1)
    average: float = local(0.0, power=1)  # mean magnitude of the last sample that was not all zero


@dataclass(frozen=True)
class SAGE(Sparsifier[SAGEState]):
    """`S_r = {i: |acc_r[i]| >= threshold_r}`, with `threshold <- threshold * alpha * beta` from step to step.

    alpha is the factor by which the mean magnitude of a sample (at most 400 elements) has grown since the last
    step; beta = `2 / (0.99975 + exp(d - c))`, where d is the target density and c the one that `threshold * alpha`
    would give. As d - c is small, so is each correction: at d = 0.001 a threshold that is too high falls by less
    than 0.04 % per step. Every worker searches the whole vector, so the union grows with the number of workers.

    threshold: initial value, or None for the rule of the hard threshold, `1 / (2 sqrt(k))`.
    seed: of the samples, combined with step and rank.
    """

    threshold: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.threshold is not None:
            positive("threshold", self.threshold)
        at_least("seed", self.seed, 0)

    def init(self, shape: Shape) -> SAGEState:
        return SAGEState(authors_rule(shape.k) if self.threshold is None else float(self.threshold))

    def select(self, state: SAGEState, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        average, threshold = self._sampled(acc, step), state.threshold
        if average and state.average:
            threshold *= average / state.average
        if state.average:
            threshold *= beta(step.k / step.n, len(select_from(acc, threshold)) / step.n)
        after = SAGEState(threshold, average or state.average)
        return immediately(Selection(select_from(acc, threshold), threshold=threshold, plan=after))

    def update(self, state: SAGEState, selection: Selection, sent: Sent, step: Step) -> SAGEState:
        after: SAGEState = selection.plan
        return after

    def _sampled(self, acc: Tensor, step: Step) -> float:
        """The mean magnitude of a sample. As in the authors' code, tensors of all sizes are drawn equally often."""
        chance = np.random.default_rng([self.seed, step.index, step.rank])
        sizes = np.array([size for size in step.sizes or (step.n,) if size])
        drawn = chance.integers(len(sizes), size=sample_size(step.n))
        places = (sizes.cumsum() - sizes)[drawn] + chance.integers(sizes[drawn])
        sample = acc[torch.from_numpy(places).to(acc.device, non_blocking=True)]
        return float(ops.read(sample.abs().mean(dtype=torch.float64))[0])


def sample_size(n: int) -> int:
    """Slovin's formula; at least one."""
    return max(1, int(n / (1 + n * MARGIN * MARGIN)))


def beta(wanted: float, found: float) -> float:
    """Above 1 where more was found than wanted, below 1 where less was."""
    return 2 / (BALANCE + math.exp(wanted - found))
