"""One step of one worker, as values: what is asked for, what was chosen, and what all workers hold afterwards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gradsieve.states import State

Span: TypeAlias = tuple[int, int]  # the positions start <= i < stop


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


@dataclass(frozen=True)
class Step:
    """One step of one worker."""

    index: int  # from 0
    n: int  # elements of the vector
    k: int  # how many of them all workers together should send
    rank: int
    world_size: int
    wire: torch.dtype = torch.float32  # the type in which values travel
    # False: this worker's gradient is not finite, and the step will be skipped on all. A tensor until it is read.
    healthy: bool | Tensor = True
    sizes: Sequence[int] = ()  # of the tensors that the vector is made of; empty: one tensor
    asked: Quota | None = None  # how many to send if that depends on magnitudes; None: exactly k

    @property
    def quota(self) -> Quota:
        return self.asked or Exactly(self.k)


@dataclass(frozen=True)
class Selection:
    """What one worker wants to send, and what it learned while selecting."""

    picked: Tensor  # sorted int64 positions, without repetition
    counts: Sequence[int] | None = None  # of all workers' picks, if all know them already
    spans: Sequence[Span] | None = None  # the part of the vector in which each worker picks, if all know it
    threshold: float | None = None  # the magnitude that decided this step; None if there was none
    plan: Any = None  # for `Sparsifier.exchange` and `Sparsifier.update`
    decision: Decision | None = None  # for the density's own state
    healthy: bool = True  # False: some gradient is not finite, as all workers know; nothing was picked
    beside: Sequence[Tensor] = ()  # on the host: what the caller asked to be read in the same copy


@dataclass(frozen=True)
class Sent:
    """What all workers hold after an exchange, the same on each of them."""

    indices: Tensor | None  # int64 positions in rank order, without repetition; None: every position
    values: Tensor  # the mean over workers at these positions
    counts: list[int]  # how many positions each worker picked
    finite: bool  # False: some worker's gradient, or a sum, was not finite
    beside: Tensor | None = None  # on the host: numbers about `indices` that the sparsifier asked for

    @property
    def union(self) -> int:
        """How many positions the update covers."""
        return self.values.numel()
