"""How many elements to send in a step: the same in each, more where they matter more within a budget, or whatever
lies above a fixed threshold."""

import math
from typing import Protocol

import torch
from torch import Tensor

from gradsieve.exchange import Step
from gradsieve.sparsifiers._table import Table

KNOWN = ("steady", "budget", "fixed")

WARM_UP = 8  # first steps, in which no level is known
HEAD_START = 1.2  # the first level, as a multiple of the threshold of the last of these: above it is a surge
EARLY = 0.1  # the part of the run in which the level rises slowly, so that a surge of gradients is sent at once
EARLY_RISE = 1.8  # by how much its logarithm may rise in that part
LATE_RISE = 0.3  # and in any later step
FALL = 0.25  # by how much it may fall in a later step, or by which part of the way to powers of ten below
SMOOTH = 0.8  # what is left of a step's energy in the recent mean after each further step
RESERVE = 0.75  # of the density: so much a surge leaves for every step to come
HASTE = 0.8  # by how much more than its equal share of the rest a step gets after a surge
AHEAD = 0.2  # of the budget: a surge that took so much calls for all of that haste, a smaller one for less
LEAST = 0.1  # of the mean: so much is sent in any later step, and in an early one the mean
PIECE = 2**20  # elements of which the norm is taken at once
LARGEST = 2.0**127  # energy that is told to others: float32 has room for it
ENDGAME = 0.125  # the part of the run in which the limits close in on the mean, so that the budget is met


class Spending(Protocol):
    """Decides how many elements are sent, knowing how many lie above each level."""

    state: list[float | None]

    def begin(self, step: Step) -> None:
        """A step begins; `notice` sees its gradient piece by piece."""

    def notice(self, grad: Tensor) -> None:
        """A piece of this worker's gradient."""

    def energy(self) -> float | None:
        """The square of its norm, if all workers must know the mean of these; None if not."""

    def count(self, table: Table, step: Step, energy: float | None) -> int:
        """How many to send in this step; `energy` is the mean over workers."""

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

    def begin(self, step: Step) -> None:
        pass

    def notice(self, grad: Tensor) -> None:
        pass

    def energy(self) -> float | None:
        return None

    def level(self, step: Step) -> float:
        return math.inf

    def count(self, table: Table, step: Step, energy: float | None) -> int:
        return step.k

    def wanted(self, step: Step) -> int:
        return step.k

    def observe(self, selected: int, step: Step) -> None:
        pass

    def rescale(self, factor: float) -> None:
        pass


class Fixed(Steady):
    """What lies above one level, however much that is. The level is rounded down to the edge of a bin."""

    def __init__(self, threshold: float) -> None:
        self.state: list[float | None] = [threshold]

    @property
    def threshold(self) -> float:
        return self.state[0] or 0.0

    def level(self, step: Step) -> float:
        return self.threshold

    def count(self, table: Table, step: Step, energy: float | None) -> int:
        return table.above(table.bin_of(self.threshold))

    def rescale(self, factor: float) -> None:
        self.state = [self.threshold * factor]


