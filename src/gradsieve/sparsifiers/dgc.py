"""DGC: momentum is applied before the exchange, by every worker to its own gradient, and waits with it.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR 2018.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve._check import below_one, positive
from gradsieve.exchange import Exchanged, Span, Step
from gradsieve.sparsifiers.base import Sparsifier, largest, select_from, vector_norm

SAMPLED = 0.01  # of the elements, or
EXPECTED = 2  # as many as are needed to expect two of those to be sent among them
FEWEST, MOST = 0.8, 1.3  # of k: how many may be sent
LOWER, LOWERED = 0.8, 10  # by what, and how often, a threshold that too few pass is multiplied


@dataclass(eq=False)
class DGC(Sparsifier):
    """`u <- m u + grad; residual <- residual + u`; what is sent, is cleared in both (momentum factor masking).

    `S_r` = positions above a threshold that 1 % of the magnitudes suggest, and that is refined until between 0.8 k
    and 1.3 k pass it. The optimizer must have no momentum of its own. Where a step sends everything, nothing is
    late: u is not cleared, and this is SGD with momentum.

    momentum: m, in [0, 1).
    clip: the largest norm that a tensor's gradient may have, divided by the square root of the number of workers,
        before it is added; None for no limit. A worker knows the norm of its whole gradient only when the last
        piece has come, so each tensor is clipped by its own, as in the authors' public code.
    """

    momentum: float = 0.9
    clip: float | None = None
    SHARED: ClassVar[tuple[str, ...]] = ("scale",)
    LOCAL: ClassVar[tuple[str, ...]] = ("velocity",)

    def __post_init__(self) -> None:
        below_one("momentum", self.momentum)
        if self.clip is not None:
            positive("clip", self.clip)

    def setup(self, step: Step, sizes: Sequence[int]) -> None:
        self.velocity = torch.zeros(step.n)  # u
        self.scale = 1.0  # clip is meant for gradients as they are, not for a loss scale's multiples
        self._next = torch.zeros(step.n)  # u after this step, if it stands
        self._ends = torch.tensor(sizes).cumsum(0).tolist()
        self._root = math.sqrt(step.world_size)
        self._used: float | None = None

    def fold(self, grad: Tensor, start: int) -> Tensor:
        if not self.momentum and self.clip is None:
            return grad
        self.velocity, self._next = self.velocity.to(grad.device), self._next.to(grad.device)
        stop = start + len(grad)
        folded = self._next[start:stop]
        torch.mul(self.velocity[start:stop], self.momentum, out=folded)
        edges = [start, *(end for end in self._ends if start < end < stop), stop] if self.clip else [start, stop]
        for first, behind in itertools.pairwise(edges):
            part = slice(first - start, behind - start)
            folded[part] += self._clipped(grad[part].float())
        return folded

    def commit(self, sent: Exchanged, waiting: Sequence[Span]) -> None:
        self.velocity, self._next = self._next, self.velocity
        if sent.indices is not None:
            self.velocity[sent.indices] = 0
        for start, stop in waiting:
            self.velocity[start:stop] = self._next[start:stop]

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        threshold = sampled_threshold(acc, step)
        for level in (*(threshold * LOWER**i for i in range(LOWERED)), 0.0):
            self._used, picked = level, select_from(acc, level)
            if len(picked) >= FEWEST * step.k:
                break
        if len(picked) > MOST * step.k:
            picked = picked[largest(acc[picked], step.k)]
            self._used = float(acc[picked].abs().min())
        return picked

    def _clipped(self, grad: Tensor) -> Tensor:
        if self.clip is None:
            return grad
        factor = self.clip * self.scale / self._root / (vector_norm(grad) or math.inf)
        return grad * factor if 0 < factor < 1 else grad

    def rescale(self, factor: float) -> None:
        self.velocity.mul_(factor)
        self.scale *= factor

    def for_gradients_only(self) -> str:
        return "applies momentum and clipping to gradients" if self.momentum or self.clip else ""

    @property
    def threshold_in_use(self) -> float | None:
        return self._used


def sampled_threshold(acc: Tensor, step: Step) -> float:
    """What k/n of a sample reach: every so-many-th element, beginning one further in every step."""
    wanted = max(SAMPLED * step.n, EXPECTED * step.n / step.k)
    stride = max(1, int(step.n / wanted))
    sample = acc[step.index % stride :: stride].abs()
    return float(sample.topk(max(1, round(len(sample) * step.k / step.n))).values.min())
