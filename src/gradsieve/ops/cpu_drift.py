"""The kernel that looks at drift on CPUs: subtract, judge and count in one pass; no vector of differences."""

import functools
import math

import numpy as np
import torch
from torch import Tensor

from gradsieve.ops import reference
from gradsieve.ops.cpu import CHUNK, LARGEST, MAGNITUDE, TILE, Array, as_array, bar_of, chunks, kernel, select
from gradsieve.ops.schema import BIN_SHIFT, LIBRARY


@kernel
def _drift(
    shared: Array,
    weights: Array,
    second: Array,
    tile: Array,
    bits: Array,
    bar: np.int32,
    start: int,
    wanted: bool,
    counts: Array,
    positions: Array,
    values: Array,
    count: int,
) -> tuple[int, int, int]:
    """Subtract tile by tile, and look at each tile while it is in the cache; `bits` is `tile` seen as integers.

    `second` is empty, or differences are multiplied by its fourth root. Returns how many hits there are, where to
    go on when the output is full, and where the first difference is that is not finite, or -1. Such a difference
    counts as zero.
    """
    stop = shared.size
    bad = -1
    for first in range(start, stop, TILE):
        size = min(TILE, stop - first)
        if count + size > positions.size:
            return count, first, bad
        s = shared[first : first + size]
        w = weights[first : first + size]
        zero = np.float32(0)
        for j in range(size):
            tile[j] = s[j] - w[j]
        if second.size:
            v = second[first : first + size]
            for j in range(size):
                tile[j] *= np.sqrt(np.sqrt(v[j]))
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
    return count, stop, bad


def drift_select(
    shared: Tensor,
    weights: Tensor,
    threshold: float,
    start: int,
    stop: int,
    *,
    second: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    found = _Drifted(stop - start, threshold, counts)
    plain = shared.dtype == weights.dtype == torch.float32
    zeros = np.zeros(0 if plain else min(CHUNK, stop - start), np.float32)
    for part in [slice(start, stop)] if plain else chunks(start, stop):
        scale = np.empty(0, np.float32) if second is None else as_array(second[part].float())
        if plain:
            found.take(as_array(shared[part]), as_array(weights[part]), scale, part.start)
        else:
            found.take(as_array(reference.drift(shared[part], weights[part])), zeros, scale, part.start)
    return found.tensors()


class _Drifted:
    """Positions and values of what drifted far, in buffers that grow as those of `_Hits`."""

    def __init__(self, looked_at: int, threshold: float, counts: Tensor | None) -> None:
        self.bar, self.wanted = bar_of(threshold), counts is not None
        self.counts = np.empty(0, np.int64) if counts is None else as_array(counts)
        self.tile = np.empty(TILE, np.float32)
        self.positions = np.empty(looked_at // 64 + 2 * TILE, np.int64)
        self.values = np.empty(self.positions.size, np.float32)
        self.count, self.bad = 0, -1

    def take(self, shared: Array, weights: Array, second: Array, first: int) -> None:
        """Look at all of `shared - weights`, whose first element is at position `first`."""
        place, bits = 0, self.tile.view(np.int32)
        while place < shared.size:
            before, output = self.count, (self.positions, self.values, self.count)
            self.count, place, bad = _drift(
                shared, weights, second, self.tile, bits, self.bar, place, self.wanted, self.counts, *output
            )
            self.positions[before : self.count] += first
            self.bad = first + bad if self.bad < 0 <= bad else self.bad
            if place < shared.size:
                self.positions.resize(self.positions.size * 3 // 2, refcheck=False)
                self.values.resize(self.positions.size, refcheck=False)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        self.positions.resize(self.count, refcheck=False)
        self.values.resize(self.count, refcheck=False)
        return torch.from_numpy(self.positions), torch.from_numpy(self.values), torch.tensor(self.bad)


@functools.cache
def warm_up() -> None:
    """Compile or load the kernel: see `cpu.warm_up`."""
    x = torch.zeros(128)
    drift_select(x, x.clone(), math.inf, 0, len(x))


LIBRARY.impl("drift_select", drift_select, "CPU")
