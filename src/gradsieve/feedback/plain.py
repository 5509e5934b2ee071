"""Error feedback: `residual <- residual + grad`, and what was sent is cleared. Base of all other feedbacks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradsieve.comm.step import Sent, Span
from gradsieve.states import State


class Folding:
    """One step's gradient on its way into the residual."""

    def __init__(self, state: State) -> None:
        self.state = state

    def add(self, grad: Tensor, start: int) -> Tensor:
        """What a piece of the gradient, the elements from `start` on, adds to the residual."""
        return grad

    def finish(self, sent: Sent, held_back: Sequence[Span]) -> State:
        """The state after a completed step. Parts that were held back were not added."""
        return self.state


@dataclass(frozen=True)
class Feedback:
    """What a gradient adds to the residual. Subclasses are frozen dataclasses; the reducer keeps their state."""

    def init(self, n: int) -> State:
        """The state for vectors of n elements."""
        return State()

    def begin(self, state: State, sizes: Sequence[int], world_size: int) -> Folding:
        """Begin a step; `sizes` are those of the tensors that the vector is made of."""
        return Folding(state)

    def settle_(self, residual: Tensor, before: Tensor) -> None:
        """Adjust the residual of a piece after the exchange; `before` is the residual before this step."""

    def for_gradients_only(self) -> str:
        """Why it cannot be used with weights, as words that follow a name; empty if it can."""
        return ""

    def label(self) -> dict[str, Any]:
        """Name and options, for comparing workers and checkpoints."""
        return {"feedback": type(self).__name__, **vars(self)}


@dataclass(frozen=True)
class Plain(Feedback):
    """Plain error feedback: the gradient itself, nothing lost, nothing added."""
