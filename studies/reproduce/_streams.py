"""Generated gradients through real reducers: no model, no training.

Every worker's gradient is a shared signal plus its own noise. Both are slices of one long normal sequence, at
offsets drawn in every step: as good as new numbers at any single position, and much cheaper. A profile makes parts
of the vector larger.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gradsieve.reducer import SparseReducer
from gradsieve.reports import StepReport
from gradsieve.virtual import virtual_reducers
from gradsieve.worlds import VirtualWorld
from gradsieve_lab.runs.methods import parse_method

LAYERS, HOT, HOTTER = 10, 3, 100.0  # scale of the fourth of ten equal layers, relative to the others
_SIGNAL, _NOISE = 0.5, 1.0


@dataclass(frozen=True)
class Stream:
    """Gradients of n elements for some workers; equal fields give equal gradients."""

    n: int
    workers: int
    skewed: bool = False
    scale: float = 1.0
    seed: int = 0

    @property
    def sizes(self) -> list[int]:
        """Sizes of the layers."""
        edges = [layer * self.n // LAYERS for layer in range(LAYERS + 1)]
        return [behind - first for first, behind in itertools.pairwise(edges)]

    def profile(self) -> Tensor:
        """The scale of each element."""
        louder = [HOTTER if self.skewed and layer == HOT else 1.0 for layer in range(LAYERS)]
        return self.scale * torch.tensor(louder).repeat_interleave(torch.tensor(self.sizes))

    def steps(self, count: int) -> Iterator[list[Tensor]]:
        """One gradient per worker, step after step."""
        chance = torch.Generator().manual_seed(self.seed)
        pool = torch.randn(2 * self.n, generator=chance)
        profile = self.profile()
        for _ in range(count):
            places = torch.randint(self.n, (self.workers + 1,), generator=chance).tolist()
            signal, *noises = (pool[place : place + self.n] for place in places)
            yield [torch.add(noise * _NOISE, signal, alpha=_SIGNAL).mul_(profile) for noise in noises]


@dataclass(frozen=True)
class Done:
    """One step of all workers."""

    reports: list[StepReport]
    energy: (
        float | None
    )  # of what was sent, over the most that as many elements of the sum hold; None: not measured


def play(
    stream: Stream,
    method: str,
    density: float,
    steps: int,
    weigh_last: int = 0,
    before_step: Callable[[], None] = lambda: None,
) -> list[Done]:
    """Reduce a stream with a method as `parse_method` reads it; captured energy is measured in the last steps."""
    parsed = parse_method(method, density)
    reducers = virtual_reducers(
        parsed.name,
        parsed.density,
        world_size=stream.workers,
        options=parsed.options,
        sizes=stream.sizes,
        measure=False,
    )
    world, done = VirtualWorld(stream.workers), []
    for step, grads in enumerate(stream.steps(steps)):
        before_step()
        updates = world.run([reducer.reduce(grad, out=grad) for reducer, grad in zip(reducers, grads, strict=True)])
        reports, sent = (
            [reducer.report for reducer in reducers if reducer.report is not None],
            updates[0] * stream.workers,
        )
        weighs = step >= steps - weigh_last
        done.append(Done(reports, captured(_owed(reducers, sent), sent, reports[0].union) if weighs else None))
    return done


def _owed(reducers: Sequence[SparseReducer], sent: Tensor) -> Tensor:
    """The sum of all accumulators: nothing is lost, so it equals what was sent plus what remains."""
    return torch.stack([sent, *(reducer.residual for reducer in reducers)]).sum(0)


def captured(owed: Tensor, sent: Tensor, count: int) -> float:
    """The sum of squares of the sent elements, over that of the `count` largest elements.

    >>> captured(torch.tensor([3.0, 4.0, 0.0]), torch.tensor([3.0, 0.0, 0.0]), 1)
    0.5625
    """
    if not count:
        return 0.0
    best = owed.square().topk(count).values.sum(dtype=torch.float64)
    return float(sent.square().sum(dtype=torch.float64) / best)


def imbalances(done: Sequence[Done]) -> list[float]:
    return [step.reports[0].imbalance for step in done]


def imbalance_by_chance(count: int, workers: int, draws: int = 1000) -> float:
    """The mean imbalance if each of `count` elements were assigned to a worker uniformly at random."""
    drawn = np.random.default_rng(0).multinomial(count, [1 / workers] * workers, size=draws)
    return float((drawn.max(1) * workers / count).mean())
