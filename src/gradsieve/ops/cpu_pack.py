"""Packed positions on CPUs: low bits side by side, high bits as a bitmap (Elias-Fano)."""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradsieve._check import BadInput
from gradsieve.ops.cpu import Array, as_array, kernel, trailing_zeros
from gradsieve.ops.schema import low_bits, packed_layout, packed_parts


@kernel
def _pack(indices: Array, start: int, bits: int, low: Array, high: Array) -> None:
    mask = np.uint64((1 << bits) - 1)
    waiting, filled, written = np.uint64(0), 0, 0
    for j in range(indices.size):
        place = np.uint64(indices[j] - start)
        waiting |= (place & mask) << np.uint64(filled)
        filled += bits
        while filled >= 8:
            low[written] = np.uint8(waiting & np.uint64(0xFF))
            waiting >>= np.uint64(8)
            filled -= 8
            written += 1
        bit = np.int64(place >> np.uint64(bits)) + j
        high[bit >> 3] |= np.uint8(1 << (bit & 7))
    if filled > 0:
        low[written] = np.uint8(waiting & np.uint64(0xFF))


@kernel
def _unpack(low: Array, high: Array, start: int, bits: int, out: Array) -> int:
    """Fill `out`; returns the number of positions in the bitmap, which is wrong if the bitmap is corrupted."""
    mask = np.uint64((1 << bits) - 1)
    waiting, filled, read, count = np.uint64(0), 0, 0, 0
    for i in range(high.size):
        byte = np.uint32(high[i])
        while byte != 0:
            if count == out.size:
                return count + 1
            while filled < bits:
                waiting |= np.uint64(low[read]) << np.uint64(filled)
                filled += 8
                read += 1
            top = np.int64(i * 8) + np.int64(trailing_zeros(byte)) - count
            out[count] = start + (top << bits) + np.int64(waiting & mask)
            waiting >>= np.uint64(bits)
            filled -= bits
            count += 1
            byte = np.uint32(byte & np.uint32(byte - np.uint32(1)))
    return count


@kernel
def _unpack_parts(packed: Array, layout: Array, out: Array) -> int:
    """Fill `out` from messages one after the other; returns the first that is corrupted, or -1.

    layout: a row per message, with its count, start, low bits, and the bytes of both parts.
    """
    byte, first = 0, 0
    for i in range(len(layout)):
        count, start, bits, low, high = layout[i]
        middle, stop = byte + low, byte + low + high
        if _unpack(packed[byte:middle], packed[middle:stop], start, bits, out[first : first + count]) != count:
            return i
        byte, first = stop, first + count
    return -1


def pack_sorted(indices: Tensor, start: int, stop: int) -> Tensor:
    low, high = (np.zeros(length, np.uint8) for length in packed_parts(len(indices), stop - start))
    _pack(as_array(indices), start, low_bits(len(indices), stop - start), low, high)
    return torch.from_numpy(np.concatenate([low, high]))


def unpack_sorted(packed: Tensor, count: int, start: int, stop: int) -> Tensor:
    cut, _ = packed_parts(count, stop - start)
    out, message = np.empty(count, np.int64), as_array(packed)
    found = _unpack(message[:cut], message[cut:], start, low_bits(count, stop - start), out)
    if found != count:
        raise BadInput(f"packed must hold {count} positions, got {'fewer' if found < count else 'more'}")
    return torch.from_numpy(out)


def unpack_parts(packed: Tensor, counts: Sequence[int], spans: Sequence[tuple[int, int]]) -> Tensor:
    """As `unpack_sorted`, for messages one after the other."""
    layout = [
        (count, start, *packed_layout(count, stop - start))
        for count, (start, stop) in zip(counts, spans, strict=True)
    ]
    out = np.empty(sum(counts), np.int64)
    wrong = _unpack_parts(as_array(packed), np.array(layout, np.int64), out)
    if wrong >= 0:
        raise BadInput(f"packed must hold {counts[wrong]} positions from worker {wrong}, got another number")
    return torch.from_numpy(out)


@functools.cache
def warm_up() -> None:
    indices = torch.arange(2)
    packed = pack_sorted(indices, 0, 8)
    unpack_sorted(packed, len(indices), 0, 8)
    unpack_parts(packed, [len(indices)], [(0, 8)])
