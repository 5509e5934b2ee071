"""One step of one worker, as values: what is asked for, what was chosen, and what all workers hold afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradsieve.density.base import Decision, Exactly, Quota

Span: TypeAlias = tuple[int, int]  # the positions start <= i < stop


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
    asked: Quota | None = None  # how many to send where that depends on magnitudes; None: exactly k

    @property
    def quota(self) -> Quota:
        return self.asked or Exactly(self.k)


@dataclass(frozen=True)
class Selection:
    """What one worker wants to send, and what it learned while choosing it."""

    picked: Tensor  # sorted int64 positions, without repetition
    counts: Sequence[int] | None = None  # of all workers' picks, where all know them already
    spans: Sequence[Span] | None = None  # in which part of the vector each worker picks, where all know it
    threshold: float | None = None  # the magnitude that decided this step; None where none did
    plan: Any = None  # for `Sparsifier.exchange` and `Sparsifier.update`
    decision: Decision | None = None  # for the density's own state
    healthy: bool = True  # False: all workers know already that some gradient is not finite; nothing was picked
    beside: Sequence[Tensor] = ()  # on the host: what the caller wanted to be read at the same time


@dataclass(frozen=True)
class Sent:
    """What all workers hold after an exchange, the same on each of them."""

    indices: Tensor | None  # int64 positions in rank order, without repetition; None: every position
    values: Tensor  # the mean over workers at these positions
    counts: list[int]  # how many positions each worker picked
    finite: bool  # False: some worker's gradient, or a sum, was not finite
    beside: Tensor | None = None  # on the host: what the sparsifier wanted to know of `indices`

    @property
    def union(self) -> int:
        """How many positions the update covers."""
        return self.values.numel()
