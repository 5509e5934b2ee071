"""What ExDyna and MiCRO share: exclusive partitions that go round, and one threshold for all workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradsieve import exchange, ops
from gradsieve._check import one_of
from gradsieve.collectives import AllReduce, Program
from gradsieve.exchange import Exchanged
from gradsieve.sparsifiers._release import released_pick, released_threshold
from gradsieve.sparsifiers._threshold import calibrate, follow
from gradsieve.sparsifiers.base import Sparsifier, Step, Window
from gradsieve.sparsifiers.hard_threshold import authors_rule


@dataclass(eq=False)
class Exclusive(Sparsifier):
    """Worker r owns partition `(t + r) mod P` at step t and selects `|acc_r| >= threshold` inside it only.

    compat: None, or "release" for the authors' released rules and constants.
    """

    compat: str | None = None
    EXCLUSIVE: ClassVar[bool] = True
    SHARED: ClassVar[tuple[str, ...]] = ("threshold",)

    def __post_init__(self) -> None:
        one_of("compat", self.compat, (None, "release"))

    def setup(self, step: Step, sizes: Sequence[int]) -> None:
        self.threshold: float | None = authors_rule(step.k) if self.compat else None
        self._measured: float | None = None

    def span(self, partition: int, step: Step) -> tuple[int, int]:
        """The elements `start <= i < stop` of a partition."""
        raise TypeError(f"{type(self).__name__} must implement span")

    def window(self, step: Step) -> Window:
        threshold = float("inf") if self.threshold is None else self.threshold
        return Window(threshold, *self.span(owned(step), step))

    def select(self, acc: Tensor, hits: Tensor, step: Step) -> Program[Tensor]:
        start, stop = self.span(owned(step), step)
        self._measured = self.threshold
        if self.threshold is None:
            counts = yield AllReduce("histogram", exchange.narrow(ops.log_histogram(acc, start, stop), acc))
            self._measured = calibrate(counts, step.k)
            hits = hits if self._measured is None else ops.select_above(acc, self._measured, start, stop)
        return released_pick(hits, start, stop, step.index) if self.compat else hits

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        return exchange.disjoint(acc, picked, pulse)

    def observe(self, sent: Exchanged, step: Step) -> None:
        rule = released_threshold if self.compat else follow
        self.threshold = None if self._measured is None else rule(self._measured, sum(sent.counts), step.k)

    @property
    def threshold_in_use(self) -> float | None:
        return self._measured


def owned(step: Step) -> int:
    """The partition that this worker looks at in this step."""
    return (step.index + step.rank) % step.world_size


def by_partition(counts: list[int], step: Step) -> list[int]:
    """Counts in partition order, from counts in rank order."""
    return [counts[(partition - step.index) % step.world_size] for partition in range(step.world_size)]
