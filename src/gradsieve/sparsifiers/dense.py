"""Everything is sent: plain data-parallel training, and what every sparsifier becomes at density 1."""

from dataclasses import dataclass

from torch import Tensor

from gradsieve import exchange
from gradsieve.collectives import Program
from gradsieve.exchange import Exchanged, Step
from gradsieve.sparsifiers.base import Sparsifier


@dataclass(eq=False)
class Dense(Sparsifier):
    """`update = mean_r acc_r`; the residual is always zero."""

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        return hits  # nothing in particular: the exchange takes all

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        return exchange.dense(acc, pulse, step)
