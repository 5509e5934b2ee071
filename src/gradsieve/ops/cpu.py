"""The kernels for CPUs: one thread, one pass, no full-size temporary.

Magnitudes are compared as integers: without its sign bit a float32 has the same order as its bits. That
vectorises, unlike a float comparison that must respect NaN. NaNs lie above infinity and are left out at the end. A
whole block is tested at once, by or-ing `bar - 1 - magnitude`, whose sign bit means "hit": Numba widens integers
unless each result is cast back to 32 bits. Only blocks with a hit are searched element by element.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from gradsieve.ops import reference
from gradsieve.ops.schema import BIN_SHIFT, BINS

_BLOCK = 64
MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
LARGEST = np.int32(0x7F7FFFFF)  # bits of the largest finite magnitude
TILE = 4096  # elements summed before they are searched: residual and gradient both fit the L1 cache
CHUNK = 1 << 16  # elements converted at a time if a gradient is not float32: stays in the cache

Array = npt.NDArray[Any]
F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile for this CPU on the first call, cache the machine code on disk, run without the GIL.

    Sums may be reordered so that they vectorise; the only sums are of zeros, to detect a NaN.
    """
    options: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc"}}
    try:
        return cast(F, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # no folder for it can be written: compiled again in every process
        return cast(F, numba.njit(**options)(function))


def _trailing_zeros_code(typing_context: Any, word: Any) -> tuple[Any, Any]:
    """The position of the lowest set bit: one instruction, for which Numba has no function."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint32(types.uint32), code


trailing_zeros: Any = intrinsic(_trailing_zeros_code)


@kernel
def select(bits: Array, bar: np.int32, start: int, stop: int, out: Array, count: int) -> tuple[int, int]:
    """Fill `out` from position `start` on; returns the new count, and where to continue when `out` is full."""
    below = np.int32(bar - 1)
    blocks = (stop - start) // _BLOCK
    for i in range(blocks):
        position = start + i * _BLOCK
        if count + _BLOCK > out.size:
            return count, position
        block = bits[position : position + _BLOCK]
        hit = np.int32(0)
        for j in range(_BLOCK):
            hit = np.int32(hit | np.int32(below - (block[j] & MAGNITUDE)))
        if hit < 0:
            for first in range(0, _BLOCK, 32):
                word = np.uint32(0)
                for j in range(32):
                    verdict = np.uint32(np.int32(below - (block[first + j] & MAGNITUDE))) >> np.uint32(31)
                    word = np.uint32(word | np.uint32(np.uint32(verdict) << np.uint32(j)))
                while word != 0:
                    place = first + np.int64(trailing_zeros(word))
                    out[count] = position + place
                    count += (block[place] & MAGNITUDE) <= _INFINITY
                    word = np.uint32(word & np.uint32(word - np.uint32(1)))
    position = start + blocks * _BLOCK
    if count + stop - position > out.size:
        return count, position
    for j in range(position, stop):
        magnitude = bits[j] & MAGNITUDE
        if magnitude >= bar and magnitude <= _INFINITY:
            out[count] = j
            count += 1
    return count, stop


@kernel
def _any_non_finite(bits: Array) -> bool:
    bad = np.int32(0)
    for j in range(bits.size):
        bad = np.int32(bad | np.int32(LARGEST - (bits[j] & MAGNITUDE)))
    return bool(bad < 0)


@kernel
def _accumulate(
    residual: Array, bits: Array, grad: Array, swap: bool, bar: np.int32, start: int, stop: int, out: Array
) -> tuple[int, int, bool]:
    """Add `grad` tile by tile, and search each tile's sums while they are in the cache.

    `bits` is `residual` viewed as integers; `swap` leaves the old residual in `grad`. Returns how many positions in
    `[start, stop)` were hits, where to continue selecting when `out` is full, and whether all sums were finite.
    """
    count = 0
    reached = start
    finite = True
    for first in range(0, residual.size, TILE):
        last = min(first + TILE, residual.size)
        r = residual[first:last]
        g = grad[first:last]
        zero = np.float32(0)  # times a finite number stays zero, times any other becomes NaN
        if swap:
            for j in range(r.size):
                old = r[j]
                r[j] = old + g[j]
                g[j] = old
                zero += r[j] * np.float32(0)
        else:
            for j in range(r.size):
                r[j] += g[j]
                zero += r[j] * np.float32(0)
        if zero != 0:
            finite = False
        if reached >= first and reached < min(last, stop):
            count, reached = select(bits, bar, reached, min(last, stop), out, count)
    return count, reached, finite


@kernel
def _histogram(bits: Array, counts: Array) -> None:
    for j in range(bits.size):
        counts[(bits[j] & MAGNITUDE) >> BIN_SHIFT] += 1


@kernel
def _gather_clear(x: Array, indices: Array, values: Array) -> bool:
    for j in range(indices.size):
        i = indices[j]
        if i < 0 or i >= x.size:
            return False
        values[j] = x[i]
    for j in range(indices.size):
        x[indices[j]] = 0
    return True


@kernel
def _scatter(out: Array, indices: Array, values: Array) -> bool:
    for j in range(out.size):
        out[j] = 0  # compiled to a call of memset, which takes less than half the time of `out.zero_()`
    for j in range(indices.size):
        i = indices[j]
        if i >= out.size:
            return False
        if i >= 0:
            out[i] = values[j]
    return True


def as_array(x: Tensor) -> Array:
    array: Array = x.detach().numpy()
    return array


def _bits(x: Tensor) -> Array:
    return as_array(x).view(np.int32)


def bar_of(threshold: float) -> np.int32:
    """The bits of the threshold, rounded to float32 as torch does when it compares a tensor with a number."""
    if math.isnan(threshold):
        return MAGNITUDE
    with np.errstate(over="ignore"):
        rounded = np.float32(threshold)
    return np.int32(0) if rounded <= 0 else rounded.view(np.int32)


class _Hits:
    """A buffer of positions, allocated for one hit in 64, that grows by half its size when it is full."""

    def __init__(self, looked_at: int) -> None:
        self.positions = np.empty(looked_at // 64 + 2 * _BLOCK, np.int64)
        self.count = 0

    def take(self, bits: Array, bar: np.int32, start: int, stop: int) -> None:
        while start < stop:
            self.count, start = select(bits, bar, start, stop, self.positions, self.count)
            if start < stop:
                self.positions.resize(self.positions.size * 3 // 2, refcheck=False)

    def tensor(self) -> Tensor:
        self.positions.resize(self.count, refcheck=False)
        return torch.from_numpy(self.positions)


def chunks(start: int, stop: int) -> Iterator[slice]:
    for first in range(start, stop, CHUNK):
        yield slice(first, min(first + CHUNK, stop))


def select_above(x: Tensor, threshold: float, start: int, stop: int, count: int | None = None) -> Tensor:
    if x.dtype != torch.float32:
        parts = [reference.select_above(x, threshold, part.start, part.stop) for part in chunks(start, stop)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
    hits = _Hits(stop - start)
    hits.take(_bits(x), bar_of(threshold), start, stop)
    return hits.tensor()


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
    sums, bits, bar, hits = as_array(residual), _bits(residual), bar_of(threshold), _Hits(stop - start)
    swap = backup is not None and backup.data_ptr() == grad.data_ptr()
    if grad.dtype == torch.float32 and (swap or backup is None):
        added = as_array(grad)
        hits.count, reached, clean = _accumulate(sums, bits, added, swap, bar, start, stop, hits.positions)
        hits.take(bits, bar, reached, stop)
    else:
        clean = True
        for part in chunks(0, residual.numel()):
            added = as_array(grad[part].to(torch.float32, copy=swap))
            if backup is not None:
                backup[part] = residual[part]
            _, _, ok = _accumulate(sums[part], bits[part], added, False, bar, 0, 0, hits.positions)
            clean = clean and ok
            hits.take(bits, bar, max(start, part.start), min(stop, part.stop))
    if finite is not None and not clean:
        finite.fill_(False)
    return hits.tensor()


def log_histogram(x: Tensor, start: int, stop: int) -> Tensor:
    counts = np.zeros(BINS, np.int64)
    _histogram(_bits(x)[start:stop], counts)
    return torch.from_numpy(counts)


def all_finite(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        return torch.tensor(all(bool(reference.all_finite(x[part])) for part in chunks(0, x.numel())))
    return torch.tensor(not _any_non_finite(_bits(x)))


def gather_clear_(x: Tensor, indices: Tensor) -> Tensor:
    values = torch.empty(indices.shape, dtype=x.dtype)
    if not _gather_clear(as_array(x), as_array(indices), as_array(values)):
        raise IndexError(f"indices must be in [0, {x.numel()}), got {_outside(indices, x)}")
    return values


def scatter_update_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    if out.dtype != torch.float32:
        return reference.scatter_update_(out, indices, values)
    if not _scatter(as_array(out), as_array(indices), as_array(values)):
        raise IndexError(f"indices must be below {out.numel()}, got {int(indices.max())}")
    return None


def _outside(indices: Tensor, x: Tensor) -> int:
    return int(indices[(indices < 0) | (indices >= x.numel())][0])


@functools.cache
def warm_up() -> None:
    """Call every kernel once: Numba compiles it on a machine's first call, and loads it on a process's first."""
    x, indices = torch.zeros(2 * _BLOCK, dtype=torch.float32), torch.arange(2)
    accumulate_select_(x, x.clone(), math.inf, 0, len(x))
    select_above(x, math.inf, 0, len(x))
    log_histogram(x, 0, len(x))
    all_finite(x)
    scatter_update_(x, indices, gather_clear_(x, indices))
