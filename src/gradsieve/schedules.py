"""The density of each step: a constant or a function of the step; initial steps may send the full gradient."""

from collections.abc import Callable
from dataclasses import dataclass

from gradsieve._check import at_least, fraction

Schedule = Callable[[int], float]

_LOOK_AHEAD = 10_000  # steps in which a function of the step must leave a density of 1 for its target to be known


@dataclass(frozen=True)
class Density:
    """The density of every step, and `target`, the one that thresholds are prepared for.

    >>> density = as_density(0.001, dense_steps=2)
    >>> [density(step) for step in (0, 1, 2)], density.target
    ([1.0, 1.0, 0.001], 0.001)
    """

    later: Schedule
    target: float
    dense_steps: int = 0

    def __call__(self, step: int) -> float:
        return 1.0 if step < self.dense_steps else fraction("density", self.later(step))


def as_density(density: float | Schedule, dense_steps: int = 0) -> Density:
    """A number, or a function of the step, after `dense_steps` initial steps that send the full gradient."""
    at_least("dense_steps", dense_steps, 0)
    if isinstance(density, Density):
        return Density(density, density.target, dense_steps)
    if callable(density):
        first = (fraction("density", density(step)) for step in range(dense_steps, dense_steps + _LOOK_AHEAD))
        return Density(density, next((value for value in first if value < 1), 1.0), dense_steps)
    fraction("density", density)
    return Density(lambda step: density, density, dense_steps)


def dgc_warm_up(density: float, steps_per_epoch: int) -> Density:
    """Deep Gradient Compression's warm-up: 25 %, 6.25 %, 1.5625 %, 0.4 % in the first four epochs, then `density`.

    Never below `density` itself.

    >>> schedule = dgc_warm_up(0.001, steps_per_epoch=10)
    >>> [schedule(step) for step in (0, 10, 20, 30, 40)]
    [0.25, 0.0625, 0.015625, 0.004, 0.001]
    """
    fraction("density", density)
    at_least("steps_per_epoch", steps_per_epoch, 1)
    warm_up = (0.25, 0.0625, 0.015625, 0.004)

    def schedule(step: int) -> float:
        epoch = step // steps_per_epoch
        return max(density, warm_up[epoch]) if epoch < len(warm_up) else density

    return Density(schedule, density)
