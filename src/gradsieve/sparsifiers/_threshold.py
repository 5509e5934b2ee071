"""A threshold that all workers share, found anew in every step, so that exactly k elements are sent.

While the gradient is accumulated, each worker notes its *candidates*: what lies above the *cut*, a level somewhat
below the last threshold. The workers exchange small histograms of their candidates, from which each of them reads
the same threshold and how many elements every worker sends. The histograms take the place of the round in which
workers would tell each other their counts, so this costs no further collective, no lag and no tuning.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.collectives import AllGather, Program
from gradsieve.exchange import Step
from gradsieve.sparsifiers.base import largest

BINS = 128  # of a histogram of candidates, from the cut upwards; the last one has no upper end
BIN_SHIFT = 17  # 64 bins an octave: two octaves are seen
WIDE = 512  # bins of a histogram of all elements: 16 octaves around the last threshold, or all there are
WARM_UP = 8  # first steps without a cut: residuals grow so fast that most of the vector would be candidates
CAUTION = 2.0  # the cut is below the threshold by this many times the largest recent change from step to step
FORGET = 0.9  # what is left of a large change after a step
FEWEST, MOST = 2, 8  # candidates aimed at, as multiples of k
LARGEST_SHARE = 16  # more than this part of the vector, 1/16, only if k itself asks for it


@dataclass(frozen=True)
class Zoom:
    """`WIDE` bins, of `step` bins of `ops.log_histogram` each from `first` on; the outer ones have no other end."""

    first: int
    step: int

    def fold(self, counts: Tensor) -> Tensor:
        bins = (torch.arange(len(counts)) - self.first).div(self.step, rounding_mode="floor").clamp_(0, WIDE - 1)
        return torch.zeros(WIDE, dtype=counts.dtype).index_add_(0, bins, counts.cpu())

    def edge(self, bin: int) -> float:
        return ops.bin_edge(min(max(self.first + bin * self.step, 0), ops.BINS - 1))


EVERYTHING = Zoom(0, ops.BINS // WIDE)


class MeasuredThreshold:
    """Finds the threshold of every step.

    The state is [cut, threshold, swing, warm-up steps left]: the cut is None where it is not known, the swing is
    the largest recent change of the threshold's logarithm.
    """

    def __init__(self) -> None:
        self.state: list[float | None] = [None, None, 0.0, WARM_UP]
        self._next = self.state
        self.counts: list[int] | None = None  # how many elements each worker sends in this step

    @property
    def threshold(self) -> float | None:
        """Of the last step."""
        return self.state[1]

    @property
    def level(self) -> float:
        """What the accumulating pass looks for."""
        cut = self.state[0]
        return math.inf if cut is None else cut

    def select(self, acc: Tensor, hits: Tensor, span: tuple[int, int], step: Step) -> Program[Tensor]:
        """This worker's share of the k largest magnitudes, each judged by the worker whose span it lies in."""
        cut, table, values = self.state[0], None, acc[hits].abs()
        edge: Callable[[int], float] = ops.bin_edge
        if cut is not None:
            edge = partial(fine_edge, cut)
            table = yield from _gather(fine_histogram(values, cut), step)
        if table is None or int(table.sum()) < step.k:  # warming up, or all fell below the cut
            table, edge = yield from self._look_everywhere(ops.log_histogram(acc, *span), step)
            hits = ops.select_above(acc, max(edge(threshold_bin(table, step.k)), edge(1)), *span)
            values = acc[hits].abs()
        bin = threshold_bin(table, step.k)
        self.counts = shares(table, bin, step.k)
        self._next = self._plan(table, edge, bin, step)
        above = edge(bin + 1) if bin + 1 < table.shape[1] else math.inf
        return hits[_chosen(values, edge(bin), above, self.counts[step.rank])]

    def _look_everywhere(self, counts: Tensor, step: Step) -> Program[tuple[Tensor, Callable[[int], float]]]:
        """The table of all elements: near the last threshold or, if that is unknown or far off, of all."""
        last = self.threshold
        if last is not None:
            near = Zoom(ops.bin_of(last) - WIDE // 2, 1)
            table = yield from _gather(near.fold(counts), step)
            table[:, 0] = 0
            if int(table.sum()) >= step.k > int(table[:, -1].sum()):
                return table, near.edge
        table = yield from _gather(EVERYTHING.fold(counts), step)
        table[:, 0] = 0  # zeros, and what is too small to matter
        return table, EVERYTHING.edge

    def observe(self, selected: int, k: int) -> None:
        self.state = self._next

    def rescale(self, factor: float) -> None:
        cut, threshold, *rest = self.state
        scaled = None if cut is None else _from_bits(_bits(cut * factor))
        self.state = [scaled, None if threshold is None else threshold * factor, *rest]

    def _plan(self, table: Tensor, edge: Callable[[int], float], bin: int, step: Step) -> list[float | None]:
        """The state after this step."""
        _, last, swing, warm_up = self.state
        if not table.any():
            return self.state
        threshold = max(edge(bin), ops.bin_edge(1))
        change = 0.0 if last is None else abs(math.log(threshold / last))
        if warm_up:
            return [None, threshold, change, warm_up - 1]
        swing = max(change, FORGET * (swing or 0.0))
        return [next_cut(table, edge, threshold * math.exp(-CAUTION * swing), step), threshold, swing, 0]


def _chosen(values: Tensor, threshold: float, above: float, count: int) -> Tensor:
    """Which candidates to send: all from `above` on, and the largest below it, down to the threshold."""
    keep = values >= above
    inside = torch.where((values >= threshold) & ~keep)[0]
    keep[inside[largest(values[inside], count - int(keep.sum()))]] = True
    return keep


def fine_histogram(candidates: Tensor, cut: float) -> Tensor:
    """How many candidates lie in each bin above the cut."""
    bins = (candidates.view(torch.int32) - _bits(cut)) >> BIN_SHIFT
    return torch.bincount(bins.clamp_(0, BINS - 1), minlength=BINS)


def fine_edge(cut: float, bin: int) -> float:
    """The smallest magnitude of a bin of `fine_histogram`."""
    return _from_bits(_bits(cut) + (bin << BIN_SHIFT))


def _gather(histogram: Tensor, step: Step) -> Program[Tensor]:
    """One row a worker."""
    rows = yield AllGather("histogram", histogram[None].to(torch.int32), [1] * step.world_size)
    return torch.cat(rows).long()


def enough(k: int) -> int:
    """How many candidates to aim at, at least: some more than k, also when k is so small that chance rules."""
    return math.ceil(max(FEWEST * k, k + 5 * math.sqrt(k)))


def threshold_bin(table: Tensor, k: int) -> int:
    """The highest bin with k or more elements in it and above it; the lowest if there are fewer than k in all."""
    above = table.sum(0).flip(0).cumsum(0).flip(0)
    return max(int((above >= k).sum()) - 1, 0)


def shares(table: Tensor, bin: int, k: int) -> list[int]:
    """How many elements each worker sends: all above the bin, and of the bin in proportion, k together."""
    surely, inside = table[:, bin + 1 :].sum(1), table[:, bin]
    missing = min(k - int(surely.sum()), int(inside.sum()))
    before = torch.cat([inside.new_zeros(1), inside.cumsum(0)])
    split = before * missing // max(int(inside.sum()), 1)
    counts: list[int] = (surely + split.diff()).tolist()
    return counts


def next_cut(table: Tensor, edge: Callable[[int], float], wanted: float, step: Step) -> float:
    """A cut near `wanted`, moved so that neither too few nor too many candidates pass it.

    Below the lowest bin nothing was counted: there `wanted` stands.
    """
    above = table.sum(0).flip(0).cumsum(0).flip(0)

    def level(count: int) -> float:
        """The highest edge with so many elements above it."""
        return edge(max(int((above >= count).sum()) - 1, 0))

    fewest = enough(step.k)
    most = max(fewest, min(MOST * step.k, step.n // LARGEST_SHARE))
    new = min(wanted, level(fewest))
    if above[0] >= most:
        new = max(new, level(most))
    return max(_from_bits(_bits(new)), ops.bin_edge(1))  # as float32 has it, and never so low that zero passes


def _bits(x: float) -> int:
    bits: int = struct.unpack("i", struct.pack("f", x))[0]
    return bits


def _from_bits(bits: int) -> float:
    x: float = struct.unpack("f", struct.pack("i", bits))[0]
    return x
