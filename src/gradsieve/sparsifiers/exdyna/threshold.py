"""One threshold for all workers, found in every step, so that exactly k elements are sent.

Workers exchange small histograms of their *candidates*: elements above the *cut*, a magnitude somewhat below the
last threshold. A histogram states where it begins, so a worker with too few candidates can search below the cut
without asking the others. Each contributes at least its share, k divided by the number of workers, so there are
always k.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.collectives import Program
from gradsieve.comm.step import Quota, Selection, Span, Step
from gradsieve.sparsifiers.base import Look, largest
from gradsieve.sparsifiers.histograms import Histograms, gather, narrowest, reach, row
from gradsieve.states import State, shared

BINS = 128  # of a histogram, from the cut upwards: four octaves
WIDE = 512  # bins while there is no cut: 16 octaves around the threshold that a worker alone would choose
WITHOUT_CUT = 8  # initial sparse steps without a cut: residuals grow so fast that most elements would be candidates
CAUTION = 2.0  # distance of the cut below the threshold, in units of the largest recent change between steps
FORGET = 0.9  # decay per step of the largest recent change
FEWEST, MOST = 2, 8  # range for the number of candidates, as multiples of k
LARGEST_SHARE = 16  # at most 1/16 of the vector are candidates, unless k requires more


@dataclass(frozen=True)
class ThresholdState(State):
    """What earlier steps say about the threshold."""

    cut: float | None = shared(None, power=1)  # None if not known: workers then search their whole part
    last: float | None = shared(None, power=1)  # the last threshold
    swing: float = shared(0.0)  # the largest recent change of the threshold's logarithm
    warm_up: int = shared(WITHOUT_CUT)  # remaining steps without a cut


def cut_of(state: ThresholdState, step: Step) -> float:
    """The cut of this step, for the accumulating pass; infinite if there is none."""
    if state.cut is None:
        return math.inf
    return min(_at_edge(state.cut), _at_edge(step.quota.level))


def choose(
    state: ThresholdState,
    look: Look,
    hits: Tensor,
    step: Step,
    spans: Sequence[Span] | None = None,
    beside: Sequence[Tensor] = (),
) -> Program[Selection]:
    """This worker's share of the largest magnitudes; `hits` are the positions in `look` above the cut.

    The `plan` of the selection is the state after this step. What is `beside` is read with the histograms.
    """
    quota = step.quota
    kind = narrowest(step.k)  # a burst beyond this type's range is sent in the following steps
    own = _own_histogram(state, look, hits, step)
    width = WIDE if state.cut is None else BINS
    message = row(own.counts, own.start, own.deepest, width, kind, step.healthy)
    seen, energy, (known, *others) = yield from gather(message, quota.energy, kind, step, own.numbers(), *beside)
    if not seen.healthy:
        return Selection(hits[:0], [0] * step.world_size, spans, healthy=False, beside=others)
    decision = quota.decide(seen, energy)
    bin = seen.bin_with(decision.count)
    counts = seen.shares(bin, decision.count)
    threshold = seen.edge(bin) if decision.count else None
    picked = _picked(look, None if own.complete else hits, known.tolist(), seen, bin, counts[step.rank])
    after = _next(state, seen, threshold or state.last, quota, step.n)
    return Selection(picked, counts, spans, threshold, after, decision, beside=others)


def _picked(
    look: Look, hits: Tensor | None, known: Sequence[int], seen: Histograms, bin: int, count: int
) -> Tensor:
    """This worker's `count` largest elements: of its hits, or of all if the histogram was of its whole part.

    known: the histogram's first bin, the lowest bin counted in it, and how many elements reach each bin.
    bin: that of the threshold.
    """
    start, deepest, *reached = known
    lowest = seen.first + bin if seen.first + bin > start else deepest
    if hits is None:
        hits = look.above(ops.bin_edge(lowest), reached[lowest])
    surely = reached[seen.first + bin + 1] if seen.edge(bin + 1) < math.inf else 0
    edges = ops.bin_edge(lowest), seen.edge(bin + 1)
    return hits[_chosen(look.at(hits).abs(), *edges, count, surely, reached[lowest] - surely)]


@dataclass(frozen=True)
class _Own:
    """A worker's own histogram."""

    counts: Tensor
    complete: bool  # of the worker's whole part, not only of its hits
    start: int | Tensor  # the first bin that is sent
    deepest: int | Tensor  # the lowest bin that is counted in that one

    def numbers(self) -> Tensor:
        """What the worker needs on the host in order to pick: both bins, and `reach` of all bins."""
        none = self.counts.new_zeros(1)
        return torch.cat([none + self.start, none + self.deepest, reach(self.counts)])


