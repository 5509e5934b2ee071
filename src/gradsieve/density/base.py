"""What a density is, and the simple ones: a number, a function of the step, dense steps before either.

A density decides how many elements a step sends. What it learns is a state that the reducer keeps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from gradsieve._check import BadType, at_least, fraction, function
from gradsieve.comm.step import Decision, Exactly, Quota
from gradsieve.states import State

Schedule: TypeAlias = Callable[[int], float]

_LOOK_AHEAD = 10_000  # steps that are searched for the first density below 1


class Density(ABC):
    """The density of every step. A frozen dataclass; what it learns is in a state that the reducer keeps."""

    @property
    def needs_magnitudes(self) -> bool:
        """Whether it works only with sparsifiers that pass it histograms."""
        return False

    @property
    def from_user(self) -> bool:
        """Whether code of the user decides, which may differ between workers: then they compare their counts before
        every exchange, in one collective of 16 bytes. Without, they compare `label` before the first."""
        return True

    @property
    @abstractmethod
    def target(self) -> float:
        """The density that initial thresholds are computed for."""

    @abstractmethod
    def at(self, step: int) -> float:
        """The density of a step; of a budget, the mean over the run."""

    def label(self, step: int) -> Any:
        """What must be the same on all workers, from this step on."""
        return str(self) if self.needs_magnitudes else self.at(step)

    def init(self) -> State:
        """The state before the first step."""
        return State()

    def quota(self, state: State, step: int, n: int) -> Quota:
        """How many elements this step sends."""
        return Exactly(elements(self.at(step), n))

    def update(self, state: State, decision: Decision | None, step: int, n: int, sent: int) -> State:
        """The state after a completed step in which `sent` of n elements were sent."""
        return state


@dataclass(frozen=True)
class Constant(Density):
    """One density for all steps.

    >>> Constant(0.001).at(5)
    0.001
    """

    density: float

    def __post_init__(self) -> None:
        fraction("density", self.density)

    @property
    def from_user(self) -> bool:
        return False

    @property
    def target(self) -> float:
        return self.density

    def at(self, step: int) -> float:
        return self.density


@dataclass(frozen=True)
class Scheduled(Density):
    """A function of the step. Its target is the first density below 1, from the step `first` on."""

    schedule: Schedule
    first: int = 0

    def __post_init__(self) -> None:
        fraction("density", function("density", self.schedule, self.first))

    @property
    def target(self) -> float:
        ahead = map(self.at, range(self.first, self.first + _LOOK_AHEAD))
        return next((density for density in ahead if density < 1), 1.0)

    def at(self, step: int) -> float:
        return fraction("density", self.schedule(step))


@dataclass(frozen=True)
class AfterDense(Density):
    """The full gradient in the first `steps` steps, then another density.

    >>> density = as_density(0.001, dense_steps=2)
    >>> [density.at(step) for step in (0, 1, 2)], density.target
    ([1.0, 1.0, 0.001], 0.001)
    """

    later: Density
    steps: int

    @property
    def needs_magnitudes(self) -> bool:
        return self.later.needs_magnitudes

    @property
    def from_user(self) -> bool:
        return self.later.from_user

    @property
    def target(self) -> float:
        return self.later.target

    def at(self, step: int) -> float:
        return 1.0 if step < self.steps else self.later.at(step)

    def label(self, step: int) -> Any:
        later = self.later.label(max(step, self.steps))
        return f"{later} after {self.steps} dense steps" if step < self.steps else later

    def init(self) -> State:
        return self.later.init()

    def quota(self, state: State, step: int, n: int) -> Quota:
        return super().quota(state, step, n) if step < self.steps else self.later.quota(state, step, n)

    def update(self, state: State, decision: Decision | None, step: int, n: int, sent: int) -> State:
        return self.later.update(state, decision, step, n, sent)


def as_density(density: "float | Schedule | Density", dense_steps: int = 0) -> Density:
    """A number, a function of the step, or a density, after `dense_steps` steps that send the full gradient."""
    at_least("dense_steps", dense_steps, 0)
    if isinstance(density, str):
        raise BadType(f"density must be a number, a function of the step or a Budget, got {density!r}")
    if not isinstance(density, Density):
        density = Scheduled(density, dense_steps) if callable(density) else Constant(density)
    return AfterDense(density, dense_steps) if dense_steps else density


def elements(density: float, n: int) -> int:
    """k, the number of elements that a density stands for: at least one."""
    return min(n, max(1, round(density * n)))
