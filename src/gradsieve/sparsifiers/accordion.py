"""Accordion: Top-k that sends more while the gradient's norm is changing.

Agarwal et al., "Adaptive Gradient Communication via Critical Learning Regime Identification", MLSys 2021. There
each layer has its own regime and intervals are epochs; here the whole model has one, and intervals are steps.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve._check import BadInput, at_least, number, positive
from gradsieve.comm.collectives import Program
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.sparsifiers.base import Shape, vector_norm
from gradsieve.sparsifiers.topk import AnyTopK, top_k
from gradsieve.states import State, local, shared


@dataclass(frozen=True)
class AccordionState(State):
    # The same on all workers, but not marked shared: shared fields are compared as text, and a vector is too long.
    total: Tensor = local(power=1)  # the sum of this interval's updates
    critical: bool = shared(True)
    norm: float = shared(0.0, power=1)  # of the last interval's sum
    seen: int = shared(0)  # steps of this interval


@dataclass(frozen=True)
class Accordion(AnyTopK[AccordionState]):
    """Top-k with `high * k` positions in a critical regime, else with k.

    The updates of an interval are added up. If the norm of their sum differs from that of the interval before by
    a fraction of `eta` or more, the next interval is critical; so are the first two, for which there is nothing
    to compare with. All workers hold the same updates, so all find the same regime without communication.

    high: how many times more is sent in a critical regime.
    eta: the relative change of the norm that makes a regime critical.
    aggregation: as for `topk`.
    interval: steps between decisions. An element waits about 1/density steps until it is sent: in much shorter
        intervals the norm depends more on the density than on the gradient.
    """

    high: float = 10.0
    eta: float = 0.5
    interval: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= number("high", self.high) < float("inf"):
            raise BadInput(f"high must be at least 1 and finite, got {self.high}")
        positive("eta", self.eta)
        at_least("interval", self.interval, 1)

    def init(self, shape: Shape) -> AccordionState:
        return AccordionState(torch.zeros(shape.n, dtype=torch.float32))

    def select(self, state: AccordionState, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        return top_k(acc, min(step.n, round(self.high * step.k)) if state.critical else step.k, step)

    def update(self, state: AccordionState, selection: Selection, sent: Sent, step: Step) -> AccordionState:
        assert sent.indices is not None
        total = state.total.to(sent.values.device).index_add(0, sent.indices, sent.values)
        if state.seen + 1 < self.interval:
            return replace(state, total=total, seen=state.seen + 1)
        now = vector_norm(total)
        return AccordionState(torch.zeros_like(total), changed(state.norm, now, self.eta), now)


def changed(before: float, now: float, eta: float) -> bool:
    """Whether a norm changed by a fraction of eta or more; a change from zero always counts."""
    return before == 0 or abs(before - now) / before >= eta