def _own_histogram(state: ThresholdState, look: Look, hits: Tensor, step: Step) -> _Own:
    quota, cut = step.quota, cut_of(state, step)
    floor = _floor(state, quota)
    if state.cut is not None and len(hits) * step.world_size >= quota.expected:
        deepest = ops.bin_of(cut)
        return _Own(ops.log_histogram(look.at(hits)), False, max(deepest, floor), deepest)
    counts = look.histogram()
    return _Own(counts, True, *_begin(counts, quota, step.world_size, floor, state.cut is None))


def _floor(state: ThresholdState, quota: Quota) -> int:
    """The bin below which no resolution is needed, the same on all workers.

    It is two octaves below the last threshold, or three below the level of the quota, which moves slowly.
    """
    if quota.level == math.inf:
        return ops.bin_of(state.last or 0.0) - BINS // 2
    return ops.bin_of(quota.level) - 3 * BINS // 4


def _begin(seen: Tensor, quota: Quota, workers: int, floor: int, wide: bool) -> tuple[Tensor, Tensor]:
    """First bin of the histogram of a worker that searches below the cut, and the lowest bin counted in it.

    The histogram covers at least the worker's share, and twice that if it reaches down far enough; and everything
    above the quota's level, as long as the share does not end up in the open bin at the top. If a part holds mostly
    zeros and small values, the histogram begins at the floor, or just below the largest value if all are lower, so
    that large values are resolved; the small ones, as many as are wanted in total, are counted in the first bin.

    Computed on the histogram's device, so the host does not wait for it.
    """
    above = reach(seen)

    def bin_of(count: int | Tensor) -> Tensor:
        return ((above >= count).sum() - 1).clamp(min=1)

    top, share = bin_of(1), quota.expected / workers
    half = (above[1] + 1) // 2
    middle = bin_of(half.clamp(1, math.ceil(share)))
    if wide:
        start = _largest(middle - WIDE // 2, top - WIDE + 1)
    else:
        usual = _largest(bin_of(2 * enough(math.ceil(share))), middle - BINS // 4)
        lower = usual if quota.level == math.inf else usual.clamp(max=ops.bin_of(quota.level))
        start = _largest(lower, middle - 3 * BINS // 4, (top - BINS + 1).clamp(max=floor))
    start = start.clamp(min=1)
    return start, torch.minimum(start, bin_of(quota.expected))


def _largest(*numbers: Tensor) -> Tensor:
    return torch.stack(numbers).max()


def _chosen(values: Tensor, threshold: float, above: float, count: int, surely: int, inside: int) -> Tensor:
    """The `count` largest candidates: all that reach `above`, and the largest of those down to the threshold.

    surely: how many reach `above`.
    inside: how many lie between.
    """
    if surely > count:  # the histogram ends below the threshold, so the number above it is not known
        return largest(values, count)
    keep = values >= above
    places = _where((values >= threshold) & ~keep, inside)
    keep[places[largest(values[places], count - surely)]] = True
    return _where(keep, count)


def _where(mask: Tensor, count: int) -> Tensor:
    """The positions at which a mask is true; there are `count`."""
    return torch.nonzero_static(mask, size=count).flatten()


def _next(state: ThresholdState, seen: Histograms, threshold: float | None, quota: Quota, n: int) -> ThresholdState:
    """The state after this step."""
    if seen.total == 0 or threshold is None:
        return state
    change = 0.0 if state.last is None else abs(math.log(threshold / state.last))
    if state.warm_up:
        return ThresholdState(None, threshold, change, state.warm_up - 1)
    swing = max(change, FORGET * state.swing)
    if state.cut is not None and seen.total < quota.expected:
        # Some workers have nothing at all, and the others did not search far enough down to make up for them.
        return ThresholdState(None, threshold, swing, 1)
    cut = next_cut(seen, threshold * math.exp(-CAUTION * swing), quota.expected, n)
    return ThresholdState(cut, threshold, swing, 0)


def enough(k: int) -> int:
    """The smallest number of candidates to aim at: above k by a margin, also for small k with its large noise."""
    return math.ceil(max(FEWEST * k, k + 5 * math.sqrt(k)))


def next_cut(seen: Histograms, wanted: float, k: int, n: int) -> float:
    """A cut near `wanted`, moved so that neither too few nor too many candidates pass it.

    Below the lowest bin there are no counts: `wanted` is kept there.
    """
    fewest = enough(k)
    most = max(fewest, min(MOST * k, n // LARGEST_SHARE))
    new = min(wanted, seen.level_of(fewest))
    if seen.total >= most:
        new = max(new, seen.level_of(most))
    return _at_edge(new)


def _at_edge(magnitude: float) -> float:
    """The next lower edge of a bin, but above zero."""
    return ops.bin_edge(max(ops.bin_of(magnitude), 1)) if magnitude < math.inf else math.inf
