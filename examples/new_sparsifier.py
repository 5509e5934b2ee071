"""A new sparsifier, written by following CONTRIBUTING.md: cyclic-k sends every (n/k)-th element, then moves on.

Run it:  python examples/new_sparsifier.py
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import gradsieve
from gradsieve import Exchanged, Program, Sparsifier, Step, exchange


@dataclass(eq=False)
class CyclicK(Sparsifier):
    """`S = {i: i mod period == t mod period}`, `period = n // k`: all workers know it, so no index travels.

    first: where the first step begins.
    """

    first: int = 0

    def __post_init__(self) -> None:
        if self.first < 0:
            raise ValueError(f"first must not be negative, got {self.first}")

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        period = max(1, step.n // step.k)
        return torch.arange((self.first + step.index) % period, step.n, period, device=acc.device)

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        return exchange.agreed(acc, picked, pulse, step)


gradsieve.SPARSIFIERS["cyclick"] = CyclicK


def main() -> None:
    world = gradsieve.VirtualWorld(4)
    reducers = [
        gradsieve.SparseReducer(gradsieve.make_sparsifier("cyclick"), density=0.01, rank=rank, world_size=4)
        for rank in range(4)
    ]
    for _ in range(3):
        grads = [torch.randn(10_000) for _ in range(4)]
        world.run([reducer.reduce(grad) for reducer, grad in zip(reducers, grads, strict=True)])
        report = reducers[0].end_step()
        print(f"step {report.step}: sent {report.density:.2%}, residual norm {report.residual_norm:.1f}")


if __name__ == "__main__":
    main()
