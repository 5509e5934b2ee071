"""ExDyna as a sparsifier: which worker searches which part of the vector, and the state after a step."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve._check import at_least
from gradsieve.comm import exchange
from gradsieve.comm.collectives import Program
from gradsieve.comm.step import Selection, Sent, Span, Step
from gradsieve.sparsifiers.base import InVector, Look, S, Shape, Sparsifier, Window
from gradsieve.sparsifiers.exdyna import partition
from gradsieve.sparsifiers.exdyna.threshold import ThresholdState, choose, cut_of
from gradsieve.states import State, shared

BLOCKS = 4096  # so that a layer with a tenth of the model is cut into 400


class Exclusive(Sparsifier[S]):
    """Worker r owns partition `(t + r) mod P` at step t and selects `|acc_r| >= threshold` inside it only.

    Subclasses define the partitions and hold the threshold's state.
    """

    EXCLUSIVE: ClassVar[bool] = True
    SHOWS_MAGNITUDES: ClassVar[bool] = True
    NEEDS_FINITE: ClassVar[bool] = False  # histograms say which worker's gradient is not
    NEEDS_HITS: ClassVar[bool] = False

    @abstractmethod
    def partitions(self, state: S, step: Step) -> list[Span]:
        """The elements of each partition, in rising order."""

    @abstractmethod
    def threshold_state(self, state: S) -> ThresholdState:
        """The threshold's part of the state."""

    def spans(self, state: S, step: Step) -> list[Span]:
        """The part of the vector that each worker searches in this step, in rank order."""
        parts = self.partitions(state, step)
        return [parts[self.owned(step, rank)] for rank in range(step.world_size)]

    def owned(self, step: Step, rank: int) -> int:
        """The partition that a worker searches in this step."""
        return (step.index + rank) % step.world_size

    def window(self, state: S, step: Step) -> Window:
        return Window(cut_of(self.threshold_state(state), step), *self.spans(state, step)[step.rank])

    def select(self, state: S, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        return self.select_in(state, InVector(acc, self.spans(state, step)[step.rank]), hits, step)

    def select_in(
        self, state: S, look: Look, hits: Tensor, step: Step, beside: Sequence[Tensor] = ()
    ) -> Program[Selection]:
        """As `select`, for any `Look`: `share` passes the drift of weights."""
        return choose(self.threshold_state(state), look, hits, step, self.spans(state, step), beside)

    def about(self, step: Step) -> exchange.About | None:
        """What `update` needs to know about the positions that were sent; None for nothing."""
        return None

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return exchange.disjoint(acc, selection, step, self.about(step))


@dataclass(frozen=True)
class ExDynaState(State):
    threshold: ThresholdState
    bounds: tuple[int, ...] = shared(per_worker=True)  # partition i holds the blocks bounds[i] <= j < bounds[i + 1]
    load: Tensor = shared()  # of each block: elements selected per step, a running average
    last: Tensor = shared()  # what was selected in the last step, by groups of blocks


@dataclass(frozen=True)
class ExDyna(Exclusive[ExDynaState]):
    """Blocks are grouped into one partition per worker, and regrouped so that all select about equally many.

    blocks: how finely the vector is cut; more blocks balance better and cost a little more bookkeeping.
    """

    blocks: int = BLOCKS

    def __post_init__(self) -> None:
        at_least("blocks", self.blocks, 1)

    def init(self, shape: Shape) -> ExDynaState:
        count = partition.make_blocks(shape.n, self.blocks, shape.world_size).count
        load, bounds = torch.zeros(count, dtype=torch.int64), partition.even_bounds(count, shape.world_size)
        return ExDynaState(ThresholdState(), bounds, load, partition.grouped(load))

    def partitions(self, state: ExDynaState, step: Step) -> list[Span]:
        return list(pairwise(map(self._blocks(step).start, state.bounds)))

    def threshold_state(self, state: ExDynaState) -> ThresholdState:
        return state.threshold

    def about(self, step: Step) -> exchange.About:
        return self._blocks(step).counts

    def update(self, state: ExDynaState, selection: Selection, sent: Sent, step: Step) -> ExDynaState:
        counts = sent.beside
        if counts is None and sent.indices is not None:
            counts = self._blocks(step).counts(sent.indices)
        if counts is None:  # positions are not known yet
            return replace(state, threshold=selection.plan)
        load, last = partition.learn(state.load, counts, state.last)
        uneven = max(sent.counts) * step.world_size > partition.TOLERANCE * sum(sent.counts)
        bounds = partition.rebalance(load, state.bounds) if uneven else state.bounds
        return ExDynaState(selection.plan, bounds, load, last)

    def _blocks(self, step: Step) -> partition.Blocks:
        return partition.make_blocks(step.n, self.blocks, step.world_size)
