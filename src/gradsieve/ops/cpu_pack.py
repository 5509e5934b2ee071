"""Packed positions on CPUs: low bits side by side, high bits as a bitmap (Elias-Fano)."""

import functools

import numpy as np
import torch
from torch import Tensor

from gradsieve._check import BadInput
from gradsieve.ops.cpu import Array, as_array, kernel, trailing_zeros
from gradsieve.ops.schema import low_bits, packed_parts


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


@functools.cache
def warm_up() -> None:
    indices = torch.arange(2)
    unpack_sorted(pack_sorted(indices, 0, 8), len(indices), 0, 8)
