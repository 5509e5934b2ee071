"""Common parts of the kernels for GPUs, and gather and scatter. Triton compiles them for CUDA and for ROCm.

A kernel works on tiles of `TILE` elements. All but the last tile of a vector are read without a mask, so that each
thread reads 16 bytes at a time. Magnitudes are compared as integers, as on CPUs: without its sign bit a float has
the same order as its bits, and NaNs lie above infinity. bfloat16 is passed as its bits (int16) and widened by a
shift.

The host waits only in three ops, whose output size only the device knows: `select_above`, `accumulate_select_` and
`drift_select` read one number, in `gpu_select.Hits.end`.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_SIZE = 4096  # elements
# With 8 warps each thread has at least 8 elements of a tile, on both vendors: 16 bytes of the narrowest type. No
# element is read by two threads, which a kernel that overwrites its input must not do. Sums are never contracted.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
FEW_SIZE = 1024  # indices per program, in kernels that need many registers for each

TILE = tl.constexpr(TILE_SIZE)
WORDS = tl.constexpr(TILE_SIZE // 32)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
MAGNITUDE_64 = tl.constexpr(0x7FFFFFFFFFFFFFFF)
INFINITY_64 = tl.constexpr(0x7FF0000000000000)
FEW = tl.constexpr(FEW_SIZE)


def kernel(function: Callable[..., Any]) -> Any:
    """A Triton kernel; its integers have 64 bits, and their values do not trigger further compilations."""
    parameters = inspect.signature(function).parameters.items()
    return triton.jit(
        function, do_not_specialize=[name for name, each in parameters if each.annotation is tl.int64]
    )


@kernel
def load_tile(pointer: tl.tensor, offsets: tl.tensor, stop: tl.tensor, full: tl.constexpr) -> tl.tensor:
    """Elements at `offsets`; zero from `stop` on, unless the tile is known to be full."""
    if full:
        return tl.load(pointer + offsets)
    return tl.load(pointer + offsets, mask=offsets < stop, other=0)


@kernel
def store_tile(
    pointer: tl.tensor, offsets: tl.tensor, values: tl.tensor, stop: tl.tensor, full: tl.constexpr
) -> None:
    if full:
        tl.store(pointer + offsets, values)
    else:
        tl.store(pointer + offsets, values, mask=offsets < stop)


@kernel
def widened(x: tl.tensor) -> tl.tensor:
    """As float32; float64 stays as it is."""
    if x.dtype == tl.int16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        x = x.to(tl.float32)
    return x


@kernel
def rounded(x: tl.tensor, like: tl.constexpr) -> tl.tensor:
    """A float32 or float64 as `like`, to the nearest even; narrow types by way of float32, as in torch."""
    if like == tl.int16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40  # rounding up could turn a NaN into a number
        x = tl.where((bits & MAGNITUDE) > INFINITY, quiet, nearest).to(tl.int16)
    elif like == tl.float16:
        x = x.to(tl.float32).to(tl.float16)
    else:
        x = x.to(like)
    return x


@kernel
def magnitude(x: tl.tensor) -> tl.tensor:
    """The bits of |x|."""
    x = widened(x)
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & MAGNITUDE_64
    else:
        bits = x.to(tl.int32, bitcast=True) & MAGNITUDE
    return bits


@kernel
def below_infinity(bits: tl.tensor) -> tl.tensor:
    """Whether these are the bits of a finite magnitude."""
    if bits.dtype == tl.int64:
        return bits < INFINITY_64
    else:  # noqa: RET505
        return bits < INFINITY


@kernel
def reached(bits: tl.tensor, bar: tl.tensor) -> tl.tensor:
    """Whether magnitudes are at least a threshold, by their bits; a NaN never is."""
    if bits.dtype == tl.int64:
        return (bits >= bar) & (bits <= INFINITY_64)
    else:  # noqa: RET505
        return (bits >= bar.to(tl.int32)) & (bits <= INFINITY)


@kernel
def popcount(word: tl.tensor) -> tl.tensor:
    """How many bits of an int32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 0x3F


@kernel
def _all_finite(x: tl.tensor, n: tl.int64, finite: tl.tensor) -> None:
    tile = tl.program_id(0).to(tl.int64)
    if (tile + 1) * TILE <= n:
        _all_finite_tile(x, n, finite, tile, True)
    else:
        _all_finite_tile(x, n, finite, tile, False)


@kernel
def _all_finite_tile(x: tl.tensor, n: tl.tensor, finite: tl.tensor, tile: tl.tensor, full: tl.constexpr) -> None:
    bits = magnitude(load_tile(x, tile * TILE + tl.arange(0, TILE), n, full))
    refuse(finite, below_infinity(bits) == 0)


