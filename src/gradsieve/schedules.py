"""How dense each step is: a constant, or a function of the step."""

from collections.abc import Callable

from gradsieve._check import at_least, fraction

Schedule = Callable[[int], float]


def constant(density: float) -> Schedule:
    """The same in every step."""
    fraction("density", density)
    return lambda step: density


def dgc_warm_up(density: float, steps_per_epoch: int) -> Schedule:
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

    return schedule


def as_schedule(density: float | Schedule, dense_steps: int = 0) -> Schedule:
    """A number or a function as a schedule, with `dense_steps` first steps in which everything is sent."""
    at_least("dense_steps", dense_steps, 0)
    later = density if callable(density) else constant(density)

    def schedule(step: int) -> float:
        return 1.0 if step < dense_steps else fraction("density", later(step))

    return schedule
