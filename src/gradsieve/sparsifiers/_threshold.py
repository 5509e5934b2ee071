"""A threshold that all workers share, found anew in every step, so that exactly as many elements are sent as asked.

While the gradient is accumulated, each worker notes its *candidates*: what lies above the *cut*, a level somewhat
below the last threshold. The workers exchange small histograms of their candidates, from which each of them reads
the same threshold and how many elements every worker sends. The histograms take the place of the round in which
workers would tell each other their counts, so this costs no further collective, no lag and no tuning.

A histogram says itself where it begins. So a worker that finds too few candidates looks below the cut on its own;
and as each contributes its share, k divided by the workers, all together have k, whatever gradients do.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.collectives import AllGather, Program
from gradsieve.exchange import Step
from gradsieve.sparsifiers._spending import Spending
from gradsieve.sparsifiers._table import Table, narrowest, row
from gradsieve.sparsifiers.base import largest

BINS = 128  # of a histogram, from the cut upwards: four octaves
WIDE = 512  # while there is no cut: 16 octaves around what a worker alone would choose
WITHOUT_CUT = (
    8  # first sparse steps without a cut: residuals grow so fast that most of the vector would be candidates
)
CAUTION = 2.0  # the cut is below the threshold by this many times the largest recent change from step to step
FORGET = 0.9  # what is left of a large change after a step
FEWEST, MOST = 2, 8  # candidates aimed at, as multiples of k
LARGEST_SHARE = 16  # more than this part of the vector, 1/16, only if k itself asks for it


class Look(Protocol):
    """What a worker can see of a vector: the part in which it picks."""

    def histogram(self) -> Tensor:
        """`ops.log_histogram` of that part."""

    def above(self, threshold: float) -> Tensor:
        """The sorted positions in that part of magnitudes from the threshold on."""

    def at(self, positions: Tensor) -> Tensor:
        """The elements at positions that `above` has returned."""


@dataclass(frozen=True)
class InVector:
    """A part of a vector that is there."""

    vector: Tensor
    span: tuple[int, int]

    def histogram(self) -> Tensor:
        return ops.log_histogram(self.vector, *self.span)

    def above(self, threshold: float) -> Tensor:
        return ops.select_above(self.vector, threshold, *self.span)

    def at(self, positions: Tensor) -> Tensor:
        return self.vector[positions]


class MeasuredThreshold:
    """Finds the threshold of every step.

    The state is [cut, threshold, swing, warm-up steps left]: the cut is None where it is not known, the swing is
    the largest recent change of the threshold's logarithm.
    """

    def __init__(self, spending: Spending) -> None:
        self.spending = spending
        self.state: list[float | None] = [None, None, 0.0, WITHOUT_CUT]
        self._next = self.state
        self.counts: list[int] | None = None  # how many elements each worker sends in this step
        self.decided: float | None = None  # the threshold of this step

    @property
    def level(self) -> float:
        """What the accumulating pass looks for."""
        cut = self.state[0]
        return math.inf if cut is None else cut

    def select(self, acc: Tensor, hits: Tensor, span: tuple[int, int], step: Step) -> Program[Tensor]:
        """This worker's share of the largest magnitudes, each judged by the worker whose span it lies in."""
        return self.select_in(InVector(acc, span), hits, step)

    def select_in(self, look: Look, hits: Tensor, step: Step) -> Program[Tensor]:
        """As `select`, of whatever can be looked at; `hits` are what `look` has above the cut."""
        cut, wanted, sought = self.state[0], self.spending.wanted(step), self.spending.level(step)
        kind = narrowest(step.k)  # a surge beyond what it can say of one bin is sent in the steps that follow
        floor, looks = self._floor(sought), cut is None or len(hits) * step.world_size < wanted
        seen = (look.histogram() if looks else ops.log_histogram(look.at(hits))).cpu()
        if looks:
            start, deepest = _begin(seen, wanted, step.world_size, floor, sought, cut is None)
        else:
            deepest = ops.bin_of(self.level)
            start = max(deepest, floor)
        message = row(seen, start, deepest, WIDE if cut is None else BINS, kind)
        energy = self.spending.energy()
        if energy is not None:
            message = torch.cat([message, torch.tensor([energy], dtype=torch.float32).view(torch.uint8)])
        rows = torch.cat((yield AllGather("histogram", message.to(hits.device)[None], [1] * step.world_size))).cpu()
        if energy is not None:
            rows, told = rows.split([len(message) - torch.float32.itemsize, torch.float32.itemsize], 1)
            energy = float(told.flatten().clone().view(torch.float32).double().mean())
        table = Table(rows, kind)
        count = self.spending.count(table, step, energy)
        bin = table.bin_with(count)
        self.counts = table.shares(bin, count)
        self.decided = table.edge(bin) if count else None
        self._next = self._plan(table, table.edge(bin) if count else self.state[1], step)
        threshold = table.edge(bin) if table.first + bin > start else ops.bin_edge(deepest)
        if looks:
            hits = look.above(threshold)
        return hits[_chosen(look.at(hits).abs(), threshold, table.edge(bin + 1), self.counts[step.rank])]

    def observe(self, selected: int, step: Step) -> None:
        self.state = self._next
        self.spending.observe(selected, step)
        if self.state[0] is not None:
            sought = self.spending.level(replace(step, index=step.index + 1))
            self.state = [min(self.state[0], _at_edge(sought)), *self.state[1:]]

    def rescale(self, factor: float) -> None:
        self.spending.rescale(factor)
        cut, threshold, *rest = self.state
        scaled = None if cut is None else _at_edge(cut * factor)
        self.state = [scaled, None if threshold is None else threshold * factor, *rest]

    def _floor(self, sought: float) -> int:
        """Below this bin nothing needs to be told apart: two octaves below the last threshold, or three below a
        level that is sought, which moves slowly. It is the same for all workers, so none of them has large elements
        in an open bin that others' histograms reach beyond."""
        return (
            ops.bin_of(self.state[1] or 0.0) - BINS // 2
            if sought == math.inf
            else ops.bin_of(sought) - 3 * BINS // 4
        )

    def _plan(self, table: Table, threshold: float | None, step: Step) -> list[float | None]:
        """The state after this step."""
        cut, last, swing, warm_up = self.state
        if table.total == 0 or threshold is None:
            return self.state
        change = 0.0 if last is None else abs(math.log(threshold / last))
        if warm_up:
            return [None, threshold, change, warm_up - 1]
        swing, wanted = max(change, FORGET * (swing or 0.0)), self.spending.wanted(step)
        if cut is not None and table.total < wanted:
            # Some have nothing at all, and the others did not look far enough to make up for them.
            return [None, threshold, swing, 1]
        return [next_cut(table, threshold * math.exp(-CAUTION * swing), wanted, step.n), threshold, swing, 0]


