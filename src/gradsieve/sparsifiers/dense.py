"""Dense: everything is sent, as in plain data-parallel training. Every sparsifier at density 1 does the same."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradsieve.comm import exchange
from gradsieve.comm.collectives import Program, immediately
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.sparsifiers.base import Sparsifier
from gradsieve.states import State


@dataclass(frozen=True)
class Dense(Sparsifier[State]):
    """`update = mean_r acc_r`; the residual is always zero."""

    NEEDS_FINITE: ClassVar[bool] = False

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        return immediately(Selection(hits))  # nothing in particular: the exchange takes all

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return exchange.dense(acc, selection, step)
