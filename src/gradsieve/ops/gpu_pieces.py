"""A vector in pieces, on GPUs: kernels find the pieces in a table of addresses.

Tables depend only on addresses, sizes and types. They are cached, as parameters stay where they are, so a step
copies nothing to the device.
"""

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gradsieve.ops.gpu import FEW, OPTIONS, check_inside, few, flag, kernel, plain, refuse, rounded, widened
from gradsieve.ops.schema import wide_type

KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
TABLES = 64  # in the cache: far more than there are different lists of pieces in a training run
Layout = tuple[tuple[int, int, torch.dtype], ...]  # address, size and type of each piece


def layout(pieces: Sequence[Tensor]) -> Layout:
    return tuple((piece.data_ptr(), piece.numel(), piece.dtype) for piece in pieces)


def to_device(rows: Sequence[Any], device: torch.device) -> Tensor:
    """Integers as a tensor on a device; the host does not wait for the copy."""
    made = torch.tensor(rows, dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


@functools.lru_cache(TABLES)
def _table(pieces: Layout, device: torch.device) -> Tensor:
    """Where each piece begins in the vector and in memory, and the kind of its elements; three rows."""
    sizes = [size for _, size, _ in pieces]
    begins = [0, *accumulate(sizes)][:-1]
    return to_device([begins, [piece[0] for piece in pieces], [KINDS[piece[2]] for piece in pieces]], device)


@kernel
def _addresses(
    table: tl.tensor, pieces: tl.tensor, total: tl.tensor, positions: tl.tensor, count: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """Of a tile of positions: which number they have, their piece's address, where in it, its kind (or -1)."""
    j = tl.program_id(0).to(tl.int64) * FEW + tl.arange(0, FEW)
    position = tl.load(positions + j, mask=j < count, other=0)
    known = (position >= 0) & (position < total)
    refuse(inside, (j < count) & ~known)
    low, high = tl.zeros((FEW,), tl.int64), tl.zeros((FEW,), tl.int64) + pieces
    left = pieces
    while left > 0:  # the last piece that begins at or before the position: behind empty ones
        middle = (low + high) // 2
        before = tl.load(table + middle, mask=middle < pieces, other=total) <= position
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
        left = left // 2
    kind = tl.load(table + 2 * pieces + low, mask=(j < count) & known, other=-1)
    address = tl.load(table + pieces + low, mask=kind >= 0, other=0)
    return j, address, position - tl.load(table + low, mask=kind >= 0, other=0), kind


@kernel
def _typed(address: tl.tensor, place: tl.tensor, element: tl.constexpr) -> tl.tensor:
    return address.to(tl.pointer_type(element)) + place


@kernel
def _gather(
    table: tl.tensor,
    pieces: tl.int64,
    total: tl.int64,
    positions: tl.tensor,
    count: tl.int64,
    values: tl.tensor,
    inside: tl.tensor,
    present: tl.constexpr,
) -> None:
    """`present` has a bit for each kind that occurs."""
    j, address, place, kind = _addresses(table, pieces, total, positions, count, inside)
    wide: tl.constexpr = values.dtype.element_ty
    found = tl.zeros((FEW,), wide)
    if present & 1:
        found = tl.load(_typed(address, place, tl.float32), mask=kind == 0, other=0).to(wide)
    if present & 2:
        found = tl.where(kind == 1, tl.load(_typed(address, place, tl.float64), mask=kind == 1, other=0), found)
    if present & 4:
        part = tl.load(_typed(address, place, tl.float16), mask=kind == 2, other=0)
        found = tl.where(kind == 2, part.to(wide), found)
    if present & 8:
        part = tl.load(_typed(address, place, tl.int16), mask=kind == 3, other=0)
        found = tl.where(kind == 3, widened(part).to(wide), found)
    tl.store(values + j, found, mask=j < count)


@kernel
def _scatter(
    table: tl.tensor,
    pieces: tl.int64,
    total: tl.int64,
    positions: tl.tensor,
    count: tl.int64,
    values: tl.tensor,
    inside: tl.tensor,
    present: tl.constexpr,
) -> None:
    j, address, place, kind = _addresses(table, pieces, total, positions, count, inside)
    value = widened(tl.load(values + j, mask=j < count, other=0))
    if present & 1:
        tl.store(_typed(address, place, tl.float32), rounded(value, tl.float32), mask=kind == 0)
    if present & 2:
        tl.store(_typed(address, place, tl.float64), rounded(value, tl.float64), mask=kind == 1)
    if present & 4:
        tl.store(_typed(address, place, tl.float16), rounded(value, tl.float16), mask=kind == 2)
    if present & 8:
        tl.store(_typed(address, place, tl.int16), rounded(value, tl.int16), mask=kind == 3)


def _each(run: Any, pieces: Sequence[Tensor], positions: Tensor, values: Tensor) -> None:
    if count := positions.numel():
        total, present = sum(map(len, pieces)), {KINDS[piece.dtype] for piece in pieces}
        table, inside = _table(layout(pieces), positions.device), flag(positions)
        run[few(count)](
            table,
            len(pieces),
            total,
            positions,
            count,
            plain(values),
            plain(inside),
            sum(1 << kind for kind in present),
            **OPTIONS,
        )
        check_inside(inside, total)


def gather_pieces(pieces: Sequence[Tensor], positions: Tensor) -> Tensor:
    values = torch.empty(positions.shape, dtype=wide_type(pieces), device=positions.device)
    _each(_gather, pieces, positions, values)
    return values


def scatter_pieces_(pieces: Sequence[Tensor], positions: Tensor, values: Tensor) -> None:
    _each(_scatter, pieces, positions, values)
