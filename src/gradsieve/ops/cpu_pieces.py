"""A vector in pieces on CPUs: one call for all of them, however many parameters a model has."""

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numba
import numpy as np
import torch
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic
from torch import Tensor

from gradsieve.ops.cpu import Array, as_array, kernel
from gradsieve.ops.schema import wide_type


def _pointer_code(typing_context: Any, address: Any) -> tuple[Any, Any]:
    """An address as a pointer, from which Numba makes an array."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), code


_pointer: Any = intrinsic(_pointer_code)


@numba.njit(inline="always")
def floats_at(address: int, size: int) -> Array:
    """The float32 array of this size that begins at an address."""
    array: Array = carray(_pointer(address), (size,), np.float32)
    return array


def addresses(pieces: Sequence[Tensor]) -> Array:
    """Addresses of pieces, 0 for an empty one. The pieces must outlive the call that uses them."""
    return np.array([piece.data_ptr() for piece in pieces], np.int64)


def edges(pieces: Sequence[Tensor]) -> Array:
    """Where each piece begins in the vector, and where the last one ends."""
    return np.array([0, *accumulate(map(Tensor.numel, pieces))], np.int64)


def plain(pieces: Sequence[Tensor]) -> bool:
    return all(piece.dtype == torch.float32 for piece in pieces)


def _inside(pieces: Sequence[Tensor], positions: Tensor) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Each piece that contains positions: the piece, the indices inside it, and which positions these are."""
    starts = torch.from_numpy(edges(pieces))
    cuts = torch.searchsorted(positions, starts).tolist()
    for piece, start, first, behind in zip(pieces, starts.tolist(), cuts, cuts[1:], strict=False):
        if first < behind:
            yield piece, positions[first:behind] - start, slice(first, behind)


@kernel
def _gather(starts: Array, borders: Array, positions: Array, values: Array) -> None:
    place = 0
    for piece in range(starts.size):
        first, behind = borders[piece], borders[piece + 1]
        elements = floats_at(starts[piece], behind - first)
        while place < positions.size and positions[place] < behind:
            values[place] = elements[positions[place] - first]
            place += 1


@kernel
def _scatter(starts: Array, borders: Array, positions: Array, values: Array) -> None:
    place = 0
    for piece in range(starts.size):
        first, behind = borders[piece], borders[piece + 1]
        elements = floats_at(starts[piece], behind - first)
        while place < positions.size and positions[place] < behind:
            elements[positions[place] - first] = values[place]
            place += 1


def gather_pieces(pieces: Sequence[Tensor], positions: Tensor) -> Tensor:
    if not plain(pieces):
        found = torch.empty(positions.shape, dtype=wide_type(pieces))
        for piece, where, among in _inside(pieces, positions):
            found[among] = piece[where].to(found.dtype)
        return found
    values = torch.empty(len(positions), dtype=torch.float32)
    _gather(addresses(pieces), edges(pieces), as_array(positions), as_array(values))
    return values


def scatter_pieces_(pieces: Sequence[Tensor], positions: Tensor, values: Tensor) -> None:
    if not plain(pieces):
        for piece, where, among in _inside(pieces, positions):
            piece[where] = values[among].to(piece.dtype)
    else:
        _scatter(addresses(pieces), edges(pieces), as_array(positions), as_array(values.float()))


@functools.cache
def warm_up() -> None:
    """Compile or load the kernels: see `cpu.warm_up`."""
    pieces, positions = [torch.zeros(4, dtype=torch.float32) for _ in range(2)], torch.arange(8)
    scatter_pieces_(pieces, positions, gather_pieces(pieces, positions))
