"""A method: sparsifier, density and feedback, and the states that they keep."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradsieve._check import BadInput, BadType
from gradsieve.comm.step import Selection, Sent, Span, Step
from gradsieve.density import Density
from gradsieve.density.base import elements
from gradsieve.feedback import Feedback
from gradsieve.feedback.plain import Folding
from gradsieve.sparsifiers import Shape, Sparsifier, name_of, options_by_name
from gradsieve.sparsifiers.dense import Dense
from gradsieve.states import State, States

_EVERYTHING = Dense()


@dataclass(frozen=True)
class Method:
    """Sparsifier, density and feedback, each with a state of its own, which `States` holds."""

    sparsifier: Sparsifier[Any]
    density: Density
    feedback: Feedback

    def __post_init__(self) -> None:
        if not isinstance(self.sparsifier, Sparsifier):
            raise BadType(f"sparsifier must be a Sparsifier (see make_sparsifier), got {self.sparsifier!r}")
        if not isinstance(self.feedback, Feedback):
            raise BadType(f"feedback must be a Feedback such as Momentum(), got {self.feedback!r}")
        if self.density.needs_magnitudes and not self.sparsifier.SHOWS_MAGNITUDES:
            raise BadInput(
                "a Budget needs a sparsifier with one threshold for all (exdyna, micro, shared_threshold), "
                f"got {name_of(self.sparsifier)}"
            )

    def init(self, n: int, sizes: Sequence[int], world_size: int) -> States:
        """The states before the first step."""
        shape = Shape(n, elements(self.density.target, n), sizes, world_size)
        return States(self.sparsifier.init(shape), self.density.init(), self.feedback.init(n))

    def acting(self, step: Step) -> Sparsifier[Any]:
        """The sparsifier of this step: `dense` if everything is sent, as there is nothing to select."""
        return self.sparsifier if step.k < step.n else _EVERYTHING

    def identity(self) -> dict[str, Any]:
        """What must be the same in a saved state and the reducer that loads it."""
        options = {**self.sparsifier.options(), **self.feedback.label()}
        return {"sparsifier": name_of(self.sparsifier), "options": options}

    def state_of(self, acting: Sparsifier[Any], states: States) -> State:
        """The state of the acting sparsifier."""
        return states.sparsifier if acting is not _EVERYTHING else State()

    def update(
        self,
        states: States,
        selection: Selection,
        sent: Sent,
        step: Step,
        folding: Folding,
        held_back: Sequence[Span],
    ) -> States:
        """The states after a completed step."""
        acting, known = self.acting(step), states.sparsifier
        return States(
            known if acting is _EVERYTHING else acting.update(known, selection, sent, step),
            self.density.update(states.density, selection.decision, step.index, step.n, sent.union),
            folding.finish(sent, held_back),
        )

    def settings(self, step: int) -> dict[str, Any]:
        """What must be the same on all workers."""
        return {
            **options_by_name(self.sparsifier),
            **self.feedback.label(),
            "density": self.density.label(step),
        }
