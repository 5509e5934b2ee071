"""Drift on CPUs: subtract, compare and count in one pass, without a vector of differences."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradsieve.ops import reference
from gradsieve.ops.cpu import LARGEST, MAGNITUDE, TILE, Array, as_array, bar_of, chunks, kernel, select
from gradsieve.ops.cpu_pieces import addresses, edges, floats_at, plain
from gradsieve.ops.schema import BIN_SHIFT


@kernel
def _drift(
    shared: Array,
    weights: Array,
    second: Array,
    borders: Array,
    tile: Array,
    bits: Array,
    bar: np.int32,
    start: int,
    stop: int,
    wanted: bool,
    counts: Array,
    positions: Array,
    values: Array,
    count: int,
) -> tuple[int, int, int]:
    """Subtract tile by tile, and search each tile while it is in the cache; `bits` is `tile` viewed as integers.

    `weights` and `second` are addresses of pieces between `borders`; unless `second` is empty, differences are
    multiplied by its fourth root. Returns the number of hits, where to continue when the output is full, and the
    first position whose difference is not finite, or -1. Such a difference counts as zero.
    """
    bad = -1
    piece = np.searchsorted(borders, start, "right") - 1
    first = start
    while first < stop:
        while borders[piece + 1] <= first:
            piece += 1
        begin, length = borders[piece], borders[piece + 1] - borders[piece]
        size = min(TILE, borders[piece + 1] - first, stop - first)
        if count + size > positions.size:
            return count, first, bad
        s = shared[first : first + size]
        w = floats_at(weights[piece], length)[first - begin : first - begin + size]
        zero = np.float32(0)
        for j in range(size):
            tile[j] = s[j] - w[j]
        if second.size and second[piece]:
            v = floats_at(second[piece], length)[first - begin : first - begin + size]
            for j in range(size):
                tile[j] *= np.sqrt(np.sqrt(v[j]))
        elif second.size:
            for j in range(size):
                tile[j] *= np.float32(0)
        for j in range(size):
            zero += tile[j] * np.float32(0)
        if zero != 0:
            for j in range(size):
                if (bits[j] & MAGNITUDE) > LARGEST:
                    tile[j] = 0
                    if bad < 0:
                        bad = first + j
        if wanted:
            for j in range(size):
                counts[(bits[j] & MAGNITUDE) >> BIN_SHIFT] += 1
        before = count
        count, _ = select(bits, bar, 0, size, positions, count)
        for j in range(before, count):
            values[j] = tile[positions[j]]
            positions[j] += first
        first += size
    return count, stop, bad


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
    found = _Drifted(stop - start, threshold, counts)
    if shared.dtype == torch.float32 and plain(weights) and plain(second):
        found.take(shared, addresses(weights), addresses(second), edges(weights), start, stop)
        return found.tensors()
    for number, (first, piece) in enumerate(zip(edges(weights).tolist(), weights, strict=False)):
        inside = slice(max(start - first, 0), max(min(stop - first, len(piece)), 0))
        for part in chunks(inside.start, max(inside.start, inside.stop)):
            # Converted here, so that there is nothing to subtract there.
            drift = reference.drift(shared[first + part.start : first + part.stop], piece[part])
            scale = [second[number][part].float()] if second else []
            zeros = torch.zeros_like(drift)
            borders = np.array([0, len(drift)])
            found.take(drift, addresses([zeros]), addresses(scale), borders, 0, len(drift), first + part.start)
    return found.tensors()


class _Drifted:
    """Positions and values of hits, in buffers that grow like those of `_Hits`."""

    def __init__(self, looked_at: int, threshold: float, counts: Tensor | None) -> None:
        self.bar, self.wanted = bar_of(threshold), counts is not None
        self.counts = np.empty(0, np.int64) if counts is None else as_array(counts)
        self.tile = np.empty(TILE, np.float32)
        self.positions = np.empty(looked_at // 64 + 2 * TILE, np.int64)
        self.values = np.empty(self.positions.size, np.float32)
        self.count, self.bad = 0, -1

    def take(
        self, shared: Tensor, weights: Array, second: Array, borders: Array, place: int, stop: int, first: int = 0
    ) -> None:
        """Search a part of `shared - weights`; element 0 of `shared` is at position `first`."""
        bits, looked_at = self.tile.view(np.int32), as_array(shared)
        while place < stop:
            before, output = self.count, (self.positions, self.values, self.count)
            pieces, how = (looked_at, weights, second, borders), (self.tile, bits, self.bar)
            self.count, place, bad = _drift(*pieces, *how, place, stop, self.wanted, self.counts, *output)
            self.positions[before : self.count] += first
            self.bad = first + bad if self.bad < 0 <= bad else self.bad
            if place < stop:
                self.positions.resize(self.positions.size * 3 // 2, refcheck=False)
                self.values.resize(self.positions.size, refcheck=False)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        self.positions.resize(self.count, refcheck=False)
        self.values.resize(self.count, refcheck=False)
        return torch.from_numpy(self.positions), torch.from_numpy(self.values), torch.tensor(self.bad)


@functools.cache
def warm_up() -> None:
    """Compile or load the kernel: see `cpu.warm_up`."""
    x = torch.zeros(128, dtype=torch.float32)
    drift_select(x, [x.clone()], math.inf, 0, len(x), second=[])
