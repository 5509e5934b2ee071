"""Hard threshold: one constant threshold for the whole run, so that the total error over the run is minimal.

Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from gradsieve._check import one_of, positive
from gradsieve.comm import exchange
from gradsieve.comm.collectives import Program, immediately
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.sparsifiers.base import Shape, Sparsifier, Window
from gradsieve.states import State, shared


@dataclass(frozen=True)
class HardThresholdState(State):
    scale: float = shared(1.0, power=1)  # of the loss: the threshold is meant for gradients as they are


@dataclass(frozen=True)
class HardThreshold(Sparsifier[HardThresholdState]):
    """`S_r = {i: |acc_r[i]| >= threshold}`; how many elements that is varies with the gradient.

    An absolute compressor: after every step `|residual| < threshold` everywhere.

    threshold: the constant, or None for the rule of the authors' scripts, `1 / (2 sqrt(k))`, which suits some
        models and not others.
    aggregation: "union" sends everybody's values wherever anybody picked; "own" sends only a worker's own values at
    its own picks (the paper's form).
    """

    threshold: float | None = None
    aggregation: str = "union"

    def __post_init__(self) -> None:
        if self.threshold is not None:
            positive("threshold", self.threshold)
        one_of("aggregation", self.aggregation, exchange.AGGREGATIONS)

    def init(self, shape: Shape) -> HardThresholdState:
        return HardThresholdState()

    def window(self, state: HardThresholdState, step: Step) -> Window:
        threshold = authors_rule(step.k) if self.threshold is None else self.threshold
        return Window(state.scale * threshold, 0, step.n)

    def select(self, state: HardThresholdState, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        return immediately(Selection(hits, threshold=self.window(state, step).threshold))

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return exchange.AGGREGATIONS[self.aggregation](acc, selection, step)


def authors_rule(k: int) -> float:
    """The initial threshold in the authors' scripts: it depends on k, not on the gradient's scale."""
    return 1 / (2 * math.sqrt(k))
