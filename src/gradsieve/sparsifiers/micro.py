"""MiCRO: exclusive partitions of equal size, and one threshold for all workers.

Yoon and Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN
Training", HiPC 2023.
"""

from dataclasses import dataclass
from itertools import pairwise

from gradsieve.comm.step import Selection, Sent, Span, Step
from gradsieve.sparsifiers.base import Shape
from gradsieve.sparsifiers.exdyna import Exclusive
from gradsieve.sparsifiers.exdyna.threshold import ThresholdState


@dataclass(frozen=True)
class MiCRO(Exclusive[ThresholdState]):
    """ExDyna with static, equal partitions: where gradients are uneven, so are the workers' loads."""

    def init(self, shape: Shape) -> ThresholdState:
        return ThresholdState()

    def partitions(self, state: ThresholdState, step: Step) -> list[Span]:
        edges = [part * step.n // step.world_size for part in range(step.world_size + 1)]
        return list(pairwise(edges))

    def threshold_state(self, state: ThresholdState) -> ThresholdState:
        return state

    def update(self, state: ThresholdState, selection: Selection, sent: Sent, step: Step) -> ThresholdState:
        after: ThresholdState = selection.plan
        return after
