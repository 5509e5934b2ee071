"""Selection on GPUs, in rising order and the same in every run: count per tile, scan, write.

The pass over the data leaves a bit per element and a count per tile. Positions are written from these bits, so the
data is read once. That a tensor must have a size makes the host wait for one number: `Hits.end`.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gradsieve.ops.gpu import (
    INFINITY,
    TILE,
    TILE_SIZE,
    WARPS,
    WORDS,
    bar_of,
    infinity,
    kernel,
    load_tile,
    magnitude,
    plain,
    popcount,
    refuse,
    store_tile,
    tiles,
    widened,
)


@kernel
def mark(hits: Any, slot: Any, words: Any, counts: Any) -> None:
    """Keep which elements of a tile are hits, 32 to a word, and how many."""
    bits = tl.reshape(hits.to(tl.int32), (WORDS, 32)) << tl.arange(0, 32)[None, :]
    tl.store(words + slot * WORDS + tl.arange(0, WORDS), tl.sum(bits, 1))
    tl.store(counts + slot, tl.sum(hits.to(tl.int32), 0))


@kernel
def marked(words: Any, slot: Any) -> Any:
    """Of the elements of a tile, as 32 columns: where they are in it, which are hits, the rank of each among these."""
    word = tl.load(words + slot * WORDS + tl.arange(0, WORDS))
    number = popcount(word)
    before = tl.cumsum(number, 0) - number
    column = tl.arange(0, 32)[None, :]
    below = word[:, None] & ((1 << column) - 1)
    places = tl.arange(0, WORDS)[:, None] * 32 + column
    return places, ((word[:, None] >> column) & 1) > 0, before[:, None] + popcount(below)


@kernel
def _select(
    x: Any, n: tl.int64, bar: tl.int64, start: tl.int64, stop: tl.int64, first: tl.int64, words: Any, counts: Any
) -> None:
    tile = first + tl.program_id(0)
    if (tile + 1) * TILE <= n:
        _select_tile(x, n, bar, start, stop, first, words, counts, tile, True)
    else:
        _select_tile(x, n, bar, start, stop, first, words, counts, tile, False)


@kernel
def _select_tile(
    x: Any,
    n: Any,
    bar: Any,
    start: Any,
    stop: Any,
    first: Any,
    words: Any,
    counts: Any,
    tile: Any,
    FULL: tl.constexpr,
) -> None:
    offsets = tile * TILE + tl.arange(0, TILE)
    bits = magnitude(load_tile(x, offsets, n, FULL))
    hits = (bits >= bar.to(bits.dtype)) & (bits <= infinity(bits)) & (offsets >= start) & (offsets < stop)
    mark(hits, tile - first, words, counts)


@kernel
def _accumulate(
    residual: Any,
    grad: Any,
    backup: Any,
    finite: Any,
    n: tl.int64,
    bar: tl.int64,
    start: tl.int64,
    stop: tl.int64,
    first: tl.int64,
    last: tl.int64,
    words: Any,
    counts: Any,
) -> None:
    tile = tl.program_id(0).to(tl.int64)
    if (tile + 1) * TILE <= n:
        _accumulate_tile(
            residual, grad, backup, finite, n, bar, start, stop, first, last, words, counts, tile, True
        )
    else:
        _accumulate_tile(
            residual, grad, backup, finite, n, bar, start, stop, first, last, words, counts, tile, False
        )


@kernel
def _accumulate_tile(
    residual: Any,
    grad: Any,
    backup: Any,
    finite: Any,
    n: Any,
    bar: Any,
    start: Any,
    stop: Any,
    first: Any,
    last: Any,
    words: Any,
    counts: Any,
    tile: Any,
    FULL: tl.constexpr,
) -> None:
    offsets = tile * TILE + tl.arange(0, TILE)
    before = load_tile(residual, offsets, n, FULL)
    after = before + widened(load_tile(grad, offsets, n, FULL)).to(tl.float32)
    store_tile(residual, offsets, after, n, FULL)
    if backup is not None:
        store_tile(backup, offsets, before.to(backup.dtype.element_ty), n, FULL)
    bits = magnitude(after)
    if finite is not None:
        refuse(finite, bits >= INFINITY)
    if (tile >= first) & (tile < last):
        hits = (bits >= bar.to(tl.int32)) & (bits <= INFINITY) & (offsets >= start) & (offsets < stop)
        mark(hits, tile - first, words, counts)


@kernel
def _positions(words: Any, ends: Any, first: tl.int64, out: Any) -> None:
    slot = tl.program_id(0).to(tl.int64)
    begin = tl.load(ends + slot - 1, mask=slot > 0, other=0)
    if tl.load(ends + slot) > begin:
        places, hit, rank = marked(words, slot)
        tl.store(out + begin + rank, (first + slot) * TILE + places, mask=hit)


class Hits:
    """Bits and counts that a pass over tiles leaves, and what is made of them."""

    def __init__(self, count: int, like: Tensor) -> None:
        self.tiles = count
        self.words = torch.empty(count * WORDS.value, dtype=torch.int32, device=like.device)
        self.counts = torch.empty(count, dtype=torch.int32, device=like.device)

    def end(self) -> tuple[Tensor, int]:
        """Where the hits of each tile end among all hits, and how many there are: here the host waits."""
        ends = self.counts.cumsum(0)
        return ends, int(ends[-1]) if self.tiles else 0

    def positions(self, first: int) -> Tensor:
        """Of all hits, in rising order; `first` is the number of the first tile."""
        ends, total = self.end()
        out = torch.empty(total, dtype=torch.int64, device=ends.device)
        if total:
            _positions[(self.tiles,)](self.words, ends, first, out, num_warps=WARPS)
        return out


def _span(start: int, stop: int) -> tuple[int, int]:
    """The tiles that `[start, stop)` touches."""
    return (start // TILE_SIZE, tiles(stop)) if start < stop else (0, 0)


def select_above(x: Tensor, threshold: float, start: int, stop: int) -> Tensor:
    first, last = _span(start, stop)
    hits = Hits(last - first, x)
    if hits.tiles:
        bar = bar_of(threshold, x.dtype)
        _select[(hits.tiles,)](plain(x), len(x), bar, start, stop, first, hits.words, hits.counts, num_warps=WARPS)
    return hits.positions(first)


def accumulate_select_(
    residual: Tensor,
    grad: Tensor,
    threshold: float,
    start: int,
    stop: int,
    *,
    backup: Tensor | None = None,
    finite: Tensor | None = None,
) -> Tensor:
    n, (first, last) = len(residual), _span(start, stop)
    hits = Hits(last - first, residual)
    if n:
        _accumulate[(tiles(n),)](
            residual,
            plain(grad),
            backup,
            None if finite is None else plain(finite),
            n,
            bar_of(threshold, torch.float32),
            start,
            stop,
            first,
            last,
            hits.words,
            hits.counts,
            num_warps=WARPS,
        )
    return hits.positions(first)
