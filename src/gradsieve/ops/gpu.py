"""What the kernels for GPUs share, and those that need nothing else. Triton compiles them for CUDA and for ROCm.

A kernel works on tiles of `TILE` elements. All but the last tile of a vector are read without a mask, so that each
thread reads 16 bytes at a time. Magnitudes are compared as integers, as on CPUs: with its sign bit dropped a float
orders like its bits, and NaNs lie above infinity. bfloat16 comes as its bits (int16) and is widened by a shift.

Nothing here waits for the device. The three kernels whose output has a size that only the device knows
(`gpu_select`, `gpu_drift`) read one number, in `gpu_select.Hits.end`.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsieve.ops.schema import BIN_SHIFT, BINS

TILE_SIZE = 4096  # elements
WARPS = 8  # per program: on both vendors each thread has at least 8 elements of a tile, 16 bytes of the narrowest
PROGRAMS = 1024  # that walk over all tiles where each keeps a histogram of its own: 7 for each processor of an H100

TILE = tl.constexpr(TILE_SIZE)
WORDS = tl.constexpr(TILE_SIZE // 32)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE_64 = tl.constexpr(0x7FFFFFFFFFFFFFFF)
INFINITY_64 = tl.constexpr(0x7FF0000000000000)
ALL_BINS = tl.constexpr(BINS)
SHIFT = tl.constexpr(BIN_SHIFT)


def kernel(function: Callable[..., Any]) -> Any:
    """A Triton kernel; its integers are of 64 bits, and their values make no further variants of it."""
    parameters = inspect.signature(function).parameters.items()
    return triton.jit(
        function, do_not_specialize=[name for name, each in parameters if each.annotation is tl.int64]
    )


@kernel
def load_tile(pointer: Any, offsets: Any, stop: Any, FULL: tl.constexpr) -> Any:
    """Elements at `offsets`; zero from `stop` on, unless the tile is known to be full."""
    if FULL:
        return tl.load(pointer + offsets)
    return tl.load(pointer + offsets, mask=offsets < stop, other=0)


@kernel
def store_tile(pointer: Any, offsets: Any, values: Any, stop: Any, FULL: tl.constexpr) -> None:
    if FULL:
        tl.store(pointer + offsets, values)
    else:
        tl.store(pointer + offsets, values, mask=offsets < stop)


@kernel
def widened(x: Any) -> Any:
    """As float32, or as float64 if it is that already."""
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if x.dtype == tl.float64:
        return x
    return x.to(tl.float32)


@kernel
def rounded(x: Any, LIKE: tl.constexpr) -> Any:
    """A float32 or float64 as `LIKE`, to the nearest, to even of two; narrow types by way of float32, as in torch."""
    if LIKE == tl.int16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40  # rounding up could turn a NaN into a number
        return tl.where((bits & MAGNITUDE) > INFINITY, quiet, nearest).to(tl.int16)
    if LIKE == tl.float16:
        return x.to(tl.float32).to(tl.float16)
    return x.to(LIKE)


@kernel
def magnitude(x: Any) -> Any:
    """The bits of |x|."""
    x = widened(x)
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True) & MAGNITUDE_64
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@kernel
def infinity(bits: Any) -> Any:
    """The bits of infinity in the type that these are the bits of."""
    if bits.dtype == tl.int64:
        return INFINITY_64
    return INFINITY


@kernel
def popcount(word: Any) -> Any:
    """How many bits of an int32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0x3F


@kernel
def _all_finite(x: Any, n: tl.int64, finite: Any) -> None:
    tile = tl.program_id(0).to(tl.int64)
    if (tile + 1) * TILE <= n:
        _all_finite_tile(x, n, finite, tile, True)
    else:
        _all_finite_tile(x, n, finite, tile, False)


@kernel
def _all_finite_tile(x: Any, n: Any, finite: Any, tile: Any, FULL: tl.constexpr) -> None:
    bits = magnitude(load_tile(x, tile * TILE + tl.arange(0, TILE), n, FULL))
    bad = tl.max((bits >= infinity(bits)).to(tl.int32), 0)
    tl.store(finite, 0, mask=bad > 0)


@kernel
def _histogram(
    x: Any, n: tl.int64, start: tl.int64, stop: tl.int64, first: tl.int64, last: tl.int64, counts: Any
) -> None:
    """Each program counts in bins of its own; sums of integers are the same in every order."""
    own = tl.zeros((ALL_BINS,), tl.int32)
    for tile in range(first + tl.program_id(0), last, tl.num_programs(0)):
        offsets = tile * TILE + tl.arange(0, TILE)
        if (tile + 1) * TILE <= n:
            own += binned(load_tile(x, offsets, n, True), (offsets >= start) & (offsets < stop))
        else:
            own += binned(load_tile(x, offsets, n, False), (offsets >= start) & (offsets < stop))
    add_counts(counts, own)


