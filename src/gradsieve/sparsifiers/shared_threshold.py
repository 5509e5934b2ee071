"""Shared threshold: every worker judges every element by one threshold for all, and together they pick k positions.

A position is worth sending if it is large for any worker. Where each is judged by one worker only, as in ExDyna,
what is large for the others waits until one of them has its turn. The accumulating pass reads the whole vector
anyway, so looking at all of it costs little. Workers pick many positions together: how many picks make k
different positions is known from the steps before, and changes slowly.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradsieve.comm import exchange
from gradsieve.comm.collectives import Program
from gradsieve.comm.exchange import gather_picks
from gradsieve.comm.step import Selection, Sent, Step
from gradsieve.density.base import Decision, Magnitudes, Quota
from gradsieve.sparsifiers.base import InVector, Shape, Sparsifier, Window, largest
from gradsieve.sparsifiers.exdyna.threshold import ThresholdState, choose, cut_of
from gradsieve.states import State, shared

FEWEST = 0.95  # of k: with fewer different positions, workers put forward more of them in a second round
NOISE = 0.5  # standard deviations of a count of k, by which more picks are asked for than seem necessary
FORGET = 0.9  # what is left of a large change of the overlap after a step
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 come near to every number soon


@dataclass(frozen=True)
class SharedThresholdState(State):
    threshold: ThresholdState
    overlap: float = shared(1.0, per_worker=True)  # picks for each different position in the last step
    swing: float = shared(0.0, per_worker=True)  # the largest recent change of its logarithm


@dataclass(frozen=True)
class SharedThreshold(Sparsifier[SharedThresholdState]):
    """Worker r picks `|acc_r| >= threshold`; everybody's values are sent wherever anybody picked.

    Picks are sent to all, so that all know who voted for what. If they are more than k different positions, those
    with the fewest votes stay in the residuals, other ones of equals in every step. If they are fewer than 95 % of
    k, because workers agree much more than in the step before, each puts forward its largest of the others, as many
    as are missing: two further collectives, but never a step with too little.
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
        parts = yield from gather_picks(found, step)
        if not found.healthy:
            return found
        assert isinstance(found.decision, PicksDecision)
        counts, wanted = [len(part) for part in parts], found.decision.positions.count
        indices, votes = torch.cat(parts).unique(return_counts=True)
        after = _learned(replace(state, threshold=found.plan), sum(counts), len(indices))
        if len(indices) < FEWEST * wanted:
            further = yield from gather_picks(Selection(largest_beside(acc, indices, wanted)), step)
            counts = [count + len(part) for count, part in zip(counts, further, strict=True)]
            more, votes = torch.cat(further).unique(return_counts=True)
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
    """How many picks, and the decision how many positions that these are meant to make."""

    positions: Decision


@dataclass(frozen=True)
class Overlapping:
    """A quota in picks of all workers: as many as make the positions that another one asks for, and a few more."""

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
    """Counts of positions, from counts of picks."""

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
    """What follows from so many picks of so many different positions."""
    if not different:
        return state
    overlap = picks / different
    return replace(state, overlap=overlap, swing=max(abs(math.log(overlap / state.overlap)), FORGET * state.swing))


def most_voted(indices: Tensor, votes: Tensor, count: int, step: Step) -> Tensor:
    """The `count` positions with most votes, rising; of equals, those behind a place that moves with the step."""
    if len(indices) <= count:
        return indices
    place = math.floor(step.n * (GOLDEN * step.index % 1))
    order = votes * step.n - (indices - place) % step.n
    return indices[order.topk(count, sorted=False).indices.sort().values]


def largest_beside(acc: Tensor, indices: Tensor, k: int) -> Tensor:
    """The largest magnitudes beside those at `indices`, as many as are missing from k, but no zeros."""
    others = acc.index_fill(0, indices, 0)
    found = largest(others, k - len(indices))
    return found[others[found] != 0]
