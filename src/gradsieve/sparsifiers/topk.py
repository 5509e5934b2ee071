"""Top-k: each worker picks the k largest magnitudes of its own accumulator.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradsieve._check import one_of
from gradsieve.comm import exchange
from gradsieve.comm.collectives import Program, immediately
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.sparsifiers.base import S, Sparsifier, largest
from gradsieve.states import State


@dataclass(frozen=True)
class AnyTopK(Sparsifier[S]):
    """What Top-k and its relatives share: two ways to combine picks."""

    NEEDS_FINITE: ClassVar[bool] = False

    aggregation: str = "union"

    def __post_init__(self) -> None:
        one_of("aggregation", self.aggregation, exchange.AGGREGATIONS)

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return exchange.AGGREGATIONS[self.aggregation](acc, selection, step)


@dataclass(frozen=True)
class TopK(AnyTopK[State]):
    """`S_r` = positions of the k largest `|acc_r|`.

    aggregation: "union" sends everybody's values wherever anybody picked (between k and P*k positions: gradient
    build-up); "own" sends only a worker's own values at its own picks (the textbook's form).
    """

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        return top_k(acc, step.k, step)


def top_k(acc: Tensor, count: int, step: Step) -> Program[Selection]:
    """As many positions from every worker, so all know the counts."""
    return immediately(Selection(largest(acc, count), [count] * step.world_size))
