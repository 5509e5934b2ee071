"""The oracle: the k largest magnitudes of the sum over all workers. To compare with: it is not cheap."""

from dataclasses import dataclass

from torch import Tensor

from gradsieve import exchange
from gradsieve.collectives import AllReduce, Program
from gradsieve.exchange import Exchanged, Step
from gradsieve.sparsifiers.base import Sparsifier, largest


@dataclass(eq=False)
class Oracle(Sparsifier):
    """What a selection that knew everybody's accumulator would send. Knowing it costs a dense all-reduce."""

    def select(self, acc: Tensor, hits: Tensor, step: Step) -> Program[Tensor]:
        total = yield AllReduce("oracle", acc.clone())
        return largest(total, step.k)

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        return exchange.agreed(acc, picked, pulse, step)
