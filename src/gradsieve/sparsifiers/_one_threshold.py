"""One threshold for all workers, found while the gradient is accumulated: what ExDyna, MiCRO and others share."""

from typing import ClassVar

from torch import Tensor

from gradsieve.collectives import Program
from gradsieve.exchange import Exchanged, Span, Step
from gradsieve.sparsifiers._release import ReleasedThreshold
from gradsieve.sparsifiers._spending import Spending
from gradsieve.sparsifiers._threshold import MeasuredThreshold
from gradsieve.sparsifiers.base import Sparsifier, Window


class OneThreshold(Sparsifier):
    """Each worker picks `|acc_r| >= threshold` in the part of the vector that it judges.

    A subclass creates `_spending` and `_threshold` and implements `judged` and `exchange`.
    """

    SHARED: ClassVar[tuple[str, ...]] = ("threshold_state", "spending_state")
    _spending: Spending
    _threshold: MeasuredThreshold | ReleasedThreshold

    def judged(self, step: Step) -> Span:
        """The part of the vector that this worker looks at in this step."""
        raise TypeError(f"{type(self).__name__} must implement judged")

    @property
    def spending_state(self) -> list[float | None]:
        return self._spending.state

    @spending_state.setter
    def spending_state(self, state: list[float | None]) -> None:
        self._spending.state = state

    @property
    def threshold_state(self) -> list[float | None]:
        return self._threshold.state

    @threshold_state.setter
    def threshold_state(self, state: list[float | None]) -> None:
        self._threshold.state = state

    def window(self, step: Step) -> Window:
        self._spending.begin(step)
        return Window(self._threshold.level, *self.judged(step))

    def fold(self, grad: Tensor, start: int) -> Tensor:
        self._spending.notice(grad)
        return grad

    def select(self, acc: Tensor, hits: Tensor, step: Step) -> Program[Tensor]:
        return self._threshold.select(acc, hits, self.judged(step), step)

    def observe(self, sent: Exchanged, step: Step) -> None:
        self._threshold.observe(sum(sent.counts), step)

    def rescale(self, factor: float) -> None:
        self._threshold.rescale(factor)

    @property
    def threshold_in_use(self) -> float | None:
        return self._threshold.decided
