"""CLT-k: a leader picks for all, and leadership goes round.

Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed
Training", NeurIPS 2020.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve import exchange
from gradsieve._check import fraction
from gradsieve.collectives import Program
from gradsieve.exchange import Exchanged, Step
from gradsieve.sparsifiers.base import Sparsifier, largest


@dataclass(eq=False)
class CLTk(Sparsifier):
    """`S` = top-k of the leader's accumulator, leader `t mod P`; the others wait for it.

    beta: ScaleCom's low-pass filter, `residual <- residual + beta * (grad - sent)`; 1 is plain error feedback,
    about 0.1 is meant for large batches. Below 1 the filter forgets on purpose: sent and kept no longer add up.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        fraction("beta", self.beta)

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        # Whoever does not lead pays for no sort: it hands in k positions that the broadcast overwrites.
        return largest(acc, step.k) if step.rank == _leader(step) else torch.arange(step.k, device=acc.device)

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        return exchange.leader(acc, picked, pulse, step, _leader(step))

    def settle_(self, residual: Tensor, before: Tensor) -> None:
        if self.beta < 1:
            residual.lerp_(before.to(residual.dtype), 1 - self.beta)

    def for_gradients_only(self) -> str:
        return "filters residuals" if self.beta < 1 else ""


def _leader(step: Step) -> int:
    return step.index % step.world_size
