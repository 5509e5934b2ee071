"""A budget for the whole run: the density is the mean over all steps, and early bursts are sent at once.

In many trainings gradients grow at first and then shrink. With the same number of elements in every step, what does
not fit waits in residuals for hundreds of steps. A budget sends it at once, and less afterwards.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradsieve._check import BadInput, at_least, fraction, number
from gradsieve.comm.step import Decision, Magnitudes, Quota
from gradsieve.density.base import Density, elements
from gradsieve.states import State, shared

LEARNING = 8  # initial sparse steps that define the usual threshold and the usual gradient norm
EARLY = 0.1  # fraction of the run in which a burst may be sent
HEAD_START = 1.1  # initial level of a burst, as a multiple of the threshold of the last learning step
RISE = 0.0375  # growth per step of the logarithm of that level, as thresholds rise while residuals fill
RESERVE = 0.75  # of the density, that a burst leaves for every later step

_PIECE = 2**20  # elements per call of `vector_norm`, which makes a float32 copy of other types
_LARGEST = 2.0**127  # largest energy that is sent to others, within float32


@dataclass(frozen=True)
class BudgetState(State):
    """What is left to spend, and what defines a burst. Energy is the mean squared norm of gradients."""

    owed: int = shared(0)  # elements that were saved so far, compared with the mean
    seen: int = shared(0)  # sparse steps so far
    level: float | None = shared(None, power=1)  # magnitude above which elements belong to a burst
    usual: float = shared(0.0, power=2)  # mean energy of the learning steps
    usual_square: float = shared(0.0, power=4)  # mean squared energy of the learning steps
    recent: float = shared(0.0, power=2)  # running mean of the energy

    @property
    def bursting(self) -> bool:
        """Whether gradients are as large as in the learning steps, within one standard deviation."""
        return self.recent >= self.usual - math.sqrt(max(self.usual_square - self.usual**2, 0.0))


@dataclass(frozen=True)
class Budget(Density):
    """`density * n` elements per step on average over `total_steps`.

    In the first tenth of the run, while gradients are large, all elements above a slowly rising level are sent at
    once. Every other step sends an equal share of what is left, so the total is met exactly. Without such bursts
    the run is the same as with a constant density, bit for bit.

    density: the fraction of the gradient to send per step, on average, in (0, 1].
    total_steps: number of steps in the run.
    ceiling: no step sends more than this multiple of the density.
    """

    density: float
    total_steps: int
    ceiling: float = 20.0

    def __post_init__(self) -> None:
        fraction("density", self.density)
        at_least("total_steps", self.total_steps, 1)
        if not 1 <= number("ceiling", self.ceiling) < math.inf:
            raise BadInput(f"ceiling must be at least 1 and finite, got {self.ceiling}")

    @property
    def needs_magnitudes(self) -> bool:
        return True

    @property
    def from_user(self) -> bool:
        return False

    @property
    def target(self) -> float:
        return self.density

    def at(self, step: int) -> float:
        return self.density

    def init(self) -> BudgetState:
        return BudgetState()

    def quota(self, state: State, step: int, n: int) -> Quota:
        assert isinstance(state, BudgetState)
        return BudgetQuota(self, state, step, n)

    def update(self, state: State, decision: Decision | None, step: int, n: int, sent: int) -> State:
        if decision is None:  # everything was sent
            return state
        assert isinstance(decision.state, BudgetState)
        return replace(decision.state, owed=decision.state.owed + elements(self.density, n) - sent)


class BudgetQuota:
    """One step's part of a budget."""

    def __init__(self, budget: Budget, state: BudgetState, step: int, n: int) -> None:
        self.state, self.n, self.k = state, n, elements(budget.density, n)
        self.left = max(budget.total_steps - step, 1)  # steps to go, this one included
        self.early = step < EARLY * budget.total_steps
        self.most = min(math.floor(budget.ceiling * self.k), n)
        self._norms: list[Tensor] = []

    @property
    def share(self) -> float:
        """An equal share of the remaining budget."""
        return max(0.0, self.k + self.state.owed / self.left)

    @property
    def expected(self) -> int:
        return max(1, math.ceil(self.share))

    @property
    def level(self) -> float:
        return self._risen if self.early and self.state.bursting else math.inf

    @property
    def energy(self) -> Tensor | None:
        if not self.early:
            return None
        energy = torch.stack(self._norms).double().square().sum() if self._norms else torch.zeros(())
        return energy.nan_to_num(0.0).clamp(max=_LARGEST).float()  # not a number: the step will be skipped

    def notice(self, grad: Tensor) -> None:
        if self.early:
            self._norms += [torch.linalg.vector_norm(part, dtype=torch.float32) for part in grad.split(_PIECE)]

    def decide(self, seen: Magnitudes, energy: float | None) -> Decision:
        state, wanted = self.state, self.share
        if energy is not None and state.seen < LEARNING:
            level = HEAD_START * seen.level_of(self.k) or None
            state = replace(self._learned(energy), level=level)
        elif energy is not None:
            recent = state.recent + (energy - state.recent) / LEARNING
            state = replace(state, recent=recent, level=None if state.level is None else self._risen)
            if state.bursting and state.level is not None:
                wanted = max(wanted, min(seen.above(state.level), self._affordable))
        return Decision(min(round(wanted), self.most), replace(state, seen=state.seen + 1))

    def _learned(self, energy: float) -> BudgetState:
        """The state after one more learning step."""
        state, weight = self.state, 1 / (self.state.seen + 1)
        usual = state.usual + (energy - state.usual) * weight
        square = state.usual_square + (energy**2 - state.usual_square) * weight
        return replace(state, usual=usual, usual_square=square, recent=usual)

    @property
    def _risen(self) -> float:
        return math.inf if self.state.level is None else self.state.level * math.exp(RISE)

    @property
    def _affordable(self) -> int:
        """The most that this step may send without touching the reserve of later steps."""
        return math.floor(self.state.owed + self.k + (1 - RESERVE) * (self.left - 1) * self.k)
