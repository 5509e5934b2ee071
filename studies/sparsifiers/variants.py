"""ExDyna without one of its parts, to show what that part contributes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradsieve.comm.step import Exactly
from gradsieve.extend import Decision, Magnitudes, Program, Selection, State, Step, Window, positive
from gradsieve.sparsifiers.base import Look
from gradsieve.sparsifiers.exdyna.sparsifier import ExDyna, ExDynaState


@dataclass(frozen=True)
class StillExDyna(ExDyna):
    """Partitions do not rotate: worker r always owns partition r."""

    def owned(self, step: Step, rank: int) -> int:
        return rank


@dataclass(frozen=True)
class Above(Exactly):
    """Density of all elements above a constant, which is rounded down to the edge of a bin."""

    threshold: float

    @property
    def level(self) -> float:
        return self.threshold

    def decide(self, seen: Magnitudes, energy: float | None) -> Decision:
        return Decision(seen.above(self.threshold), State())


@dataclass(frozen=True)
class FixedExDyna(ExDyna):
    """One threshold for the whole run: nothing keeps the density.

    threshold: the smallest magnitude that is sent.
    """

    threshold: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("threshold", self.threshold)

    def window(self, state: ExDynaState, step: Step) -> Window:
        return super().window(state, self._asked(step))

    def select_in(
        self, state: ExDynaState, look: Look, hits: Tensor, step: Step, beside: Sequence[Tensor] = ()
    ) -> Program[Selection]:
        return super().select_in(state, look, hits, self._asked(step), beside)

    def _asked(self, step: Step) -> Step:
        return replace(step, asked=Above(step.k, self.threshold))
