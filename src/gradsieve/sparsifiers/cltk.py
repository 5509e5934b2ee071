"""CLT-k: one worker, the leader, picks for all; leadership rotates.

Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
Training", NeurIPS 2020.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve._check import fraction
from gradsieve.comm import exchange
from gradsieve.comm.collectives import Program, immediately
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.feedback import Feedback, LowPass
from gradsieve.sparsifiers.base import Sparsifier, largest
from gradsieve.states import State


@dataclass(frozen=True)
class CLTk(Sparsifier[State]):
    """`S` = top-k of the leader's accumulator, leader `t mod P`; the others wait for it.

    beta: of ScaleCom's low-pass filter (`gradsieve.LowPass`); 1 is plain error feedback.
    """

    NEEDS_FINITE: ClassVar[bool] = False

    beta: float = 1.0

    def __post_init__(self) -> None:
        fraction("beta", self.beta)

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        # Only the leader pays for the sort: the others pass k positions that the broadcast overwrites.
        leads = step.rank == _leader(step)
        return immediately(Selection(largest(acc, step.k) if leads else torch.arange(step.k, device=acc.device)))

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return exchange.leader(acc, selection, step, _leader(step))

    def feedback(self) -> Feedback:
        return LowPass(self.beta)


def _leader(step: Step) -> int:
    return step.index % step.world_size
