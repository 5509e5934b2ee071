"""What ExDyna and MiCRO share: exclusive partitions that go round, and one threshold for all workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from gradsieve import exchange
from gradsieve._check import BadInput, at_least, number, one_of, positive
from gradsieve.collectives import Program
from gradsieve.exchange import Exchanged, Span, Step
from gradsieve.sparsifiers._one_threshold import OneThreshold
from gradsieve.sparsifiers._release import ReleasedThreshold
from gradsieve.sparsifiers._spending import KNOWN, Budget, Fixed, Spending, Steady
from gradsieve.sparsifiers._threshold import Look, MeasuredThreshold


@dataclass(eq=False)
class Exclusive(OneThreshold):
    """Worker r owns partition `(t + r) mod P` at step t and selects `|acc_r| >= threshold` inside it only.

    compat: None, or "release" for the authors' released rules and constants.
    spend: "steady" sends what the density asks for in every step; "budget" sends as much in the mean over
        `total_steps`, and more while gradients are large; "fixed" sends what lies above `threshold`.
    total_steps: how long the run will be, for spend="budget"; see `set_total_steps`.
    ceiling: no step sends more than so many times the mean, for spend="budget".
    threshold: the magnitude from which on elements are sent, for spend="fixed"; nothing keeps the density then.
    rotate: whether partitions go round; without, worker r always owns partition r, to see what that is good for.
    """

    compat: str | None = None
    spend: str = "steady"
    total_steps: int | None = None
    ceiling: float = 20.0
    threshold: float | None = None
    rotate: bool = True
    EXCLUSIVE: ClassVar[bool] = True
    CHANGEABLE: ClassVar[tuple[str, ...]] = ("total_steps",)

    def __post_init__(self) -> None:
        one_of("compat", self.compat, (None, "release"))
        one_of("spend", self.spend, KNOWN)
        if self.compat and self.spend != "steady":
            raise BadInput(f'spend must be "steady" with compat="release", got {self.spend!r}')
        for name, kind in (("total_steps", "budget"), ("threshold", "fixed")):
            if (getattr(self, name) is None) != (self.spend != kind):
                raise BadInput(f'{name} must be given with spend="{kind}" and only then, got {getattr(self, name)}')
        if self.total_steps is not None:
            at_least("total_steps", self.total_steps, 1)
        if self.threshold is not None:
            positive("threshold", self.threshold)
        one_of("rotate", self.rotate, (True, False))
        if self.compat and not self.rotate:
            raise BadInput(f'rotate must be True with compat="release", got {self.rotate}')
        if number("ceiling", self.ceiling) < 1:
            raise BadInput(f"ceiling must be at least 1, got {self.ceiling}")
        self._spending = self._make_spending()

    def _make_spending(self) -> Spending:
        if self.total_steps is not None:
            return Budget(self.total_steps, self.ceiling)
        return Steady() if self.threshold is None else Fixed(self.threshold)

    def setup(self, step: Step, sizes: Sequence[int]) -> None:
        self._threshold = ReleasedThreshold(step.k) if self.compat else MeasuredThreshold(self._spending)

    def set_total_steps(self, total_steps: int) -> None:
        """The run will be longer or shorter than said before. All workers must call it before the same step."""
        if self.spend != "budget":
            raise BadInput(f'set_total_steps needs spend="budget", got {self.spend!r}')
        self.total_steps = at_least("total_steps", total_steps, 1)
        self._spending.state[2] = total_steps

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.spend == "budget":
            self.total_steps = int(self._spending.state[2] or 0)

    def span(self, partition: int, step: Step) -> tuple[int, int]:
        """The elements `start <= i < stop` of a partition."""
        raise TypeError(f"{type(self).__name__} must implement span")

    def judged(self, step: Step) -> Span:
        return self.span(self.owned(step, step.rank), step)

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        return exchange.disjoint(acc, picked, pulse, step, self._threshold.counts, self.spans(step))

    def spans(self, step: Step) -> list[Span]:
        """What each worker looks at in this step, in rank order."""
        return [self.span(self.owned(step, rank), step) for rank in range(step.world_size)]

    def positions(self, look: Look, hits: Tensor, step: Step) -> Program[list[Tensor]]:
        """Everybody's picks, in rank order, each found by looking at the own span only."""
        assert isinstance(self._threshold, MeasuredThreshold)
        picked = yield from self._threshold.select_in(look, hits, step)
        return (yield from exchange.gather_picks(picked, step, self._threshold.counts, self.spans(step)))

    def owned(self, step: Step, rank: int) -> int:
        """The partition that a worker looks at in this step."""
        return (step.index + rank) % step.world_size if self.rotate else rank

    def for_gradients_only(self) -> str:
        return "spends its budget by the size of gradients" if self.spend == "budget" else ""


def by_partition(counts: list[int], step: Step) -> list[int]:
    """Counts in partition order, from counts in rank order."""
    return [counts[(partition - step.index) % step.world_size] for partition in range(step.world_size)]