class Budget:
    """`density * n` elements a step in the mean over the run, sent where the threshold, which moves slowly, lets
    them pass.

    Everything follows from the *mean*, what a step may send: an equal share of what is left of the budget. The
    level moves towards the threshold that would send just the mean now. In the first tenth of the run it only
    rises, and slowly: the mean is sent, and what lies above the level if that is more and gradients *surge*, that
    is, are no smaller than in the first steps, but for chance. So the surge with which many trainings begin is
    sent as it comes, instead of lying in residuals for hundreds of steps. Where gradients do not surge and
    thresholds rise all the same, because residuals fill, they go on rising, and haste gains nothing. Later the
    level follows at once, but for bursts: nobody knows whether gradients that grow will shrink again. But those
    that surged will: after that, steps get more than an equal share, and the last ones less.

    The state is [level, owed, total steps, last, first, squares, recent]: owed is how many elements fewer than k a
    step were sent so far; last is the threshold that would have sent the mean in the last step; the others are
    about the gradients' energy, the mean over workers of squared norms: its mean over the first steps, the mean of
    its square over them, and its recent mean.
    """

    def __init__(self, total_steps: int, ceiling: float) -> None:
        self.ceiling = ceiling
        self.state: list[float | None] = [None, 0, total_steps, None, None, None, None]
        self._next: list[float | None] = [None] * 5  # the state but for owed and total steps
        self._norms: list[Tensor] | None = None

    def begin(self, step: Step) -> None:
        self._norms = [] if self.state[0] is None or step.index < self._early + 1 else None

    def notice(self, grad: Tensor) -> None:
        if self._norms is not None:
            # In pieces: torch makes a float32 copy of what has another type.
            self._norms += [torch.linalg.vector_norm(part, dtype=torch.float32) for part in grad.split(PIECE)]

    def energy(self) -> float | None:
        if self._norms is None:
            return None
        energy = float(torch.stack(self._norms).double().square().sum()) if self._norms else 0.0
        return 0.0 if math.isnan(energy) else min(energy, LARGEST)  # not a number: the step will be called off

    def level(self, step: Step) -> float:
        level, _, _, last, *energies = self.state
        if level is None or last is None or level >= last:  # it is seen anyway
            return math.inf
        if step.index < self._early and not _surges(*energies):
            return math.inf
        return level * math.exp(self._rise(step))

    def mean(self, step: Step) -> float:
        left, ahead = self._left(step), max(0, -self._owed) / (step.k * self._total)
        haste = 0.0 if step.index < self._early else HASTE * self._free(step) * min(1.0, ahead / AHEAD)
        return max(0.0, (left * step.k + self._owed) / left) * (1 + haste)

    def wanted(self, step: Step) -> int:
        return max(1, math.ceil(self.mean(step)))

    def count(self, table: Table, step: Step, energy: float | None) -> int:
        mean, level = self.mean(step), self.state[0]
        energies = self._felt(energy, step)
        if level is None or step.index < WARM_UP:
            self._next = [HEAD_START * table.edge(table.bin_with(step.k)) or None, None, *energies]
            return min(step.k, self._affordable(step))
        early, surge = step.index < self._early, _surges(*energies)
        now = table.edge(table.bin_with(max(1, round(mean))))
        moved = self._moved(level, now, surge, step)
        self._next = [moved, now, *energies]
        passing = mean if moved == now or (early and not surge) else table.above(table.bin_of(moved))
        free = self._free(step)
        least = mean if early else mean * (1 - free * (1 - LEAST))
        most = max(mean, min(self._affordable(step), mean * (1 + free * (self.ceiling - 1))))
        return min(round(min(max(passing, least), most)), math.floor(self.ceiling * step.k), step.n)

    def _felt(self, energy: float | None, step: Step) -> list[float | None]:
        """The gradients' energies after this step, as the state has them."""
        first, squares, recent = self.state[4:]
        if energy is None:
            return [first, squares, recent]
        if first is None or squares is None or recent is None:
            return [energy, energy**2, energy]
        if step.index < WARM_UP:
            first += (energy - first) / (step.index + 1)
            return [first, squares + (energy**2 - squares) / (step.index + 1), first]
        return [first, squares, SMOOTH * recent + (1 - SMOOTH) * energy]

    def _moved(self, level: float, now: float, surge: bool, step: Step) -> float:
        """The level after this step, on its way to the threshold that sends the mean now."""
        highest = level * math.exp(self._rise(step))
        if step.index < self._early:
            return min(max(now, level), highest)
        if now and step.index < self._early + 1:  # held until now, and maybe far away from what there is
            return min(now, highest) if surge else now
        fall = FALL * max(1.0, math.log(level / now) if now else 0.0)
        return min(max(now, level * math.exp(-fall)), highest)

    def observe(self, selected: int, step: Step) -> None:
        level, *felt = self._next
        self.state = [level, self._owed + step.k - selected, self._total, *felt]

    def rescale(self, factor: float) -> None:
        factors = (factor, 1, 1, factor, factor**2, factor**4, factor**2)
        self.state = [None if x is None else x * y for x, y in zip(self.state, factors, strict=True)]

    def _rise(self, step: Step) -> float:
        """By how much the level's logarithm may rise in this step."""
        return EARLY_RISE / self._early if step.index < self._early else LATE_RISE

    def _affordable(self, step: Step) -> int:
        """What leaves the reserve for all later steps."""
        return math.floor(self._owed + step.k + (1 - RESERVE) * (self._left(step) - 1) * step.k)

    def _free(self, step: Step) -> float:
        """How far the limits are open: 1, and in the last part of the run less and less."""
        return min(1.0, self._left(step) / (ENDGAME * self._total))

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


def _surges(first: float | None, squares: float | None, recent: float | None) -> bool:
    """Whether gradients are no smaller than in the first steps, but for what is chance."""
    if first is None or squares is None or recent is None:
        return True
    return recent >= first - math.sqrt(max(squares - first**2, 0.0))