@kernel
def _gather(
    x: tl.tensor,
    n: tl.int64,
    indices: tl.tensor,
    count: tl.int64,
    values: tl.tensor,
    inside: tl.tensor,
) -> None:
    j, i, there = _indices(indices, count, n, inside, False)
    tl.store(values + j, tl.load(x + i, mask=there, other=0), mask=j < count)


@kernel
def _clear(x: tl.tensor, n: tl.int64, indices: tl.tensor, count: tl.int64, inside: tl.tensor) -> None:
    _, i, there = _indices(indices, count, n, inside, False)
    tl.store(x + i, tl.zeros((FEW,), x.dtype.element_ty), mask=there)


@kernel
def _scatter(
    out: tl.tensor,
    n: tl.int64,
    indices: tl.tensor,
    count: tl.int64,
    values: tl.tensor,
    inside: tl.tensor,
) -> None:
    """Negative indices are skipped."""
    j, i, there = _indices(indices, count, n, inside, True)
    value = widened(tl.load(values + j, mask=there, other=0))
    tl.store(out + i, rounded(value, out.dtype.element_ty), mask=there)


@kernel
def _indices(
    indices: tl.tensor, count: tl.tensor, n: tl.tensor, inside: tl.tensor, skip: tl.constexpr
) -> tl.tensor:
    """This program's indices: which numbers they have, they themselves, and whether they can be used."""
    j = tl.program_id(0).to(tl.int64) * FEW + tl.arange(0, FEW)
    i = tl.load(indices + j, mask=j < count, other=0)
    there = (j < count) & (i >= 0) & (i < n)
    if skip:
        refuse(inside, (j < count) & (i >= n))
    else:
        refuse(inside, (j < count) & (there == 0))
    return j, i, there


@kernel
def refuse(good: tl.tensor, bad: tl.tensor) -> None:
    """Clear a flag if any element is bad."""
    tl.store(good, 0, mask=tl.max(bad.to(tl.int32), 0) > 0)


def tiles(count: int) -> int:
    return -(-count // TILE_SIZE)


def few(count: int) -> tuple[int]:
    """Number of programs for this number of indices."""
    return (triton.cdiv(count, FEW_SIZE),)


def plain(x: Tensor) -> Tensor:
    """Viewed as a type that kernels support: bfloat16 as int16, bool as uint8."""
    seen_as = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(x.dtype)
    return x if seen_as is None else x.view(seen_as)


def flag(like: Tensor) -> Tensor:
    """True until a kernel clears it."""
    return torch.ones((), dtype=torch.bool, device=like.device)


def bar_of(threshold: float, dtype: torch.dtype) -> int:
    """The bits of a threshold, rounded as torch does for a comparison; those of NaN lie above all others."""
    if dtype == torch.float64:
        bits = MAGNITUDE_64.value if math.isnan(threshold) else np.float64(threshold).view(np.int64)
        return max(int(bits), 0)
    if math.isnan(threshold):
        return int(MAGNITUDE.value)
    with np.errstate(over="ignore"):
        single = np.float32(np.float16(np.float32(threshold))) if dtype == torch.float16 else np.float32(threshold)
    bits = int(single.view(np.int32))
    if dtype == torch.bfloat16:
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return max(bits, 0)


def check_inside(inside: Tensor, n: int) -> None:
    """Fail if an index was wrong: late and on the device, like torch's own indexing. No kernel has used it."""
    torch._assert_async(inside, f"indices must be in [0, {n}), got others")


def all_finite(x: Tensor) -> Tensor:
    finite = flag(x)
    if len(x):
        _all_finite[(tiles(len(x)),)](plain(x), len(x), plain(finite), **OPTIONS)
    return finite


def gather_clear_(x: Tensor, indices: Tensor) -> Tensor:
    """Read all before anything is cleared: an index may occur twice."""
    values = torch.empty(indices.shape, dtype=x.dtype, device=x.device)
    if count := indices.numel():
        inside = flag(x)
        which = (len(x), indices, count)
        _gather[few(count)](plain(x), *which, plain(values), plain(inside), **OPTIONS)
        _clear[few(count)](plain(x), *which, plain(inside), **OPTIONS)
        check_inside(inside, len(x))
    return values


def scatter_update_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    out.zero_()
    if count := indices.numel():
        inside = flag(out)
        _scatter[few(count)](plain(out), len(out), indices, count, plain(values), plain(inside), **OPTIONS)
        check_inside(inside, len(out))
