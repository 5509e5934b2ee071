"""Accordion: Top-k that sends more while the gradient's norm is changing.

Agarwal et al., "Adaptive Gradient Communication via Critical Learning Regime Identification", MLSys 2021. There
each layer has its own regime and intervals are epochs; here the whole model has one, and intervals are steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gradsieve._check import BadInput, at_least, number, positive
from gradsieve.exchange import Exchanged, Step
from gradsieve.sparsifiers.base import vector_norm
from gradsieve.sparsifiers.topk import TopK


@dataclass(eq=False)
class Accordion(TopK):
    """Top-k with `high * k` positions in a critical regime, else with k.

    The updates of an interval are added up. If the norm of their sum differs from that of the interval before by
    a share of `eta` or more, the next interval is critical; so are the first two, before which nothing can be
    compared. All workers hold the same updates, so all find the same regime without talking.

    high: how many times more is sent in a critical regime.
    eta: the relative change of the norm that makes a regime critical.
    interval: steps from one decision to the next. An element waits for about 1/density steps until it is sent: in
        much shorter intervals the norm says more about the density than about the gradient.
    """

    high: float = 10.0
    eta: float = 0.5
    interval: int = 100
    SHARED: ClassVar[tuple[str, ...]] = ("critical", "norm", "seen")
    # The same on all workers, too; but they are compared as text, for which a vector is too long.
    LOCAL: ClassVar[tuple[str, ...]] = ("total",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= number("high", self.high) < float("inf"):
            raise BadInput(f"high must be at least 1 and finite, got {self.high}")
        positive("eta", self.eta)
        at_least("interval", self.interval, 1)

    def setup(self, step: Step, sizes: Sequence[int]) -> None:
        self.critical = True
        self.norm = 0.0  # of the last interval's sum
        self.seen = 0  # steps of this interval
        self.total = torch.zeros(step.n)

    def count(self, step: Step) -> int:
        return min(step.n, round(self.high * step.k)) if self.critical else step.k

    def observe(self, sent: Exchanged, step: Step) -> None:
        assert sent.indices is not None
        self.total = self.total.to(sent.values.device)
        self.total.index_add_(0, sent.indices, sent.values)
        self.seen += 1
        if self.seen < self.interval:
            return
        now = vector_norm(self.total)
        self.critical = changed(self.norm, now, self.eta)
        self.norm, self.seen = now, 0
        self.total.zero_()

    def rescale(self, factor: float) -> None:
        self.norm *= factor
        self.total.mul_(factor)


def changed(before: float, now: float, eta: float) -> bool:
    """Whether a norm changed by a share of eta or more; from zero, always."""
    return before == 0 or abs(before - now) / before >= eta
