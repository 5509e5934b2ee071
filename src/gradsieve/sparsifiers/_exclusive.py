"""What ExDyna and MiCRO share: exclusive partitions that go round, and one threshold for all workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradsieve import exchange
from gradsieve._check import one_of
from gradsieve.collectives import Program
from gradsieve.exchange import Exchanged, Step
from gradsieve.sparsifiers._release import ReleasedThreshold
from gradsieve.sparsifiers._spending import Steady
from gradsieve.sparsifiers._threshold import MeasuredThreshold
from gradsieve.sparsifiers.base import Sparsifier, Window


@dataclass(eq=False)
class Exclusive(Sparsifier):
    """Worker r owns partition `(t + r) mod P` at step t and selects `|acc_r| >= threshold` inside it only.

    compat: None, or "release" for the authors' released rules and constants.
    """

    compat: str | None = None
    EXCLUSIVE: ClassVar[bool] = True
    SHARED: ClassVar[tuple[str, ...]] = ("threshold_state",)

    def __post_init__(self) -> None:
        one_of("compat", self.compat, (None, "release"))

    def setup(self, step: Step, sizes: Sequence[int]) -> None:
        self._threshold = ReleasedThreshold(step.k) if self.compat else MeasuredThreshold(Steady())

    @property
    def threshold_state(self) -> list[float | None]:
        return self._threshold.state

    @threshold_state.setter
    def threshold_state(self, state: list[float | None]) -> None:
        self._threshold.state = state

    def span(self, partition: int, step: Step) -> tuple[int, int]:
        """The elements `start <= i < stop` of a partition."""
        raise TypeError(f"{type(self).__name__} must implement span")

    def window(self, step: Step) -> Window:
        return Window(self._threshold.level, *self.span(owned(step, step.rank), step))

    def select(self, acc: Tensor, hits: Tensor, step: Step) -> Program[Tensor]:
        return self._threshold.select(acc, hits, self.span(owned(step, step.rank), step), step)

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        spans = [self.span(owned(step, rank), step) for rank in range(step.world_size)]
        return exchange.disjoint(acc, picked, pulse, step, self._threshold.counts, spans)

    def observe(self, sent: Exchanged, step: Step) -> None:
        self._threshold.observe(sum(sent.counts), step.k)

    def rescale(self, factor: float) -> None:
        self._threshold.rescale(factor)

    @property
    def threshold_in_use(self) -> float | None:
        return self._threshold.threshold


def owned(step: Step, rank: int) -> int:
    """The partition that a worker looks at in this step."""
    return (step.index + rank) % step.world_size


def by_partition(counts: list[int], step: Step) -> list[int]:
    """Counts in partition order, from counts in rank order."""
    return [counts[(partition - step.index) % step.world_size] for partition in range(step.world_size)]
