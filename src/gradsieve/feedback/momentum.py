"""Momentum before the exchange: every worker applies it to its own gradient before adding it to the residual.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR 2018.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve._check import below_one, positive
from gradsieve.comm.step import Sent, Span
from gradsieve.feedback.plain import Feedback, Folding
from gradsieve.states import State, local, shared


@dataclass(frozen=True)
class MomentumState(State):
    velocity: Tensor = local(power=1)  # u
    scale: float = shared(1.0, power=1)  # of the loss: `clip` applies to unscaled gradients


@dataclass(frozen=True)
class Momentum(Feedback):
    """`u <- m u + grad; residual <- residual + u`; what is sent is cleared in both (momentum factor masking).

    The optimizer must have no momentum of its own. If a step sends everything, nothing is delayed: u is not
    cleared, and this is SGD with momentum.

    momentum: m, in [0, 1).
    clip: the largest norm of a tensor's gradient before it is added, divided by the square root of the number of
        workers; None for no limit. The norm of the whole gradient is known only after the last piece, so each
        tensor is clipped by its own norm, as in the authors' public code.
    """

    momentum: float = 0.9
    clip: float | None = None

    def __post_init__(self) -> None:
        below_one("momentum", self.momentum)
        if self.clip is not None:
            positive("clip", self.clip)

    def init(self, n: int) -> MomentumState:
        return MomentumState(torch.zeros(n, dtype=torch.float32))

    def begin(self, state: State, sizes: Sequence[int], world_size: int) -> Folding:
        assert isinstance(state, MomentumState)
        return MomentumFolding(self, state, sizes, world_size)

    def for_gradients_only(self) -> str:
        return "applies momentum and clipping to gradients"


class MomentumFolding(Folding):
    """Computes the next velocity piece by piece and keeps the last one until the step is complete."""

    def __init__(self, feedback: Momentum, state: MomentumState, sizes: Sequence[int], world_size: int) -> None:
        self.feedback, self.before = feedback, state
        self.after = torch.empty_like(state.velocity)
        self.ends = list(itertools.accumulate(sizes))
        self.most = math.inf if feedback.clip is None else feedback.clip * state.scale / math.sqrt(world_size)

    def add(self, grad: Tensor, start: int) -> Tensor:
        if self.after.device != grad.device:
            self.after = self.after.to(grad.device)
        stop = start + len(grad)
        added = self.after[start:stop]
        torch.mul(self.before.velocity[start:stop].to(grad.device), self.feedback.momentum, out=added)
        inside = () if self.feedback.clip is None else (end for end in self.ends if start < end < stop)
        for first, behind in itertools.pairwise([start, *inside, stop]):
            part = slice(first - start, behind - start)
            added[part] += clipped(grad[part].float(), self.most)
        return added

    def finish(self, sent: Sent, held_back: Sequence[Span]) -> MomentumState:
        if sent.indices is not None:
            self.after[sent.indices] = 0
        for start, stop in held_back:
            self.after[start:stop] = self.before.velocity[start:stop]
        return MomentumState(self.after, self.before.scale)


def clipped(grad: Tensor, most: float) -> Tensor:
    """The gradient, scaled down so that its norm is at most `most`."""
    if most == math.inf:
        return grad
    norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
    factor = torch.where(norm > 0, most / norm, 1.0).clamp(max=1.0)
    return grad * torch.where(factor > 0, factor, 1.0).to(grad.dtype)
