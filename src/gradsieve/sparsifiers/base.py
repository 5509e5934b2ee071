"""What a sparsifier is: it decides what to send; it never owns the residual, the step counter or a socket."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradsieve import exchange, ops
from gradsieve._check import BadInput
from gradsieve.collectives import Program
from gradsieve.exchange import Exchanged, Span, Step


class Window(NamedTuple):
    """What to look for while the gradient is accumulated: magnitudes >= threshold at `start <= i < stop`."""

    threshold: float
    start: int
    stop: int


NOTHING = Window(float("inf"), 0, 0)
SMALLEST = 2.0**-149  # of all float32 magnitudes that are not zero


@dataclass(eq=False)
class Sparsifier:
    """Base of all sparsifiers.

    A subclass is a dataclass whose fields are its options, checked in `__post_init__`. It implements `pick` (or
    `select`, if it must talk before it can pick) and, where the default does not fit, `exchange`, `window` and
    `observe`. A step calls, in this order,

        window -> fold -> select -> exchange -> settle_ -> commit -> observe

    and the last three only if every worker's gradient was finite. State belongs in attributes that `setup` creates
    and that `SHARED` (the same on all workers) or `LOCAL` names; only `commit` and `observe` may change them, so
    that a step which is called off leaves no trace. Where a step sends everything, whoever the sparsifier is, only
    `fold` and `commit` are called.
    """

    SHARED: ClassVar[tuple[str, ...]] = ()
    LOCAL: ClassVar[tuple[str, ...]] = ()
    CHANGEABLE: ClassVar[tuple[str, ...]] = ()  # options that may differ between a saved state and who loads it
    EXCLUSIVE: ClassVar[bool] = False  # picks of different workers never overlap

    def setup(self, step: Step, sizes: Sequence[int]) -> None:
        """Create the state for vectors of `step.n` elements, the concatenation of tensors of these sizes."""

    def window(self, step: Step) -> Window:
        """What to find in the accumulating pass; `select` receives it as `hits`."""
        return NOTHING

    def fold(self, grad: Tensor, start: int) -> Tensor:
        """What a piece of the gradient, the elements from `start` on, adds to the residual: by default itself."""
        return grad

    def pick(self, acc: Tensor, hits: Tensor, step: Step) -> Tensor:
        """The positions that this worker wants sent: sorted, int64, without repetition. `acc` is not changed."""
        raise TypeError(f"{type(self).__name__} must implement pick")

    def select(self, acc: Tensor, hits: Tensor, step: Step) -> Program[Tensor]:
        """As `pick`, as a program: for sparsifiers that need a collective to know what to pick."""
        yield from ()
        return self.pick(acc, hits, step)

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        """How picks are combined: one of the functions of `gradsieve.exchange`."""
        return exchange.union(acc, picked, pulse, step)

    def settle_(self, residual: Tensor, before: Tensor) -> None:
        """Change the residual that is kept, knowing the one `before` this step."""

    def commit(self, sent: Exchanged, waiting: Sequence[Span]) -> None:
        """The step stands: keep what `fold` made of the gradient. Parts that are `waiting` were not folded."""

    def observe(self, sent: Exchanged, step: Step) -> None:
        """Learn from what was sent."""

    def rescale(self, factor: float) -> None:
        """Gradients and residual were multiplied by `factor`: so must be thresholds in the state."""

    def for_gradients_only(self) -> str:
        """Why it cannot choose among weights, in words that follow its name; empty if it can."""
        return ""

    @property
    def threshold_in_use(self) -> float | None:
        """The threshold that decided the step under way: read after `exchange` and before `observe`."""
        return None

    def options(self) -> dict[str, Any]:
        """The constructor's arguments, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def lasting_options(self) -> dict[str, Any]:
        """Those that a state belongs to."""
        return {name: value for name, value in self.options().items() if name not in self.CHANGEABLE}

    def state_dict(self) -> dict[str, Any]:
        """All state, as plain numbers, lists and tensors."""
        return {name: _plain_copy(getattr(self, name)) for name in self.SHARED + self.LOCAL}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of `state_dict()`; `setup` must have been called for the same vectors."""
        known = set(self.SHARED + self.LOCAL)
        if set(state_dict) != known:
            raise BadInput(
                f"state must have the keys {sorted(known)} of {type(self).__name__}, got {sorted(state_dict)}"
            )
        for name, value in state_dict.items():
            if _form(value) != _form(getattr(self, name)):
                raise BadInput(f"{name} must be like {_form(getattr(self, name))}, got {_form(value)}")
        for name, value in state_dict.items():
            setattr(self, name, _plain_copy(value))

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state from another world size, with what depends on that size replaced by what is here."""
        own = self.state_dict()
        return {
            name: state_dict[name] if _form(state_dict.get(name)) == _form(own[name]) else own[name] for name in own
        }

    def shared_state(self) -> dict[str, Any]:
        """The part of the state that is the same on all workers."""
        return {name: _plain_copy(getattr(self, name)) for name in self.SHARED}

    def fingerprint(self) -> str:
        """The shared state in a few characters, for comparing workers."""
        text = json.dumps(self.shared_state(), default=lambda tensor: tensor.tolist(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain_copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def _form(value: Any) -> str:
    """What a piece of state looks like, without its content."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"list of {len(value)}" if isinstance(value, list) else type(value).__name__


def select_from(acc: Tensor, threshold: float) -> Tensor:
    """The sorted positions of the magnitudes from a threshold on, but never of zeros."""
    return ops.select_above(acc, max(threshold, SMALLEST))


def vector_norm(x: Tensor) -> float:
    """The Euclidean norm, which float32 could not always hold."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def largest(acc: Tensor, k: int) -> Tensor:
    """The sorted positions of the k largest magnitudes."""
    return torch.topk(acc.abs(), min(k, len(acc)), sorted=False).indices.sort().values
