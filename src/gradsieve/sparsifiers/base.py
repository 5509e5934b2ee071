"""What a sparsifier is: it decides what to send. Residual, step counter and process group belong to others."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm import exchange
from gradsieve.comm.collectives import Program
from gradsieve.comm.step import Selection, Sent, Span, Step
from gradsieve.feedback.plain import Feedback, Plain
from gradsieve.states import State

S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Shape:
    """The vectors that a sparsifier will see."""

    n: int  # elements
    k: int  # the target of `density`
    sizes: Sequence[int]  # of the tensors that the vector is made of
    world_size: int


class Window(NamedTuple):
    """What the accumulating pass looks for: magnitudes >= threshold at `start <= i < stop`."""

    threshold: float
    start: int
    stop: int


NOTHING = Window(float("inf"), 0, 0)
SMALLEST = 2.0**-149  # smallest float32 magnitude above zero


class Look(Protocol):
    """The part of a vector in which a worker picks. The vector may exist or be computed when it is read."""

    def histogram(self) -> Tensor:
        """`ops.log_histogram` of that part."""

    def above(self, threshold: float, count: int) -> Tensor:
        """The sorted positions in that part of the `count` magnitudes that reach the threshold."""

    def at(self, positions: Tensor) -> Tensor:
        """The elements at positions that `above` has returned."""


@dataclass(frozen=True)
class InVector:
    """A part of a vector in memory."""

    vector: Tensor
    span: Span

    def histogram(self) -> Tensor:
        return ops.log_histogram(self.vector, *self.span)

    def above(self, threshold: float, count: int) -> Tensor:
        return ops.select_above(self.vector, threshold, *self.span, count)

    def at(self, positions: Tensor) -> Tensor:
        return self.vector[positions]


class Sparsifier(ABC, Generic[S]):
    """Base of all sparsifiers: frozen dataclasses whose fields are their options, checked in `__post_init__`.

    A step calls, in this order,

        window -> select -> exchange -> update

    and `update` only if every worker's gradient was finite. Nothing is kept in attributes: `select` returns what it
    learned in a `Selection`; what must outlast a step is in the state that `update` returns. So a skipped step
    leaves no trace. In a step that sends everything, none of these is called.
    """

    EXCLUSIVE: ClassVar[bool] = False  # picks of different workers never overlap
    SHOWS_MAGNITUDES: ClassVar[bool] = False  # passes histograms to `step.quota`, so it works with budgets
    # Whether `select` requires finite values. If not, the host does not wait for the check: `step.healthy` may
    # still be a tensor, and picked positions must be in range whatever the values are.
    NEEDS_FINITE: ClassVar[bool] = True
    NEEDS_HITS: ClassVar[bool] = True  # whether `select` requires its hits, even if the host must wait for a device

    def init(self, shape: Shape) -> S:
        """The state before the first step."""
        return cast(S, State())

    def window(self, state: S, step: Step) -> Window:
        """What the accumulating pass looks for; `select` receives the positions found as `hits`."""
        return NOTHING

    @abstractmethod
    def select(self, state: S, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        """The positions that this worker wants sent, as a program: it may use collectives before it picks.

        `acc` is residual + gradient and must not be changed. Without a collective, return `immediately(...)`.
        """

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        """Combine the workers' selections: one of the functions of `gradsieve.comm.exchange`."""
        return exchange.union(acc, selection, step)

    def update(self, state: S, selection: Selection, sent: Sent, step: Step) -> S:
        """The state after a completed step."""
        return state

    def feedback(self) -> Feedback:
        """What gradients add to the residual, unless the user chooses another one."""
        return Plain()

    def for_gradients_only(self) -> str:
        """Why it cannot be used with weights, as words that follow its name; empty if it can."""
        return self.feedback().for_gradients_only()

    def options(self) -> dict[str, Any]:
        """The constructor's arguments, by name."""
        own = cast(Any, self)
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(own)}


def hits_in(x: Tensor, window: Window, *, needed: bool) -> Tensor:
    """The hits of a vector in a window; none if they are not needed and the host would have to wait for them."""
    return ops.select_above(x, *(window if needed or x.is_cpu else NOTHING))


def select_from(acc: Tensor, threshold: float) -> Tensor:
    """The sorted positions of all magnitudes that reach a threshold, zeros excluded."""
    return ops.select_above(acc, max(threshold, SMALLEST))


def vector_norm(x: Tensor) -> float:
    """The Euclidean norm, in float64: it may exceed float32's range."""
    return float(ops.read(torch.linalg.vector_norm(x, dtype=torch.float64))[0])


def largest(acc: Tensor, k: int) -> Tensor:
    """The sorted positions of the k largest magnitudes."""
    return torch.topk(acc.abs(), min(k, len(acc)), sorted=False).indices.sort().values
