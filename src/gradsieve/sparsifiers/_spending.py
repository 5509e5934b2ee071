"""How many elements to send in a step: the same in each, more where they matter more within a budget, or whatever
lies above a fixed threshold."""

import math
from typing import Protocol

from gradsieve.exchange import Step
from gradsieve.sparsifiers._table import Table

KNOWN = ("steady", "budget", "fixed")

WARM_UP = 8  # first steps, in which no level is known
HEAD_START = 1.2  # the first level, as a multiple of the threshold of the last of these: above it is a surge
EARLY = 0.1  # the part of the run in which the level rises slowly, so that a surge of gradients is sent at once
EARLY_RISE = 1.8  # by how much its logarithm may rise in that part
LATE_RISE = 0.3  # and in any later step
FALL = 0.05  # by how much it may fall in a later step, or by which part of the way to powers of ten below
MANY = 100  # elements a step: with fewer, chance moves the level, and it may fall faster
RESERVE = 0.75  # of the mean: so much is kept for every step to come
LEAST = 0.1  # of the mean: so much is sent in any later step, and in an early one the mean
ENDGAME = 0.125  # the part of the run in which the limits close in on the mean, so that the budget is met


class Spending(Protocol):
    """Decides how many elements are sent, knowing how many lie above each level."""

    state: list[float | None]

    def count(self, table: Table, step: Step) -> int:
        """How many to send in this step."""

    def wanted(self, step: Step) -> int:
        """How many may be asked for in this step, unless magnitudes rise."""

    def level(self, step: Step) -> float:
        """A threshold that must be seen in this step; infinite where there is none."""

    def observe(self, selected: int, step: Step) -> None:
        """So many were sent."""

    def rescale(self, factor: float) -> None:
        """Gradients and residuals were multiplied by `factor`."""


class Steady:
    """As many in every step as the density asks for."""

    def __init__(self) -> None:
        self.state: list[float | None] = []

    def level(self, step: Step) -> float:
        return math.inf

    def count(self, table: Table, step: Step) -> int:
        return step.k

    def wanted(self, step: Step) -> int:
        return step.k

    def observe(self, selected: int, step: Step) -> None:
        pass

    def rescale(self, factor: float) -> None:
        pass


class Fixed:
    """What lies above one level, however much that is. The level is rounded down to the edge of a bin."""

    def __init__(self, threshold: float) -> None:
        self.state: list[float | None] = [threshold]

    @property
    def threshold(self) -> float:
        return self.state[0] or 0.0

    def level(self, step: Step) -> float:
        return self.threshold

    def count(self, table: Table, step: Step) -> int:
        return table.above(table.bin_of(self.threshold))

    def wanted(self, step: Step) -> int:
        return step.k

    def observe(self, selected: int, step: Step) -> None:
        pass

    def rescale(self, factor: float) -> None:
        self.state = [self.threshold * factor]


class Budget:
    """`density * n` elements a step in the mean over the run, sent where the threshold, which moves slowly, lets
    them pass.

    Everything follows from the *mean*, what is left of the budget for each step that is left. The level moves
    towards the threshold that would send just the mean now. In the first tenth of the run it only rises, and
    slowly: the mean is sent, and what lies above the level if that is more. So the surge of gradients with which
    many trainings begin is sent as it comes, instead of lying in residuals for hundreds of steps; without one,
    nothing is done that steady would not do. Later the level follows faster: nobody knows whether gradients that
    grow will shrink again.

    The state is [level, owed, total steps]: owed is how many elements fewer than k a step were sent so far.
    """

    def __init__(self, total_steps: int, ceiling: float) -> None:
        self.ceiling = ceiling
        self.state: list[float | None] = [None, 0, total_steps]
        self._next: float | None = None

    def level(self, step: Step) -> float:
        level = self.state[0]
        return math.inf if level is None else level * math.exp(-self._fall(step))

    def mean(self, step: Step) -> float:
        left = self._left(step)
        return max(0.0, (left * step.k + self._owed) / left)

    def wanted(self, step: Step) -> int:
        return max(1, math.ceil(self.mean(step)))

    def count(self, table: Table, step: Step) -> int:
        mean, level = self.mean(step), self.state[0]
        if level is None or step.index < WARM_UP:
            self._next = HEAD_START * table.edge(table.bin_with(step.k)) or None
            return min(step.k, self._affordable(step))
        now = table.edge(table.bin_with(max(1, round(mean))))
        self._next = self._moved(level, now, step)
        passing = mean if self._next == now else table.above(table.bin_of(self._next))
        free = min(1.0, self._left(step) / (ENDGAME * self._total))
        least = mean if step.index < self._early else mean * (1 - free * (1 - LEAST))
        most = max(mean, min(self._affordable(step), mean * (1 + free * (self.ceiling - 1))))
        return min(round(min(max(passing, least), most)), math.floor(self.ceiling * step.k), step.n)

    def _moved(self, level: float, now: float, step: Step) -> float:
        """The level after this step, on its way to the threshold that sends the mean now."""
        if step.index < self._early:
            return min(max(now, level), level * math.exp(EARLY_RISE / self._early))
        fall = self._fall(step) * max(1.0, math.log(level / now) if now else 0.0)
        held = now and step.index < self._early + 1  # until now, and maybe far above what there is
        return min(now if held else max(now, level * math.exp(-fall)), level * math.exp(LATE_RISE))

    def observe(self, selected: int, step: Step) -> None:
        self.state = [self._next, self._owed + step.k - selected, self._total]

    def rescale(self, factor: float) -> None:
        level, *rest = self.state
        self.state = [None if level is None else level * factor, *rest]

    def _fall(self, step: Step) -> float:
        """By how much the level's logarithm may fall in this step."""
        return FALL * max(1.0, math.sqrt(MANY / max(self.mean(step), 1)))

    def _affordable(self, step: Step) -> int:
        """What leaves the reserve for all later steps."""
        return math.floor(self._owed + step.k + (1 - RESERVE) * (self._left(step) - 1) * step.k)

    def _left(self, step: Step) -> int:
        """Steps to go, this one included; past the end of the run, one."""
        return max(self._total - step.index, 1)

    @property
    def _early(self) -> float:
        """How many steps are early ones."""
        return EARLY * self._total

    @property
    def _owed(self) -> int:
        return int(self.state[1] or 0)

    @property
    def _total(self) -> int:
        return int(self.state[2] or 0)
