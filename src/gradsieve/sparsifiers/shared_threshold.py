"""Shared threshold: every worker compares its whole vector with one common threshold; the union has k positions.

A position is worth sending if it is large on any worker. In ExDyna each position is judged by one worker per
step, so what is large on the others waits for their turn. The accumulating pass reads the whole vector anyway, so
searching all of it costs little. Several workers pick the same position: how many picks make k different positions
is known from earlier steps, and changes slowly.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve.comm import exchange
from gradsieve.comm.collectives import Program
from gradsieve.comm.exchange import gather_picks
from gradsieve.comm.step import Decision, Magnitudes, Quota, Selection, Sent, Step
from gradsieve.sparsifiers.base import InVector, Shape, Sparsifier, Window, largest
from gradsieve.sparsifiers.exdyna.threshold import ThresholdState, choose, cut_of
from gradsieve.states import State, shared

FEWEST = 0.95  # of k: with fewer different positions, workers propose more of them in a second round
NOISE = 0.5  # safety margin of the picks, in standard deviations of a count of k
FORGET = 0.9  # decay per step of the largest recent change of the overlap
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 soon cover [0, 1) evenly


@dataclass(frozen=True)
class SharedThresholdState(State):
    threshold: ThresholdState
    overlap: float = shared(1.0, per_worker=True)  # picks per different position in the last step
    swing: float = shared(0.0, per_worker=True)  # the largest recent change of its logarithm


@dataclass(frozen=True)
class SharedThreshold(Sparsifier[SharedThresholdState]):
    """Worker r picks `|acc_r| >= threshold`; all workers' values are sent at every position that any worker picked.

    Picks are gathered, so all workers know how many votes each position has. If there are more than k different
    positions, those with the fewest votes stay in the residuals; ties are broken differently in every step. If
    there are fewer than 95 % of k, because workers agree much more than in the step before, each proposes its
    largest remaining elements, as many as are missing: two further collectives, but no step sends too little.
    """

    SHOWS_MAGNITUDES: ClassVar[bool] = True
    NEEDS_FINITE: ClassVar[bool] = False
    NEEDS_HITS: ClassVar[bool] = False

    def init(self, shape: Shape) -> SharedThresholdState:
        return SharedThresholdState(ThresholdState())

    def window(self, state: SharedThresholdState, step: Step) -> Window:
        return Window(cut_of(state.threshold, _asked(state, step)), 0, step.n)

    def select(self, state: SharedThresholdState, acc: Tensor, hits: Tensor, step: Step) -> Program[Selection]:
        found = yield from choose(state.threshold, InVector(acc, (0, step.n)), hits, _asked(state, step))
        picks, counts = yield from gather_picks(found, step)
        if not found.healthy:
            return found
        assert isinstance(found.decision, PicksDecision)
        wanted = found.decision.positions.count
        indices, votes = picks.unique(return_counts=True)
        after = _learned(replace(state, threshold=found.plan), sum(counts), len(indices))
        if len(indices) < FEWEST * wanted:
            beside = Selection(largest_beside(acc, indices, wanted))
            further, more_counts = yield from gather_picks(beside, step)
            counts = [count + more for count, more in zip(counts, more_counts, strict=True)]
            more, votes = further.unique(return_counts=True)
            more = most_voted(more, votes, wanted - len(indices), step)
            indices = torch.cat([indices, more]).sort().values
        else:
            indices = most_voted(indices, votes, wanted, step)
        return Selection(indices, counts, None, found.threshold, after, found.decision.positions)

    def exchange(self, acc: Tensor, selection: Selection, step: Step) -> Program[Sent]:
        return exchange.agreed(acc, selection, step)

    def update(
        self, state: SharedThresholdState, selection: Selection, sent: Sent, step: Step
    ) -> SharedThresholdState:
        after: SharedThresholdState = selection.plan
        return after


@dataclass(frozen=True)
class PicksDecision(Decision):
    """The number of picks, and the decision on the number of positions that they should make."""

    positions: Decision


@dataclass(frozen=True)
class Overlapping:
    """A quota in picks: as many as make the positions that another quota asks for, and a few more."""

    positions: Quota
    picks_per_position: float
    workers: int

    @property
    def expected(self) -> int:
        return self._picks(self.positions.expected)

    @property
    def level(self) -> float:
        return self.positions.level

    @property
    def energy(self) -> Tensor | None:
        return self.positions.energy

    def notice(self, grad: Tensor) -> None:
        self.positions.notice(grad)

    def decide(self, seen: Magnitudes, energy: float | None) -> Decision:
        decided = self.positions.decide(_Positions(seen, self.picks_per_position), energy)
        return PicksDecision(self._picks(decided.count), decided.state, decided)

    def _picks(self, positions: int) -> int:
        return min(math.ceil(positions * self.picks_per_position), positions * self.workers)


@dataclass(frozen=True)
class _Positions:
    """Counts of positions, estimated from counts of picks."""

    picks: Magnitudes
    picks_per_position: float

    def above(self, magnitude: float) -> int:
        return round(self.picks.above(magnitude) / self.picks_per_position)

    def level_of(self, count: int) -> float:
        return self.picks.level_of(math.ceil(count * self.picks_per_position))


def _asked(state: SharedThresholdState, step: Step) -> Step:
    """The step with its quota in picks."""
    factor = state.overlap * (math.exp(state.swing) + NOISE / math.sqrt(step.k))
    return replace(step, asked=Overlapping(step.quota, factor, step.world_size))


def _learned(state: SharedThresholdState, picks: int, different: int) -> SharedThresholdState:
    """The state after a step with this number of picks and of different positions."""
    if not different:
        return state
    overlap = picks / different
    return replace(state, overlap=overlap, swing=max(abs(math.log(overlap / state.overlap)), FORGET * state.swing))


def most_voted(indices: Tensor, votes: Tensor, count: int, step: Step) -> Tensor:
    """The `count` positions with most votes, in rising order. Ties: those after a place that moves every step."""
    if len(indices) <= count:
        return indices
    place = math.floor(step.n * (GOLDEN * step.index % 1))
    order = votes * step.n - (indices - place) % step.n
    return indices[order.topk(count, sorted=False).indices.sort().values]


def largest_beside(acc: Tensor, indices: Tensor, k: int) -> Tensor:
    """The positions of the largest magnitudes outside `indices`, as many as are missing to k; no zeros."""
    others = acc.index_fill(0, indices, 0)
    found = largest(others, k - len(indices))
    return found[others[found] != 0]
