"""Densities that fall in the first epochs.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR 2018.
"""

from dataclasses import dataclass

from gradsieve._check import at_least, fraction
from gradsieve.density.base import Density

WARM_UP = (0.25, 0.0625, 0.015625, 0.004)  # one epoch each


@dataclass(frozen=True)
class WarmUp(Density):
    """See `dgc_warm_up`."""

    density: float
    steps_per_epoch: int

    @property
    def target(self) -> float:
        return self.density

    def at(self, step: int) -> float:
        epoch = step // self.steps_per_epoch
        return max(self.density, WARM_UP[epoch]) if epoch < len(WARM_UP) else self.density


def dgc_warm_up(density: float, steps_per_epoch: int) -> WarmUp:
    """Deep Gradient Compression's warm-up: 25 %, 6.25 %, 1.5625 %, 0.4 % in the first four epochs, then `density`.

    Never below `density` itself.

    Examples:
        >>> schedule = dgc_warm_up(0.001, steps_per_epoch=10)
        >>> [schedule.at(step) for step in (0, 10, 20, 30, 40)]
        [0.25, 0.0625, 0.015625, 0.004, 0.001]
    """
    return WarmUp(fraction("density", density), at_least("steps_per_epoch", steps_per_epoch, 1))
