"""How many elements to send in a step: the same in each, more where they matter more within a budget, or whatever
lies above a fixed threshold."""

import math
from typing import Protocol

import torch
from torch import Tensor

from gradsieve.exchange import Step
from gradsieve.sparsifiers._table import Table

KNOWN = ("steady", "budget", "fixed")

UNKNOWN = 8  # sparse steps before a level is known; dense steps, which teach nothing, do not count
HEAD_START = 1.1  # the first level, as a multiple of the threshold of the last of these
EARLY = 0.1  # the part of the run in which what is above the level is a surge of gradients, and sent at once
EARLY_RISE = 0.0375  # of the level's logarithm in a step of that part: residuals fill, also without a surge
LATE_RISE = 0.3  # by how much it may rise in a later step
FALL = 0.25  # by how much it may fall in a later step, or by which part of the way to powers of ten below
SMOOTH = 0.8  # what is left of a step's energy in the recent mean after each further step
RESERVE = 0.75  # of the density: so much a surge leaves for every step to come
HASTE = 0.8  # by how much more than its equal share of the rest a step gets after a surge
SURGE = 10.0  # times the energy of the first steps: so large a surge calls for all of that haste
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
    level is the threshold. In the first tenth of the run it rises as thresholds do while residuals fill: the mean
    is sent, and what lies above the level if that is more and gradients *surge*, that is, are no smaller than in
    the first steps, but for chance. So the surge with which many trainings begin is sent as it comes, instead of
    lying in residuals for hundreds of steps. Later the level moves towards what would send just the mean now, and
    is there at once, but for bursts: nobody knows whether gradients that grow will shrink again. But those that
    surged will: after that, steps get more than an equal share, and the last ones less.

    The state is [level, owed, total steps, last, first, squares, recent, peak, seen]: owed is how many elements
    fewer than k a step were sent so far; last is the threshold that would have sent the mean in the last step;
    the others are about the gradients' energy, the mean over workers of squared norms: its mean over the first
    steps, the mean of its square over them, its recent mean, and the largest that this was in a surge. Seen is
    how many steps of this sparsifier there were.
    """

    def __init__(self, total_steps: int, ceiling: float) -> None:
        self.ceiling = ceiling
        self.state: list[float | None] = [None, 0, total_steps, None, None, None, None, None, 0]
        self._next: list[float | None] = [None] * 6  # the state but for what counts steps and elements
        self._norms: list[Tensor] | None = None

    def begin(self, step: Step) -> None:
        self._norms = [] if self._seen < UNKNOWN or step.index < self._early + 1 else None

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
        level, _, _, last, *energies, _, _ = self.state
        if level is None or last is None or level >= last:  # it is seen anyway
            return math.inf
        if step.index < self._early and not _surges(*energies):
            return math.inf
        return self._highest(level, step)

    def mean(self, step: Step) -> float:
        share = max(0.0, step.k + self._owed / self._left(step))
        return share if step.index < self._early else share * (1 + self._haste * self._free(step))

    def wanted(self, step: Step) -> int:
        return max(1, math.ceil(self.mean(step)))

    def count(self, table: Table, step: Step, energy: float | None) -> int:
        mean, level = self.mean(step), self.state[0]
        energies = self._felt(energy, step)
        if level is None or self._seen < UNKNOWN:
            self._next = [HEAD_START * table.edge(table.bin_with(step.k)) or None, None, *energies, None]
            return min(step.k, self._affordable(step))
        early, surge = step.index < self._early, _surges(*energies)
        now = table.edge(table.bin_with(max(1, round(mean))))
        moved = self._moved(level, now, surge, step)
        passing = mean if moved == now or (early and not surge) else table.above(table.bin_of(moved))
        peak = self.state[7]
        if early and passing > mean:
            peak = max(peak or 0.0, energies[2] or 0.0)
        self._next = [moved, now, *energies, peak]
        free = self._free(step)
        least = mean if early else mean * (1 - free * (1 - LEAST))
        most = max(mean, min(self._affordable(step), mean * (1 + free * (self.ceiling - 1))))
        return min(round(min(max(passing, least), most)), math.floor(self.ceiling * step.k), step.n)

    def _felt(self, energy: float | None, step: Step) -> list[float | None]:
        """The gradients' energies after this step, as the state has them."""
        first, squares, recent = self.state[4:7]
        if energy is None:
            return [first, squares, recent]
        if first is None or squares is None or recent is None:
            return [energy, energy**2, energy]
        if self._seen < UNKNOWN:
            first += (energy - first) / (self._seen + 1)
            return [first, squares + (energy**2 - squares) / (self._seen + 1), first]
        return [first, squares, SMOOTH * recent + (1 - SMOOTH) * energy]

    def _moved(self, level: float, now: float, surge: bool, step: Step) -> float:
        """The level after this step: an early one lifts it, later ones bring it to what sends the mean now."""
        highest = self._highest(level, step)
        if step.index < self._early:
            return highest
        if now and step.index < self._early + 1:  # it rose until now, and is maybe far away from what there is
            return min(now, highest) if surge else now
        fall = FALL * max(1.0, math.log(level / now) if now else 0.0)
        return min(max(now, level * math.exp(-fall)), highest)

    def observe(self, selected: int, step: Step) -> None:
        level, *felt = self._next
        self.state = [level, self._owed + step.k - selected, self._total, *felt, self._seen + 1]

    def rescale(self, factor: float) -> None:
        factors = (factor, 1, 1, factor, factor**2, factor**4, factor**2, factor**2, 1)
        self.state = [None if x is None else x * y for x, y in zip(self.state, factors, strict=True)]

    @property
    def _haste(self) -> float:
        """By how much more than an equal share later steps get, by how far gradients surged."""
        first, peak = self.state[4], self.state[7]
        return HASTE * min(1.0, max(0.0, (peak / first - 1) / (SURGE - 1))) if first and peak else 0.0

    def _highest(self, level: float, step: Step) -> float:
        """Where the level gets in this early step, or how high it may get in this later one."""
        return level * math.exp(EARLY_RISE if step.index < self._early else LATE_RISE)

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
    def _seen(self) -> int:
        return int(self.state[8] or 0)

    @property
    def _total(self) -> int:
        return int(self.state[2] or 0)


def _surges(first: float | None, squares: float | None, recent: float | None) -> bool:
    """Whether gradients are no smaller than in the first steps, but for what is chance."""
    if first is None or squares is None or recent is None:
        return True
    return recent >= first - math.sqrt(max(squares - first**2, 0.0))
