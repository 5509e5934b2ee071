"""The oracle: the k largest magnitudes of the sum over all workers. For comparison only: it is not cheap."""

from dataclasses import dataclass

from torch import Tensor

from gradsieve.comm import exchange
from gradsieve.extend import Program, Selection, Sent, Sparsifier, State, Step, all_reduce, largest


@dataclass(frozen=True)
class Oracle(Sparsifier[State]):
    """What a selection that knew all accumulators would send. Knowing them costs a dense all-reduce."""

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        total = yield from all_reduce("oracle", acc.clone())
        return Selection(largest(total, step.k))

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return exchange.agreed(acc, selection, step)
