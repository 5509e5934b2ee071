"""What a density is, and the simple ones: a number, a function of the step, dense steps before either.

A density decides how many elements a step sends. What it learns is a state that the reducer keeps.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from gradsieve._check import BadType, at_least, fraction, function
from gradsieve.states import State

Schedule: TypeAlias = Callable[[int], float]

_LOOK_AHEAD = 10_000  # steps that are searched for the first density below 1


class Magnitudes(Protocol):
    """Number of elements above each magnitude, over all workers, at the resolution of histograms."""

    def above(self, magnitude: float) -> int:
        """The number of elements at least as large, with the magnitude rounded down to the edge of a bin."""

    def level_of(self, count: int) -> float:
        """The magnitude that `count` elements reach, rounded in the same way."""


@dataclass(frozen=True)
class Decision:
    """How many elements all workers together send in this step, and the density's state once it is complete."""

    count: int
    state: State


class Quota(Protocol):
    """How many elements one step sends."""

    @property
    def expected(self) -> int:
        """The number of elements that `decide` returns, unless there is a burst."""

    @property
    def level(self) -> float:
        """A magnitude that histograms must reach down to; infinite if there is none."""

    @property
    def energy(self) -> Tensor | None:
        """This worker's squared gradient norm, if `decide` needs its mean over workers; or None."""

    def notice(self, grad: Tensor) -> None:
        """Take note of a piece of this worker's gradient."""

    def decide(self, seen: Magnitudes, energy: float | None) -> Decision:
        """How many elements this step sends, the same on all workers."""


@dataclass(frozen=True)
class Exactly:
    """k elements, whatever their magnitudes."""

    k: int

    @property
    def expected(self) -> int:
        return self.k

    @property
    def level(self) -> float:
        return math.inf

    @property
    def energy(self) -> Tensor | None:
        return None

    def notice(self, grad: Tensor) -> None:
        pass

    def decide(self, seen: Magnitudes, energy: float | None) -> Decision:
        return Decision(self.k, State())


class Density(ABC):
    """The density of every step. A frozen dataclass; what it learns is in a state that the reducer keeps."""

    @property
    def needs_magnitudes(self) -> bool:
        """Whether it works only with sparsifiers that pass it histograms."""
        return False

    @property
    def from_user(self) -> bool:
        """Whether a function of the user decides, which may return different values on different workers."""
        return False

    @property
    @abstractmethod
    def target(self) -> float:
        """The density that initial thresholds are computed for."""

    @abstractmethod
    def at(self, step: int) -> float:
        """The density of a step; of a budget, the mean over the run."""

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
    def from_user(self) -> bool:
        return True

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
