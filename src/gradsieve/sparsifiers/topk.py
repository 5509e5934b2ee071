"""Top-k: each worker picks the k largest magnitudes of its own accumulator.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.
"""

from dataclasses import dataclass

from torch import Tensor

from gradsieve import exchange
from gradsieve._check import one_of
from gradsieve.collectives import Program
from gradsieve.exchange import Exchanged, Step
from gradsieve.sparsifiers.base import Sparsifier, largest


@dataclass(eq=False)
class TopK(Sparsifier):
    """`S_r` = positions of the k largest `|acc_r|`.

    aggregation: "union" sends everybody's values wherever anybody picked (between k and P*k positions: gradient
    build-up); "own" sends only a worker's own values at its own picks (the textbook's form).
    """

    aggregation: str = "union"

    def __post_init__(self) -> None:
        one_of("aggregation", self.aggregation, exchange.AGGREGATIONS)

    def count(self, step: Step) -> int:
        """How many positions each worker picks in this step."""
        return step.k

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        return largest(acc, self.count(step))

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        combine = exchange.AGGREGATIONS[self.aggregation]
        return combine(acc, picked, pulse, step, [self.count(step)] * step.world_size)
