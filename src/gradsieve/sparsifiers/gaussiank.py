"""Gaussian-k: the threshold is a normal distribution's quantile, moved until about k elements pass it.

Shi et al., "Understanding Top-k Sparsification in Distributed Deep Learning", 2019.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.collectives import Program, immediately
from gradsieve.comm.step import Selection, Step
from gradsieve.sparsifiers.base import Sparsifier, select_from
from gradsieve.states import State

ADJUSTMENTS = 4  # at most
FEW, MANY = 2 / 3, 4 / 3  # of k: a count outside moves the threshold
LOWER, HIGHER = 0.5, 1.5
_CHUNK = 1 << 16  # elements converted to float64 at a time


@dataclass(frozen=True)
class GaussianK(Sparsifier[State]):
    """`S_r = {i: |acc_r[i]| >= threshold_r}`, with `|mean| + z * std` of `acc_r` as the first guess.

    z is the quantile that k/n of a standard normal distribution exceed in magnitude. While the count is not between
    2k/3 and 4k/3, the threshold is halved or multiplied by 1.5, at most four times. Two things differ from the
    paper: the mean enters by its magnitude, so that `-acc` and `acc` have the same threshold and none is negative;
    and if nothing passes the final threshold, the last one that something passed is used, so no worker is stuck.
    """

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        threshold = used = normal_threshold(*moments(acc), step.k / step.n)
        picked = last = select_from(acc, threshold)
        for _ in range(ADJUSTMENTS):
            if FEW * step.k <= len(last) <= MANY * step.k or threshold == 0:
                break
            threshold *= LOWER if len(last) < step.k else HIGHER
            last = select_from(acc, threshold)
            if len(last):
                picked, used = last, threshold
        return immediately(Selection(picked, threshold=used))


def normal_threshold(mean: float, std: float, density: float) -> float:
    """The magnitude that a fraction `density` of a zero-mean normal distribution exceeds, plus `|mean|`."""
    return abs(mean) - NormalDist().inv_cdf(density / 2) * std


def moments(x: Tensor) -> tuple[float, float]:
    """Mean and standard deviation, in float64 without a copy of the whole vector."""
    sums = torch.zeros(2, dtype=torch.float64, device=x.device)
    for part in x.split(_CHUNK):
        wide = part.double()
        sums += torch.stack([wide.sum(), wide.dot(wide)])
    mean, square = ops.read(sums / len(x))[0].tolist()
    return mean, math.sqrt(max(0.0, square - mean * mean))
