"""What a density is: it decides how many elements a step sends; the reducer owns its state."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gradsieve.states import State


class Magnitudes(Protocol):
    """How many elements of all workers together lie above each magnitude, as far as histograms show it."""

    def above(self, magnitude: float) -> int:
        """How many are at least as large, the magnitude rounded down to the edge of a bin."""

    def level_of(self, count: int) -> float:
        """The magnitude that so many reach, likewise rounded."""


@dataclass(frozen=True)
class Decision:
    """How many elements all workers together send in this step, and the density's state once it is complete."""

    count: int
    state: State


class Quota(Protocol):
    """How many elements one step sends."""

    @property
    def expected(self) -> int:
        """How many may be asked for, unless magnitudes rise."""

    @property
    def level(self) -> float:
        """A magnitude that histograms must reach down to; infinite where there is none."""

    @property
    def energy(self) -> Tensor | None:
        """What `decide` needs the mean over workers of: this worker's squared gradient norm; or None."""

    def notice(self, grad: Tensor) -> None:
        """A piece of this worker's gradient."""

    def decide(self, seen: Magnitudes, energy: float | None) -> Decision:
        """The number for this step, the same on all workers."""


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
        """Whether only sparsifiers that show it a histogram can use it."""
        return False

    @property
    def from_user(self) -> bool:
        """Whether a function of the user's decides, which may answer differently on different workers."""
        return False

    @property
    @abstractmethod
    def target(self) -> float:
        """The density that thresholds are prepared for."""

    @abstractmethod
    def at(self, step: int) -> float:
        """The density of a step, or its mean over the run."""

    def init(self) -> State:
        """The state before the first step."""
        return State()

    def quota(self, state: State, step: int, n: int) -> Quota:
        """What this step sends."""
        return Exactly(elements(self.at(step), n))

    def update(self, state: State, decision: Decision | None, step: int, n: int, sent: int) -> State:
        """The state after a completed step in which `sent` of n elements were sent."""
        return state


def elements(density: float, n: int) -> int:
    """k: at least one."""
    return min(n, max(1, round(density * n)))
