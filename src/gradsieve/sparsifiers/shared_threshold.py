"""Shared threshold: every worker judges every element by one threshold for all, and together they pick k positions.

A position is worth sending if it is large for any worker. Where each is judged by one worker only, as in ExDyna,
what is large for the others waits until one of them has its turn. The accumulating pass reads the whole vector
anyway, so looking at all of it costs little. Workers pick many positions together: how many picks make k
different positions is known from the steps before, and changes slowly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsieve.collectives import Program
from gradsieve.exchange import Exchanged, Span, Step, gather_picks, reduce_at
from gradsieve.sparsifiers._one_threshold import OneThreshold
from gradsieve.sparsifiers._spending import Steady
from gradsieve.sparsifiers._table import Table
from gradsieve.sparsifiers._threshold import MeasuredThreshold
from gradsieve.sparsifiers.base import largest

FEWEST = 0.95  # of k: with fewer different positions, workers put forward more of them in a second round
NOISE = 0.5  # standard deviations of a count of k, by which more picks are asked for than seem necessary
FORGET = 0.9  # what is left of a large change of the overlap after a step
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 come near to every number soon


@dataclass(eq=False)
class SharedThreshold(OneThreshold):
    """Worker r picks `|acc_r| >= threshold`; everybody's values are sent wherever anybody picked.

    Picks are sent to all, so that all know who voted for what. If they are more than k different positions, those
    with the fewest votes stay in the residuals, other ones of equals in every step. If they are fewer than 95 % of
    k, because workers agree much more than in the step before, each puts forward its largest of the others, as many
    as are missing: two further collectives, but never a step with too little.
    """

    def setup(self, step: Step, sizes: Sequence[int]) -> None:
        self._spending = self._overlap = Overlap()
        self._threshold = MeasuredThreshold(self._overlap)

    def judged(self, step: Step) -> Span:
        return 0, step.n

    def exchange(self, acc: Tensor, picked: Tensor, pulse: Tensor, step: Step) -> Program[Exchanged]:
        shared = yield from gather_picks(picked, step, self._threshold.counts)
        counts = [len(part) for part in shared]
        indices, votes = torch.cat(shared).unique(return_counts=True)
        self._different = len(indices)
        if len(indices) < FEWEST * step.k:
            further = yield from gather_picks(largest_beside(acc, indices, step.k), step)
            counts = [count + len(part) for count, part in zip(counts, further, strict=True)]
            more, votes = torch.cat(further).unique(return_counts=True)
            more = most_voted(more, votes, step.k - len(indices), step)
            indices = torch.cat([indices, more]).sort().values
        else:
            indices = most_voted(indices, votes, step.k, step)
        return (yield from reduce_at(acc, indices, pulse, counts))

    def observe(self, sent: Exchanged, step: Step) -> None:
        self._overlap.learn(sum(self._threshold.counts or []), self._different)
        super().observe(sent, step)

    def fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """More or fewer workers overlap more or less."""
        return {**super().fitting(state_dict), "spending_state": Overlap().state}


class Overlap(Steady):
    """As many picks of all workers together as make k different positions, and a few more.

    The state is [overlap, swing]: how many picks there were for each different position in the last step, and the
    largest recent change of its logarithm.
    """

    def __init__(self) -> None:
        self.state: list[float | None] = [1.0, 0.0]

    def count(self, table: Table, step: Step, energy: float | None) -> int:
        return self.wanted(step)

    def wanted(self, step: Step) -> int:
        overlap, swing = (number or 0.0 for number in self.state)
        picks = step.k * overlap * (math.exp(swing) + NOISE / math.sqrt(step.k))
        return min(math.ceil(picks), step.k * step.world_size)

    def learn(self, picks: int, different: int) -> None:
        """So many picks were so many different positions."""
        if not different:
            return
        last, swing = (number or 0.0 for number in self.state)
        overlap = picks / different
        self.state = [overlap, max(abs(math.log(overlap / last)), FORGET * swing)]


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
