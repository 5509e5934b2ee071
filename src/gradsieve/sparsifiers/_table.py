"""Histograms of several workers as one table, in which each worker's begins where it says."""

import math

import torch
from torch import Tensor

from gradsieve import ops


def row(counts: Tensor, start: int, width: int) -> Tensor:
    """A worker's message: where its histogram begins, and `width` of the bins of `ops.log_histogram` from there.

    The last of them has no upper end. What lies below the first is left out.
    """
    seen = torch.zeros(1 + width, dtype=torch.int32)
    seen[0] = start
    part = counts[start : start + width].cpu()
    seen[1 : 1 + len(part)] = part
    seen[-1] += int(counts[start + width :].sum())
    return seen


class Table:
    """One row a worker; bin j holds the magnitudes from `edge(j)` to below `edge(j + 1)`."""

    def __init__(self, rows: Tensor) -> None:
        starts, seen = rows[:, 0].tolist(), rows[:, 1:].long()
        self.first: int = min(starts)
        width = max(starts) - self.first + seen.shape[1]
        self.counts = torch.zeros(len(starts), width, dtype=torch.int64)
        for i, start in enumerate(starts):
            self.counts[i, start - self.first :][: seen.shape[1]] = seen[i]
        self._above: list[int] = self.counts.sum(0).flip(0).cumsum(0).flip(0).tolist()

    @property
    def total(self) -> int:
        return self._above[0]

    def above(self, bin: int) -> int:
        """How many elements lie in a bin or above it."""
        return self._above[max(bin, 0)] if bin < len(self._above) else 0

    def edge(self, bin: int) -> float:
        """The smallest magnitude of a bin."""
        return ops.bin_edge(self.first + bin) if bin < len(self._above) else math.inf

    def bin_of(self, magnitude: float) -> int:
        """The bin that a magnitude falls into; below 0 if that is lower than all bins."""
        return ops.bin_of(magnitude) - self.first

    def bin_with(self, count: int) -> int:
        """The highest bin with so many elements in it and above it; the lowest if there are fewer in all."""
        low, high = 0, len(self._above)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._above[middle] >= count else (low, middle)
        return low

    def shares(self, bin: int, count: int) -> list[int]:
        """How many elements each worker sends: all above the bin, of the bin in proportion, `count` together."""
        surely, inside = self.counts[:, bin + 1 :].sum(1), self.counts[:, bin]
        missing = min(count - int(surely.sum()), int(inside.sum()))
        before = torch.cat([inside.new_zeros(1), inside.cumsum(0)])
        split = before * missing // max(int(inside.sum()), 1)
        shares: list[int] = (surely + split.diff()).tolist()
        return shares
