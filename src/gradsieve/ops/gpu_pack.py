"""Packed positions on GPUs (Elias-Fano): a message is one string of bits, written in 32-bit words.

Each position sets its own bits by an atomic or, so the result does not depend on the order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradsieve.ops.gpu import FEW, OPTIONS, few, kernel, popcount
from gradsieve.ops.schema import low_bits, packed_parts

BYTES_SIZE = 256  # of the bitmap per program
BYTES = tl.constexpr(BYTES_SIZE)


@kernel
def _pack(
    indices: tl.tensor, count: tl.int64, start: tl.int64, bits: tl.int64, high: tl.int64, words: tl.tensor
) -> None:
    """The low `bits` of the j-th position go to bit `j * bits`, the bitmap begins at bit `high`."""
    j = tl.program_id(0).to(tl.int64) * FEW + tl.arange(0, FEW)
    place = tl.load(indices + j, mask=j < count, other=0) - start
    bit = high + (place >> bits) + j
    tl.atomic_or(words + (bit >> 5), (1 << (bit & 31)).to(tl.int32), mask=j < count, sem="relaxed")
    low, bit = place & ((tl.full((), 1, tl.int64) << bits) - 1), j * bits
    for _ in range((bits + 62) // 32):  # as many words as they can touch
        shift = bit & 31
        tl.atomic_or(words + (bit >> 5), (low << shift).to(tl.int32), mask=(j < count) & (low != 0), sem="relaxed")
        low, bit = low >> (32 - shift), bit + 32 - shift


@kernel
def _count(bitmap: tl.tensor, length: tl.int64, counts: tl.tensor) -> None:
    slot = tl.program_id(0).to(tl.int64)
    place = slot * BYTES + tl.arange(0, BYTES)
    byte = tl.load(bitmap + place, mask=place < length, other=0).to(tl.int32)
    tl.store(counts + slot, tl.sum(popcount(byte), 0))


@kernel
def _unpack(
    low: tl.tensor,
    bitmap: tl.tensor,
    length: tl.int64,
    bits: tl.int64,
    ends: tl.tensor,
    count: tl.int64,
    start: tl.int64,
    out: tl.tensor,
) -> None:
    """Positions beyond `count`, which only a corrupted bitmap has, are left out."""
    slot = tl.program_id(0).to(tl.int64)
    place = slot * BYTES + tl.arange(0, BYTES)
    byte = tl.load(bitmap + place, mask=place < length, other=0).to(tl.int32)
    number, column = popcount(byte), tl.arange(0, 8)[None, :]
    before = tl.load(ends + slot - 1, mask=slot > 0, other=0) + tl.cumsum(number, 0) - number
    j = before[:, None] + popcount(byte[:, None] & ((1 << column) - 1))
    taken = (((byte[:, None] >> column) & 1) > 0) & (j < count)
    bit, value = j * bits, tl.zeros((BYTES, 8), tl.int64)
    for part in range((bits + 14) // 8):  # as many bytes as the low bits can touch
        last = bit + bits > (bit // 8 + part) * 8
        found = tl.load(low + bit // 8 + part, mask=taken & last, other=0).to(tl.int64)
        moved = part * 8 - (bit & 7)
        value |= tl.where(moved < 0, found >> (bit & 7), found << tl.maximum(moved, 0))
    value &= (tl.full((), 1, tl.int64) << bits) - 1
    top = place[:, None] * 8 + column - j
    tl.store(out + j, start + value + (top << bits), mask=taken)


def pack_sorted(indices: Tensor, start: int, stop: int) -> Tensor:
    count = len(indices)
    low, high = packed_parts(count, stop - start)
    words = torch.zeros(triton.cdiv(low + high, 4), dtype=torch.int32, device=indices.device)
    if count:
        bits = low_bits(count, stop - start)
        _pack[few(count)](indices, count, start, bits, low * 8, words, **OPTIONS)
    return words.view(torch.uint8)[: low + high]


def unpack_sorted(packed: Tensor, count: int, start: int, stop: int) -> Tensor:
    out = torch.empty(count, dtype=torch.int64, device=packed.device)
    if count:
        cut, length = packed_parts(count, stop - start)
        low, bitmap, grid = packed[:cut], packed[cut:], (triton.cdiv(length, BYTES_SIZE),)
        counts = torch.empty(grid, dtype=torch.int32, device=packed.device)
        _count[grid](bitmap, length, counts, **OPTIONS)
        ends = counts.cumsum(0)
        bits = low_bits(count, stop - start)
        _unpack[grid](low, bitmap, length, bits, ends, count, start, out, **OPTIONS)
        torch._assert_async(ends[-1] == count, f"packed must hold {count} positions, got fewer or more")
    return out
