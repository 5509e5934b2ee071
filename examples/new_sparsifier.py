"""A new sparsifier, the result of the steps in CONTRIBUTING.md: `python examples/new_sparsifier.py`."""

from dataclasses import dataclass

import torch
from torch import Tensor

import gradsieve
from gradsieve.extend import Program, Selection, Sent, Sparsifier, State, Step, agreed, at_least, immediately


@dataclass(frozen=True)
class CyclicK(Sparsifier[State]):
    """Every period-th element, `period = n // k`, starting one further in each step; no index is sent.

    first: the element at which the first step starts.
    """

    first: int = 0

    def __post_init__(self) -> None:
        at_least("first", self.first, 0)

    def select(self, state: State, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        period = max(1, step.n // step.k)
        start = (self.first + step.index) % period
        return immediately(Selection(torch.arange(start, step.n, period, device=acc.device)))

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return agreed(acc, selection, step)


gradsieve.SPARSIFIERS["cyclick"] = CyclicK


def main() -> None:
    world = gradsieve.VirtualWorld(4)
    reducers = gradsieve.virtual_reducers("cyclick", 0.01, world_size=4)
    for _ in range(3):
        grads = [torch.randn(10_000) for _ in range(4)]
        world.run([reducer.reduce(grad) for reducer, grad in zip(reducers, grads, strict=True)])
        report = reducers[0].report
        print(f"step {report.step}: sent {report.density:.2%}, residual norm {report.residual_norm:.1f}")


if __name__ == "__main__":
    main()
