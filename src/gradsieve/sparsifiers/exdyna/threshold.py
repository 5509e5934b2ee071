"""A threshold that all workers share, found in every step, so that exactly as many elements are sent as asked.

Workers exchange small histograms of their *candidates*: what lies above the *cut*, somewhat below the last
threshold. A histogram says itself where it begins, so a worker with too few candidates looks below the cut on its
own; and as each contributes its share, k divided by the workers, all together have k, whatever gradients do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.collectives import Program
from gradsieve.comm.step import Selection, Span, Step
from gradsieve.density.base import Quota
from gradsieve.sparsifiers.base import largest
from gradsieve.sparsifiers.histograms import Histograms, gather, narrowest, reach, row
from gradsieve.sparsifiers.look import Look
from gradsieve.states import State, shared

BINS = 128  # of a histogram, from the cut upwards: four octaves
WIDE = 512  # while there is no cut: 16 octaves around what a worker alone would choose
WITHOUT_CUT = 8  # first sparse steps without a cut: residuals grow so fast that most elements would be candidates
CAUTION = 2.0  # the cut is below the threshold by this many times the largest recent change from step to step
FORGET = 0.9  # what is left of a large change after a step
FEWEST, MOST = 2, 8  # candidates aimed at, as multiples of k
LARGEST_SHARE = 16  # more than this part of the vector, 1/16, only if k itself asks for it


@dataclass(frozen=True)
class ThresholdState(State):
    """What is known from the last steps."""

    cut: float | None = shared(None, power=1)  # None where it is not known: then workers look at all they own
    last: float | None = shared(None, power=1)  # the last threshold
    swing: float = shared(0.0)  # the largest recent change of the threshold's logarithm
    warm_up: int = shared(WITHOUT_CUT)  # steps without a cut that are left


def cut_of(state: ThresholdState, step: Step) -> float:
    """What the accumulating pass looks for; infinite where there is no cut."""
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
    """This worker's share of the largest magnitudes; `hits` are what `look` has above the cut.

    The `plan` of the selection is the state after this step. What is `beside` is read with the histograms.
    """
    quota = step.quota
    kind = narrowest(step.k)  # a burst beyond what a bin can say is sent in the steps that follow
    own = _own_histogram(state, look, hits, step)
    width = WIDE if state.cut is None else BINS
    message = row(own.counts, own.start, own.deepest, width, kind, step.healthy)
    seen, energy, (known, *others) = yield from gather(message, quota.energy, kind, step, own.numbers(), *beside)
    if not seen.healthy:
        return Selection(hits[:0], [0] * step.world_size, spans, healthy=False, beside=others)
    start, deepest, *reached = known.tolist()
    decision = quota.decide(seen, energy)
    bin = seen.bin_with(decision.count)
    counts = seen.shares(bin, decision.count)
    threshold = seen.edge(bin) if decision.count else None
    lowest = seen.first + bin if seen.first + bin > start else deepest
    if own.complete:
        hits = look.above(ops.bin_edge(lowest), reached[lowest])
    surely = reached[seen.first + bin + 1] if seen.edge(bin + 1) < math.inf else 0
    values = look.at(hits).abs()
    edges = ops.bin_edge(lowest), seen.edge(bin + 1)
    picked = hits[_chosen(values, *edges, counts[step.rank], surely, reached[lowest] - surely)]
    after = _next(state, seen, threshold or state.last, quota, step.n)
    return Selection(picked, counts, spans, threshold, after, decision, beside=others)


@dataclass(frozen=True)
class _Own:
    """A worker's own histogram."""

    counts: Tensor
    complete: bool  # of all that the worker owns, not only of its hits
    start: int | Tensor  # the first bin that is shown
    deepest: int | Tensor  # how far down that one reaches

    def numbers(self) -> Tensor:
        """What the worker itself must know of it once it picks: both bins, and how many are in each and above."""
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
    """Below this bin, the same for all workers, nothing needs to be told apart: two octaves below the last
    threshold, or three below a level that must be seen, which moves slowly."""
    if quota.level == math.inf:
        return ops.bin_of(state.last or 0.0) - BINS // 2
    return ops.bin_of(quota.level) - 3 * BINS // 4


def _begin(seen: Tensor, quota: Quota, workers: int, floor: int, wide: bool) -> tuple[Tensor, Tensor]:
    """Where the histogram of a worker begins that looks below the cut, and how far down its first bin reaches.

    It shows at least the worker's share, and as much again where it goes far enough down; and what lies above the
    level that must be seen, as long as the share does not end up in the open bin at its top. A part may hold little
    but zeros and small values. Then it begins at the floor, or below the largest where all is lower, so that what
    is large is seen as such; the small values, as many as are wanted in total, are in its first bin.

    Computed where the histogram is, so that the host does not have to wait for it.
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
    """Which candidates to send, the `count` largest: all from `above` on, and of those down to the threshold.

    `surely` reach `above`, and `inside` more reach the threshold.
    """
    if surely > count:  # a histogram that ends below the threshold does not tell how many lie above it
        return largest(values, count)
    keep = values >= above
    places = _where((values >= threshold) & ~keep, inside)
    keep[places[largest(values[places], count - surely)]] = True
    return _where(keep, count)


def _where(mask: Tensor, count: int) -> Tensor:
    """Where a mask is true, in `count` places."""
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
        # Some have nothing at all, and the others did not look far enough to make up for them.
        return ThresholdState(None, threshold, swing, 1)
    cut = next_cut(seen, threshold * math.exp(-CAUTION * swing), quota.expected, n)
    return ThresholdState(cut, threshold, swing, 0)


def enough(k: int) -> int:
    """How many candidates to aim at, at least: some more than k, also when k is so small that chance rules."""
    return math.ceil(max(FEWEST * k, k + 5 * math.sqrt(k)))


def next_cut(seen: Histograms, wanted: float, k: int, n: int) -> float:
    """A cut near `wanted`, moved so that neither too few nor too many candidates pass it.

    Below the lowest bin nothing was counted: there `wanted` stands.
    """
    fewest = enough(k)
    most = max(fewest, min(MOST * k, n // LARGEST_SHARE))
    new = min(wanted, seen.level_of(fewest))
    if seen.total >= most:
        new = max(new, seen.level_of(most))
    return _at_edge(new)


def _at_edge(magnitude: float) -> float:
    """The next lower edge of a bin, but never so low that zero passes."""
    return ops.bin_edge(max(ops.bin_of(magnitude), 1)) if magnitude < math.inf else math.inf
