"""SIDCo: the threshold is read off a distribution fitted to the accumulator, in several stages.

Abdelmoniem et al., "An Efficient Statistical-based Gradient Compression Technique for Distributed Training
Systems", MLSys 2021.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradsieve import ops
from gradsieve._check import BadInput, at_least, one_of
from gradsieve.comm.collectives import Program, immediately
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.sparsifiers.base import Shape, Sparsifier
from gradsieve.states import State, local

FIRST_STAGE = 0.25  # the density that the first of several stages aims at
ADAPT_EVERY = 5  # steps whose actual densities are averaged before the number of stages changes
TOO_MANY, TOO_FEW = 1.2, 0.8


@dataclass(frozen=True)
class SIDCoState(State):
    stages: int = local()
    ratio_sum: float = local(0.0)  # of actual to target counts, since the number of stages was last looked at
    ratio_count: int = local(0)


@dataclass(frozen=True)
class SIDCo(Sparsifier[SIDCoState]):
    """`S_r = {i: |acc_r[i]| > threshold_r}`, each worker with its own fit and its own number of stages.

    distribution: "exponential", "pareto" (generalized) or "gamma" (first stage; later ones are Pareto).
    stages: initial number of stages.
    adapt: whether to change that number every 5 steps.
    """

    distribution: str = "exponential"
    stages: int = 1
    adapt: bool = True

    def __post_init__(self) -> None:
        one_of("distribution", self.distribution, FIRST)
        if self.distribution == "gamma":
            _special()
        at_least("stages", self.stages, 1)

    def init(self, shape: Shape) -> SIDCoState:
        return SIDCoState(self.stages)

    def select(self, state: SIDCoState, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        threshold = fit_threshold(acc.abs(), step.k / step.n, state.stages, self.distribution)
        with np.errstate(over="ignore"):  # a threshold beyond float32 becomes infinite, which selects nothing
            level = np.float32(threshold)
        # The kernel selects >=, the paper >: the next float32 makes them the same.
        above = float(np.nextafter(level, np.float32(np.inf)))
        return immediately(Selection(ops.select_above(acc, above)))

    def update(self, state: SIDCoState, selection: Selection, sent: Sent, step: Step) -> SIDCoState:
        total, count = state.ratio_sum + sent.counts[step.rank] / step.k, state.ratio_count + 1
        if not self.adapt or count < ADAPT_EVERY:
            return replace(state, ratio_sum=total, ratio_count=count)
        mean = total / count
        change = -1 if mean > TOO_MANY else 1 if mean < TOO_FEW else 0
        most = max(1, math.ceil(math.log2(step.n / step.k)))
        return SIDCoState(min(max(state.stages + change, 1), most))


def fit_threshold(x: Tensor, density: float, stages: int, distribution: str) -> float:
    """The threshold that `density` of the magnitudes x should exceed; infinite if x is all zero."""
    scale = _number(x.max())
    if scale == 0:
        return math.inf
    x = x / scale  # moments of very large or very small magnitudes would leave float32's range
    several = stages > 1 and density < FIRST_STAGE
    threshold = FIRST[distribution](x, FIRST_STAGE if several else density)
    if several:
        share = (density / FIRST_STAGE) ** (1 / (stages - 1))
        later = _exponential if distribution == "exponential" else _pareto
        for _ in range(stages - 1):
            tail = x[x > threshold]
            if len(tail) < 2:  # nothing left to fit
                break
            start = _number(tail.min())
            threshold = start + later(tail - start, share)
    return threshold * scale


def _exponential(x: Tensor, q: float) -> float:
    return -_mean(x) * math.log(q)


def _pareto(x: Tensor, q: float) -> float:
    mean, variance = _mean(x), _number(x.double().var(correction=0))
    if variance == 0:
        return _exponential(x, q)
    c = mean * mean / variance
    shape, scale = (c - 1) / 2, mean * (c + 1) / 2
    return scale * (-math.log(q) if abs(shape) < 1e-9 else (1 - q**shape) / shape)


def _gamma(x: Tensor, q: float) -> float:
    everything = len(x)
    x = x[x > 0]  # a logarithm of zero would hide all others
    q = min(1.0, q * everything / len(x))
    mean = _mean(x)
    s = math.log(mean) - _mean(x.log())
    if s <= 0:  # all equal: the fit degenerates to a point
        return mean
    a = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return mean / a * float(_special().gammaincinv(a, 1 - q))


def _special() -> Any:
    """SciPy's special functions: nothing else here needs SciPy."""
    try:
        import scipy.special
    except ImportError as problem:
        raise BadInput('distribution "gamma" of sidco needs SciPy: pip install scipy') from problem
    return scipy.special


def _number(x: Tensor) -> float:
    return float(ops.read(x)[0])


def _mean(x: Tensor) -> float:
    return _number(x.mean(dtype=torch.float64))


FIRST: dict[str, Callable[[Tensor, float], float]] = {
    "exponential": _exponential,
    "pareto": _pareto,
    "gamma": _gamma,
}
