"""Histograms of all workers in one table. Each worker's message states the bin at which its histogram begins."""

import math

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.collectives import Program, all_gather
from gradsieve.comm.step import Step

_MOST = {dtype: torch.iinfo(dtype).max for dtype in (torch.uint8, torch.int16, torch.int32)}
_START_BYTES = torch.int16.itemsize  # head of a message: the first bin
_ENERGY_BYTES = torch.float32.itemsize  # after the bins, if the density needs it
UNHEALTHY = -1  # in place of the first bin: this worker's gradient is not finite


def narrowest(count: int) -> torch.dtype:
    """The narrowest type for bins that need not count beyond `count`."""
    return next(dtype for dtype, most in _MOST.items() if count <= most or dtype == torch.int32)


def reach(counts: Tensor) -> Tensor:
    """For each bin of a histogram, the number of elements in it and in all higher bins."""
    return counts.flip(0).cumsum(0).flip(0)


def row(
    counts: Tensor,
    start: int | Tensor,
    deepest: int | Tensor,
    width: int,
    dtype: torch.dtype = torch.int32,
    healthy: bool | Tensor = True,
) -> Tensor:
    """A worker's message: the bin at which its histogram begins, and `width` bins of `ops.log_histogram`.

    The last bin has no upper end, and the first one reaches down to the bin `deepest`. Smaller magnitudes are left
    out; counts saturate at the largest number of their type.
    """
    begin = counts.new_zeros(1) + start
    edges = begin + torch.arange(width + 1, device=counts.device)
    edges[-1:] = len(counts)
    edges[:1] = begin.clamp(max=deepest)
    above = torch.cat([reach(counts), counts.new_zeros(1)])[edges.clamp_(max=len(counts))]
    seen = above[:-1] - above[1:]
    unhealthy = ~healthy if isinstance(healthy, Tensor) else begin.new_full((), not healthy, dtype=torch.bool)
    head = begin.masked_fill(unhealthy, UNHEALTHY).to(torch.int16).view(torch.uint8)
    return torch.cat([head, seen.clamp_(max=_MOST[dtype]).to(dtype).view(torch.uint8)])


def gather(
    message: Tensor, energy: Tensor | None, dtype: torch.dtype, step: Step, *own: Tensor
) -> "Program[tuple[Histograms, float | None, list[Tensor]]]":
    """The histograms of all workers, the mean of their energies, if any, and `own`, all of it on the host.

    A step's threshold and counts depend on nothing else, so one copy from the device is enough.
    """
    if energy is not None:
        energy = energy.to(message.device, torch.float32, non_blocking=True)
        message = torch.cat([message, energy.view(1).view(torch.uint8)])
    gathered = torch.cat((yield from all_gather("histogram", message[None], [1] * step.world_size)))
    rows, *known = ops.read(gathered, *own)
    if energy is None:
        return Histograms(rows, dtype), None, known
    mean = float(_as(rows[:, -_ENERGY_BYTES:], torch.float32).double().mean())
    return Histograms(rows[:, :-_ENERGY_BYTES], dtype), mean, known


class Histograms:
    """One row per worker; bin j holds the magnitudes from `edge(j)` to below `edge(j + 1)`."""

    def __init__(self, rows: Tensor, dtype: torch.dtype = torch.int32) -> None:
        heads, bins = rows.tensor_split([_START_BYTES], 1)
        starts = _as(heads, torch.int16).long()
        self.first = int(starts.min())
        self.healthy = not bool((starts == UNHEALTHY).any())
        seen = _as(bins, dtype).long()
        places = starts - self.first + torch.arange(seen.shape[1])
        self.counts = seen.new_zeros(len(rows), int(places[:, -1].max()) + 1).scatter_(1, places, seen)
        self._above: list[int] = self.counts.sum(0).flip(0).cumsum(0).flip(0).tolist()

    @property
    def total(self) -> int:
        return self._above[0]

    def above(self, magnitude: float) -> int:
        """The number of elements at least as large, with the magnitude rounded down to the edge of a bin."""
        if magnitude == math.inf:
            return 0
        bin = ops.bin_of(magnitude) - self.first
        return self._above[max(bin, 0)] if bin < len(self._above) else 0

    def level_of(self, count: int) -> float:
        """The magnitude that `count` elements reach, rounded down to the edge of a bin."""
        return self.edge(self.bin_with(count))

    def edge(self, bin: int) -> float:
        """The smallest magnitude of a bin."""
        return ops.bin_edge(self.first + bin) if bin < len(self._above) else math.inf

    def bin_with(self, count: int) -> int:
        """The highest bin with `count` elements in it and above it; the lowest if there are fewer in total."""
        low, high = 0, len(self._above)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._above[middle] >= count else (low, middle)
        return low

    def shares(self, bin: int, count: int) -> list[int]:
        """How many elements each worker sends, `count` in total: all above the bin, in proportion inside it."""
        surely, inside = self.counts[:, bin + 1 :].sum(1), self.counts[:, bin]
        missing = min(count - int(surely.sum()), int(inside.sum()))
        before = torch.cat([inside.new_zeros(1), inside.cumsum(0)])
        split = before * missing // max(int(inside.sum()), 1)
        return [int(share) for share in surely + split.diff()]


def _as(columns: Tensor, dtype: torch.dtype) -> Tensor:
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)