@kernel
def binned(x: Any, inside: Any) -> Any:
    """The histogram of a tile. What is not inside is counted as zero and taken away again."""
    bins = tl.where(inside, magnitude(x) >> SHIFT, 0)
    outside = TILE - tl.sum(inside.to(tl.int32), 0)
    return tl.histogram(bins, ALL_BINS) - tl.where(tl.arange(0, ALL_BINS) == 0, outside, 0)


@kernel
def add_counts(counts: Any, own: Any) -> None:
    tl.atomic_add(counts + tl.arange(0, ALL_BINS), own.to(tl.int64), mask=own > 0)


@kernel
def _gather(x: Any, n: tl.int64, indices: Any, count: tl.int64, values: Any, inside: Any) -> None:
    j = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    i = tl.load(indices + j, mask=j < count, other=0)
    known = (i >= 0) & (i < n)
    tl.store(values + j, tl.load(x + i, mask=(j < count) & known, other=0), mask=j < count)
    refuse(inside, (j < count) & ~known)


@kernel
def _scatter(out: Any, n: tl.int64, indices: Any, count: tl.int64, values: Any, inside: Any) -> None:
    """Without `values` zeros."""
    j = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    i = tl.load(indices + j, mask=j < count, other=0)
    known = (i >= 0) & (i < n)
    if values is None:
        tl.store(out + i, tl.zeros((TILE,), out.dtype.element_ty), mask=(j < count) & known)
    else:
        value = rounded(widened(tl.load(values + j, mask=j < count, other=0)), out.dtype.element_ty)
        tl.store(out + i, value, mask=(j < count) & known)
        refuse(inside, (j < count) & ~known)


@kernel
def refuse(good: Any, bad: Any) -> None:
    """Clear a flag if anything is bad."""
    tl.store(good, 0, mask=tl.max(bad.to(tl.int32), 0) > 0)


def tiles(count: int) -> int:
    return triton.cdiv(count, TILE_SIZE)


def plain(x: Tensor) -> Tensor:
    """Seen as a type that kernels know: bfloat16 as int16, bool as uint8."""
    seen_as = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(x.dtype)
    return x if seen_as is None else x.view(seen_as)


def flag(like: Tensor) -> Tensor:
    """True until a kernel clears it."""
    return torch.ones((), dtype=torch.bool, device=like.device)


def bar_of(threshold: float, dtype: torch.dtype) -> int:
    """The bits of a threshold, rounded as torch does when it compares a tensor with a number; NaN lies above all."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if math.isnan(threshold):
        return MAGNITUDE_64.value if wide == torch.float64 else MAGNITUDE.value
    rounded_ = torch.tensor(threshold, dtype=torch.float64).to(dtype).to(wide).clamp_(min=0)
    return int(rounded_.view(torch.int64 if wide == torch.float64 else torch.int32))


def check_inside(inside: Tensor, n: int) -> None:
    """Positions come from other workers. A wrong one was not used; it fails here as in torch's own indexing, late."""
    torch._assert_async(inside, f"indices must be in [0, {n}), got others")


def all_finite(x: Tensor) -> Tensor:
    finite = flag(x)
    if len(x):
        _all_finite[(tiles(len(x)),)](plain(x), len(x), plain(finite), num_warps=WARPS)
    return finite


def log_histogram(x: Tensor, start: int, stop: int) -> Tensor:
    counts = torch.zeros(BINS, dtype=torch.int64, device=x.device)
    if start < stop:
        first, last = start // TILE_SIZE, tiles(stop)
        grid = (min(last - first, PROGRAMS),)
        _histogram[grid](x, len(x), start, stop, first, last, counts, num_warps=WARPS)
    return counts


def gather_clear_(x: Tensor, indices: Tensor) -> Tensor:
    """Read all before anything is cleared: an index may occur twice."""
    values = torch.empty(indices.shape, dtype=x.dtype, device=x.device)
    if count := indices.numel():
        inside, grid = flag(x), (tiles(count),)
        _gather[grid](plain(x), len(x), indices, count, plain(values), plain(inside), num_warps=WARPS)
        _scatter[grid](plain(x), len(x), indices, count, None, None, num_warps=WARPS)
        check_inside(inside, len(x))
    return values


def scatter_update_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    out.zero_()
    if count := indices.numel():
        inside = flag(out)
        _scatter[(tiles(count),)](
            plain(out), len(out), indices, count, plain(values), plain(inside), num_warps=WARPS
        )
        check_inside(inside, len(out))
