"""Histograms on GPUs: programs count in private bins, which are added up at the end.

Sums of integers do not depend on their order, so the result is deterministic in spite of atomic additions.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver

from gradsieve.ops.gpu import OPTIONS, TILE, TILE_SIZE, kernel, load_tile, magnitude, tiles
from gradsieve.ops.schema import BIN_SHIFT, BINS

PROGRAMS = 1024  # at most, each of which counts many tiles: 7 per multiprocessor of an H100
ROWS_COUNT = 64  # rows of bins in memory, each shared by some of the programs: 2 MiB, which stay in the cache
ROWS = tl.constexpr(ROWS_COUNT)
ALL_BINS = tl.constexpr(BINS)
SHIFT = tl.constexpr(BIN_SHIFT)


@kernel
def own_bins(in_block: tl.constexpr) -> tl.tensor:
    """Bins of this program, if it has any of its own."""
    own = 0
    if in_block:
        own = tl.zeros((ALL_BINS,), tl.int32)
    return own


@kernel
def counted(own: tl.tensor, rows: tl.tensor, x: tl.tensor, inside: tl.tensor, in_block: tl.constexpr) -> tl.tensor:
    """Count the elements of a tile that are inside; returns the bins of this program."""
    bins = magnitude(x) >> SHIFT
    if in_block:  # the others are counted as zero and taken away again
        outside = TILE - tl.sum(inside.to(tl.int32), 0)
        found = tl.histogram(tl.where(inside, bins, 0), ALL_BINS)
        own += found - tl.where(tl.arange(0, ALL_BINS) == 0, outside, 0)
    else:
        row = rows + (tl.program_id(0) % ROWS) * ALL_BINS
        tl.atomic_add(row + bins, 1, mask=inside, sem="relaxed")
    return own


@kernel
def add_up(own: tl.tensor, rows: tl.tensor, in_block: tl.constexpr) -> None:
    """At the end of a program."""
    if in_block:
        tl.atomic_add(rows + tl.arange(0, ALL_BINS), own.to(tl.int64), mask=own > 0, sem="relaxed")


@kernel
def _histogram(
    x: tl.tensor,
    n: tl.int64,
    start: tl.int64,
    stop: tl.int64,
    first: tl.int64,
    last: tl.int64,
    rows: tl.tensor,
    in_block: tl.constexpr,
) -> None:
    own = own_bins(in_block)
    for tile in range(first + tl.program_id(0), last, tl.num_programs(0)):
        offsets = tile * TILE + tl.arange(0, TILE)
        inside = (offsets >= start) & (offsets < stop)
        if (tile + 1) * TILE <= n:
            own = counted(own, rows, load_tile(x, offsets, n, True), inside, in_block)
        else:
            own = counted(own, rows, load_tile(x, offsets, n, False), inside, in_block)
    add_up(own, rows, in_block)


def in_block() -> bool:
    """Whether programs count in shared memory.

    For CUDA, Triton's histogram adds in shared memory. For ROCm it compares each element with each bin and needs
    more registers than there are; programs then count in rows of bins in the cache.
    """
    backend: str = driver.active.get_current_target().backend
    return backend != "hip"


class Bins:
    """Where a launch counts: `rows` and `in_block` are its arguments; `end` adds what it counted to `counts`.

    Bins in blocks are held in registers, so more threads share them.
    """

    def __init__(self, counts: Tensor) -> None:
        self.counts, self.in_block = counts, in_block()
        shape, device = (ROWS_COUNT, BINS), counts.device
        self.options = {**OPTIONS, "num_warps": 16} if self.in_block else OPTIONS
        self.rows = counts if self.in_block else torch.zeros(shape, dtype=torch.int32, device=device)

    def end(self) -> None:
        if not self.in_block:
            self.counts += self.rows.sum(0)


def log_histogram(x: Tensor, start: int, stop: int) -> Tensor:
    counts = torch.zeros(BINS, dtype=torch.int64, device=x.device)
    if start < stop:
        first, last = start // TILE_SIZE, tiles(stop)
        bins, grid = Bins(counts), (min(last - first, PROGRAMS),)
        _histogram[grid](x, len(x), start, stop, first, last, bins.rows, bins.in_block, **bins.options)
        bins.end()
    return counts
