"""Drift on GPUs: subtract, compare and count in one pass over pieces, without a vector of differences.

Each piece is cut into tiles, and a record of each tile holds its place. All tiles with one type of weights and
second moments are searched by one launch; most models have one type. Values of hits are recomputed when positions
are written, from the few elements that are hits.
"""

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gradsieve.ops.gpu import (
    INFINITY,
    OPTIONS,
    TILE,
    TILE_SIZE,
    bar_of,
    kernel,
    load_tile,
    magnitude,
    reached,
    rounded,
    widened,
)
from gradsieve.ops.gpu_histogram import PROGRAMS, Bins, add_up, counted, own_bins
from gradsieve.ops.gpu_pieces import TABLES, Layout, layout, to_device
from gradsieve.ops.gpu_select import Hits, mark, marked

TYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.int16,
}
FIELDS_COUNT = 5  # of a record: index of the tile, its first position, its size, two addresses
FIELDS = tl.constexpr(FIELDS_COUNT)
Kind = tuple[torch.dtype, torch.dtype | None]  # of weights and second moments


@dataclass(frozen=True)
class Records:
    """All tiles of one kind: their records on the device, and their indices among all tiles."""

    kind: Kind
    rows: Tensor
    numbers: Sequence[int]
    aligned: bool

    def within(self, first: int, last: int) -> tuple[int, int]:
        """The records of tiles whose numbers are in `[first, last)`."""
        return bisect_left(self.numbers, first), bisect_left(self.numbers, last)


@dataclass(frozen=True)
class Tiling:
    """The tiles of all pieces, in order and by kind."""

    starts: Sequence[int]
    kinds: Sequence[Records]

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """The numbers of the tiles that `[start, stop)` touches: the first, and one past the last."""
        return (bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop)) if start < stop else (0, 0)


@functools.lru_cache(TABLES)
def _tiling(weights: Layout, second: Layout, device: torch.device) -> Tiling:
    starts: list[int] = []
    rows: dict[Kind, list[tuple[int, ...]]] = {}
    begin = 0
    usual = next((moment[2] for moment in second if moment[1]), torch.float32) if second else None
    for number, (address, size, dtype) in enumerate(weights):
        place, length, other = second[number] if second else (0, 0, None)
        kind = (dtype, other if length else usual)
        for offset in range(0, size, TILE_SIZE):
            moved = place + offset * other.itemsize if length and other is not None else 0
            count = min(TILE_SIZE, size - offset)
            row = (len(starts), begin + offset, count, address + offset * dtype.itemsize, moved)
            rows.setdefault(kind, []).append(row)
            starts.append(begin + offset)
        begin += size
    records = [
        Records(kind, to_device(each, device), [row[0] for row in each], all(map(_aligned, each)))
        for kind, each in rows.items()
    ]
    return Tiling(starts, records)


def _aligned(row: tuple[int, ...]) -> bool:
    _, position, _, weights, second = row
    return position % 4 == 0 and weights % 16 == 0 and second % 16 == 0


