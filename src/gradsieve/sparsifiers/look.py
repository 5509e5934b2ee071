"""The part of a vector in which a worker looks for what to send, whether the vector is there or only computed."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gradsieve import ops
from gradsieve.comm.step import Span


class Look(Protocol):
    """What a worker can see of a vector: the part in which it picks."""

    def histogram(self) -> Tensor:
        """`ops.log_histogram` of that part."""

    def above(self, threshold: float, count: int) -> Tensor:
        """The sorted positions in that part of magnitudes from the threshold on; there are `count` of them."""

    def at(self, positions: Tensor) -> Tensor:
        """The elements at positions that `above` has returned."""


@dataclass(frozen=True)
class InVector:
    """A part of a vector that is there."""

    vector: Tensor
    span: Span

    def histogram(self) -> Tensor:
        return ops.log_histogram(self.vector, *self.span)

    def above(self, threshold: float, count: int) -> Tensor:
        return ops.select_above(self.vector, threshold, *self.span, count)

    def at(self, positions: Tensor) -> Tensor:
        return self.vector[positions]