def _begin(seen: Tensor, wanted: int, workers: int, floor: int, sought: float, wide: bool) -> tuple[int, int]:
    """Where the histogram of a worker begins that looks below the cut, and how far down its first bin reaches.

    It shows at least the worker's share, and as much again where it goes far enough down; and what lies above the
    level that is `sought`, as long as the share does not end up in the open bin at its top. A part may hold little
    but zeros and crumbs. Then it begins at the floor, or below the largest where all is lower, so that what is
    large is seen as such; the crumbs, as many as are wanted in all, are in its first bin.
    """
    above = seen.flip(0).cumsum(0).flip(0)

    def level(count: float) -> int:
        return max(int((above >= max(count, 1)).sum()) - 1, 1)

    top, share = level(1), wanted / workers
    middle = level(min(share, float(above[1]) / 2))
    if wide:
        start = max(middle - WIDE // 2, top - WIDE + 1, 1)
    else:
        usual = max(level(2 * enough(math.ceil(share))), middle - BINS // 4)
        lower = usual if sought == math.inf else min(usual, ops.bin_of(sought))
        start = max(lower, middle - 3 * BINS // 4, min(top - BINS + 1, floor), 1)
    return start, min(start, level(wanted))


def _chosen(values: Tensor, threshold: float, above: float, count: int) -> Tensor:
    """Which candidates to send, the `count` largest: all from `above` on, and of those down to the threshold."""
    keep = values >= above
    missing = count - int(keep.sum())
    if missing < 0:  # a histogram that ends below the threshold does not tell how many lie above it
        return largest(values, count)
    inside = torch.where((values >= threshold) & ~keep)[0]
    keep[inside[largest(values[inside], missing)]] = True
    return keep


def enough(k: int) -> int:
    """How many candidates to aim at, at least: some more than k, also when k is so small that chance rules."""
    return math.ceil(max(FEWEST * k, k + 5 * math.sqrt(k)))


def next_cut(table: Table, wanted: float, k: int, n: int) -> float:
    """A cut near `wanted`, moved so that neither too few nor too many candidates pass it.

    Below the lowest bin nothing was counted: there `wanted` stands.
    """
    fewest = enough(k)
    most = max(fewest, min(MOST * k, n // LARGEST_SHARE))
    new = min(wanted, table.edge(table.bin_with(fewest)))
    if table.total >= most:
        new = max(new, table.edge(table.bin_with(most)))
    return _at_edge(new)


def _at_edge(magnitude: float) -> float:
    """The next lower edge of a bin, but never so low that zero passes."""
    return ops.bin_edge(max(ops.bin_of(magnitude), 1)) if magnitude < math.inf else math.inf