@kernel
def _difference(shared: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """At the precision of the weights, as float32."""
    if weight.dtype == tl.float64:
        drift = (shared.to(tl.float64) - weight).to(tl.float32)
    else:
        drift = widened(rounded(shared, weight.dtype)) - widened(weight)
    return drift


@kernel
def _record(records: tl.tensor, number: tl.tensor, weight_type: tl.constexpr, aligned: tl.constexpr) -> tl.tensor:
    """Number, first position, size, weights and address of second moments of a tile."""
    record = records + number * FIELDS
    position = tl.load(record + 1)
    weights = tl.load(record + 3).to(tl.pointer_type(weight_type))
    if aligned:
        position, weights = tl.multiple_of(position, 4), tl.multiple_of(weights, 16)
    return tl.load(record), position, tl.load(record + 2), weights, tl.load(record + 4)


@kernel
def _scaled(drift: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Times the fourth root of second moments."""
    return drift * tl.sqrt_rn(tl.sqrt_rn(widened(second).to(tl.float32)))


@kernel
def _drift_of(
    shared: tl.tensor,
    position: tl.tensor,
    size: tl.tensor,
    weights: tl.tensor,
    second: tl.tensor,
    second_type: tl.constexpr,
    aligned: tl.constexpr,
    full: tl.constexpr,
) -> tl.tensor:
    place = tl.arange(0, TILE)
    drift = _difference(load_tile(shared + position, place, size, full), load_tile(weights, place, size, full))
    if second_type is not None:
        if second != 0:
            moments = second.to(tl.pointer_type(second_type))
            if aligned:
                moments = tl.multiple_of(moments, 16)
            drift = _scaled(drift, load_tile(moments, place, size, full))
        else:
            drift = drift * 0.0
    return drift


@kernel
def _look(
    shared: tl.tensor,
    records: tl.tensor,
    begin: tl.int64,
    end: tl.int64,
    first: tl.int64,
    bar: tl.int64,
    start: tl.int64,
    stop: tl.int64,
    words: tl.tensor,
    counts: tl.tensor,
    bins: tl.tensor,
    in_block: tl.constexpr,
    bad: tl.tensor,
    weight_type: tl.constexpr,
    second_type: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    """`bins` is increased by a histogram, if given; `bad` becomes the first position that is not finite."""
    own = own_bins(in_block)
    for number in range(begin + tl.program_id(0), end, tl.num_programs(0)):
        slot, position, size, weights, second = _record(records, number, weight_type, aligned)
        if size == TILE:
            drift = _drift_of(shared, position, size, weights, second, second_type, aligned, True)
        else:
            drift = _drift_of(shared, position, size, weights, second, second_type, aligned, False)
        place = tl.arange(0, TILE)
        inside = (place < size) & (position + place >= start) & (position + place < stop)
        wrong = inside & (magnitude(drift) >= INFINITY)
        lowest = tl.min(tl.where(wrong, place, TILE), 0)
        tl.atomic_min(
            bad.to(tl.pointer_type(tl.uint64)), (position + lowest).to(tl.uint64), mask=lowest < TILE, sem="relaxed"
        )
        drift = tl.where(wrong, 0.0, drift)
        if words is not None:
            mark(inside & reached(magnitude(drift), bar), slot - first, words, counts)
        if bins is not None:
            own = counted(own, bins, drift, inside, in_block)
    if bins is not None:
        add_up(own, bins, in_block)


@kernel
def _write(
    shared: tl.tensor,
    records: tl.tensor,
    begin: tl.int64,
    first: tl.int64,
    words: tl.tensor,
    ends: tl.tensor,
    total: tl.int64,
    positions: tl.tensor,
    values: tl.tensor,
    weight_type: tl.constexpr,
    second_type: tl.constexpr,
) -> None:
    slot, position, _, weights, second = _record(records, begin + tl.program_id(0), weight_type, False)
    slot -= first
    before = tl.load(ends + slot - 1, mask=slot > 0, other=0)
    if tl.load(ends + slot) > before:
        places, hit, rank = marked(words, slot)
        hit = hit & (before + rank < total)
        there = shared + position + places
        drift = _difference(tl.load(there, mask=hit, other=0), tl.load(weights + places, mask=hit, other=0))
        if second_type is not None:
            if second != 0:
                moments = second.to(tl.pointer_type(second_type)) + places
                drift = _scaled(drift, tl.load(moments, mask=hit, other=0))
            else:
                drift = drift * 0.0
        drift = tl.where(magnitude(drift) >= INFINITY, 0.0, drift)
        tl.store(positions + before + rank, position + places, mask=hit)
        tl.store(values + before + rank, drift, mask=hit)


def drift_select(
    shared: Tensor,
    weights: Sequence[Tensor],
    threshold: float,
    start: int,
    stop: int,
    *,
    second: Sequence[Tensor],
    counts: Tensor | None = None,
    count: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    tiling = _tiling(layout(weights), layout(second), shared.device)
    first, last = tiling.within(start, stop)
    hits = Hits(0 if count == 0 else last - first, shared, count)
    bins = None if counts is None else Bins(counts)
    bad = torch.full((), -1, dtype=torch.int64, device=shared.device)  # as an unsigned integer the largest
    parts = [(each, *each.within(first, last)) for each in tiling.kinds]
    for each, begin, end in parts:
        if begin < end:
            _look[(min(end - begin, PROGRAMS),)](
                shared,
                each.rows,
                begin,
                end,
                first,
                bar_of(threshold, torch.float32),
                start,
                stop,
                hits.words if hits.tiles else None,
                hits.counts,
                bins and bins.rows,
                bins and bins.in_block,
                bad,
                *_types(each.kind),
                each.aligned,
                **(OPTIONS if bins is None else bins.options),
            )
    if bins is not None:
        bins.end()
    ends, positions = hits.end()
    values = torch.zeros(positions.shape, dtype=torch.float32, device=shared.device)
    for each, begin, end in parts:
        if len(positions) and begin < end:
            output = (ends, len(positions), positions, values)
            _write[(end - begin,)](
                shared, each.rows, begin, first, hits.words, *output, *_types(each.kind), **OPTIONS
            )
    return positions, values, bad


def _types(kind: Kind) -> tuple[Any, Any]:
    return TYPES[kind[0]], None if kind[1] is None else TYPES[kind[1]]
