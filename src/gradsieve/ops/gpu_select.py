"""Selection on GPUs, in rising order and deterministic: count per tile, scan, write.

The pass over the data writes a bit per element and a count per tile. Positions are written from these bits, so the
data is read once. To allocate the result the host waits for one number: `Hits.end`.
"""

import torch
import triton.language as tl
from torch import Tensor

from gradsieve.ops.gpu import (
    OPTIONS,
    TILE,
    TILE_SIZE,
    WORDS,
    bar_of,
    below_infinity,
    kernel,
    load_tile,
    magnitude,
    plain,
    popcount,
    reached,
    refuse,
    store_tile,
    tiles,
    widened,
)


@kernel
def mark(hits: tl.tensor, slot: tl.tensor, words: tl.tensor, counts: tl.tensor) -> None:
    """Keep which elements of a tile are hits, 32 to a word, and how many."""
    bits = tl.reshape(hits.to(tl.int32), (WORDS, 32)) << tl.arange(0, 32)[None, :]
    tl.store(words + slot * WORDS + tl.arange(0, WORDS), tl.sum(bits, 1))
    tl.store(counts + slot, tl.sum(hits.to(tl.int32), 0))


@kernel
def marked(words: tl.tensor, slot: tl.tensor) -> tl.tensor:
    """The elements of a tile, in 32 columns: where they are in it, which are hits, the rank of each among hits."""
    word = tl.load(words + slot * WORDS + tl.arange(0, WORDS))
    number = popcount(word)
    before = tl.cumsum(number, 0) - number
    column = tl.arange(0, 32)[None, :]
    below = word[:, None] & ((1 << column) - 1)
    places = tl.arange(0, WORDS)[:, None] * 32 + column
    return places, ((word[:, None] >> column) & 1) > 0, before[:, None] + popcount(below)


@kernel
def _select(
    x: tl.tensor,
    n: tl.int64,
    bar: tl.int64,
    start: tl.int64,
    stop: tl.int64,
    first: tl.int64,
    words: tl.tensor,
    counts: tl.tensor,
) -> None:
    tile = first + tl.program_id(0)
    if (tile + 1) * TILE <= n:
        _select_tile(x, n, bar, start, stop, first, words, counts, tile, True)
    else:
        _select_tile(x, n, bar, start, stop, first, words, counts, tile, False)


@kernel
def _select_tile(
    x: tl.tensor,
    n: tl.tensor,
    bar: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    first: tl.tensor,
    words: tl.tensor,
    counts: tl.tensor,
    tile: tl.tensor,
    full: tl.constexpr,
) -> None:
    offsets = tile * TILE + tl.arange(0, TILE)
    bits = magnitude(load_tile(x, offsets, n, full))
    hits = reached(bits, bar) & (offsets >= start) & (offsets < stop)
    mark(hits, tile - first, words, counts)


@kernel
def _accumulate(
    residual: tl.tensor,
    grad: tl.tensor,
    backup: tl.tensor,
    finite: tl.tensor,
    n: tl.int64,
    bar: tl.int64,
    start: tl.int64,
    stop: tl.int64,
    first: tl.int64,
    last: tl.int64,
    words: tl.tensor,
    counts: tl.tensor,
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
    residual: tl.tensor,
    grad: tl.tensor,
    backup: tl.tensor,
    finite: tl.tensor,
    n: tl.tensor,
    bar: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    words: tl.tensor,
    counts: tl.tensor,
    tile: tl.tensor,
    full: tl.constexpr,
) -> None:
    offsets = tile * TILE + tl.arange(0, TILE)
    before = load_tile(residual, offsets, n, full)
    after = before + widened(load_tile(grad, offsets, n, full)).to(tl.float32)
    store_tile(residual, offsets, after, n, full)
    if backup is not None:
        store_tile(backup, offsets, before.to(backup.dtype.element_ty), n, full)
    bits = magnitude(after)
    if finite is not None:
        refuse(finite, below_infinity(bits) == 0)
    if (tile >= first) & (tile < last):
        hits = reached(bits, bar) & (offsets >= start) & (offsets < stop)
        mark(hits, tile - first, words, counts)


@kernel
def _positions(words: tl.tensor, ends: tl.tensor, first: tl.int64, total: tl.int64, out: tl.tensor) -> None:
    slot = tl.program_id(0).to(tl.int64)
    begin = tl.load(ends + slot - 1, mask=slot > 0, other=0)
    if tl.load(ends + slot) > begin:
        places, hit, rank = marked(words, slot)
        tl.store(out + begin + rank, (first + slot) * TILE + places, mask=hit & (begin + rank < total))


class Hits:
    """Bits and counts that a pass over tiles writes, and the positions computed from them.

    `total` is the number of hits, if known; then the host does not wait. If it is too small, further hits are left
    out; if it is too large, missing positions are -1.
    """

    def __init__(self, count: int, like: Tensor, total: int | None = None) -> None:
        self.tiles = count
        self.total = total if count else 0
        self.words = torch.empty(count * WORDS.value, dtype=torch.int32, device=like.device)
        self.counts = torch.empty(count, dtype=torch.int32, device=like.device)

    def end(self) -> tuple[Tensor, Tensor]:
        """Where the hits of each tile end among all hits, and a vector for the positions of all.

        If the number of hits is not known, the host waits for the device here, and nowhere else.
        """
        ends = self.counts.cumsum(0)
        total = int(ends[-1]) if self.total is None else self.total
        return ends, torch.full((total,), -1, dtype=torch.int64, device=ends.device)

    def positions(self, first: int) -> Tensor:
        """Of all hits, in rising order; `first` is the number of the first tile."""
        ends, out = self.end()
        if len(out):
            _positions[(self.tiles,)](self.words, ends, first, len(out), out, **OPTIONS)
        return out


def _span(start: int, stop: int) -> tuple[int, int]:
    """The tiles that `[start, stop)` touches."""
    return (start // TILE_SIZE, tiles(stop)) if start < stop else (0, 0)


def select_above(x: Tensor, threshold: float, start: int, stop: int, count: int | None = None) -> Tensor:
    first, last = _span(start, stop)
    hits = Hits(last - first, x, count)
    if hits.tiles:
        bar = bar_of(threshold, x.dtype)
        _select[(hits.tiles,)](plain(x), len(x), bar, start, stop, first, hits.words, hits.counts, **OPTIONS)
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
            **OPTIONS,
        )
    return hits.positions(first)
