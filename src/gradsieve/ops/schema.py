"""The list of kernels: their schemas, and fake implementations that compute only shapes.

Torch's dispatcher chooses the code: `cpu.py` (Numba) for tensors on a CPU, `gpu.py` (Triton) on GPUs,
`reference.py` on all other devices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("gradsieve", "DEF")

SCHEMAS = {
    "select_above": "(Tensor x, float threshold, int start, int stop, int? count=None) -> Tensor",
    "accumulate_select_": (
        "(Tensor(a!) residual, Tensor grad, float threshold, int start, int stop, *, "
        "Tensor(b!)? backup=None, Tensor(c!)? finite=None) -> Tensor"
    ),
    "log_histogram": "(Tensor x, int start, int stop) -> Tensor",
    "drift_select": (
        "(Tensor shared, Tensor[] weights, float threshold, int start, int stop, *, Tensor[] second, "
        "Tensor(a!)? counts=None, int? count=None) -> (Tensor, Tensor, Tensor)"
    ),
    "gather_pieces": "(Tensor[] pieces, Tensor positions) -> Tensor",
    "scatter_pieces_": "(Tensor(a!)[] pieces, Tensor positions, Tensor values) -> ()",
    "all_finite": "(Tensor x) -> Tensor",
    "gather_clear_": "(Tensor(a!) x, Tensor indices) -> Tensor",
    "scatter_update_": "(Tensor(a!) out, Tensor indices, Tensor values) -> ()",
    "pack_sorted": "(Tensor indices, int start, int stop) -> Tensor",
    "unpack_sorted": "(Tensor packed, int count, int start, int stop) -> Tensor",
}

# A float32's sign is dropped and its highest 13 bits kept: 8 of exponent, 5 of mantissa, so 32 bins an octave,
# each at most 3.2 % wide. Shifting bits needs no logarithm and no knowledge of the scale.
BIN_SHIFT = 18
BINS = 1 << (31 - BIN_SHIFT)


def wide_type(pieces: Sequence[Tensor]) -> torch.dtype:
    """A type for the values of all pieces: float32, or float64 if a piece has that."""
    return torch.float64 if any(piece.dtype == torch.float64 for piece in pieces) else torch.float32


def low_bits(count: int, size: int) -> int:
    """How many low bits of each of `count` positions below `size` are written out; the rest are in a bitmap.

    Chosen so that both together are shortest, from what all workers know: so they know the length, too.
    """
    guess = max((size // max(count, 1)).bit_length() - 1, 0)
    return min((guess, guess + 1), key=lambda bits: count * bits + ((size - 1) >> bits))


def packed_parts(count: int, size: int) -> tuple[int, int]:
    """Bytes of the low bits and of the bitmap."""
    if count == 0:
        return 0, 0
    bits = low_bits(count, size)
    return -(-count * bits // 8), -(-(count + ((size - 1) >> bits)) // 8)


@functools.lru_cache(maxsize=1 << 12)  # all virtual workers ask for the same ones
def packed_layout(count: int, size: int) -> tuple[int, int, int]:
    """Low bits of a position, and the bytes of both parts, for sizes that are known."""
    return low_bits(count, size), *packed_parts(count, size)


def packed_bytes(count: int, size: int) -> int:
    """How long a packed message of `count` positions out of `size` is: see `pack_sorted`."""
    return sum(packed_parts(count, size))


def _fake_select_above(x: Tensor, threshold: float, start: int, stop: int, count: int | None = None) -> Tensor:
    return x.new_empty(_size(count), dtype=torch.int64)


def _size(count: int | None) -> Any:
    """Of what is found: known beforehand, or only when it was looked for."""
    return torch.library.get_ctx().new_dynamic_size() if count is None else count


def _fake_accumulate_select_(
    residual: Tensor,
    grad: Tensor,
    threshold: float,
    start: int,
    stop: int,
    *,
    backup: Tensor | None = None,
    finite: Tensor | None = None,
) -> Tensor:
    return _fake_select_above(residual, threshold, start, stop)


def _fake_log_histogram(x: Tensor, start: int, stop: int) -> Tensor:
    return x.new_empty(BINS, dtype=torch.int64)


def _fake_drift_select(
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
    found = _size(count)
    positions = shared.new_empty(found, dtype=torch.int64)
    return positions, shared.new_empty(found, dtype=torch.float32), shared.new_empty((), dtype=torch.int64)


def _fake_gather_pieces(pieces: Sequence[Tensor], positions: Tensor) -> Tensor:
    return positions.new_empty(positions.shape, dtype=wide_type(pieces))


def _fake_scatter_pieces_(pieces: Sequence[Tensor], positions: Tensor, values: Tensor) -> None:
    return None


def _fake_all_finite(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.bool)


def _fake_gather_clear_(x: Tensor, indices: Tensor) -> Tensor:
    return x.new_empty(indices.shape)


def _fake_scatter_update_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    return None


def _fake_pack_sorted(indices: Tensor, start: int, stop: int) -> Tensor:
    return indices.new_empty(packed_bytes(indices.numel(), stop - start), dtype=torch.uint8)


def _fake_unpack_sorted(packed: Tensor, count: int, start: int, stop: int) -> Tensor:
    return packed.new_empty(count, dtype=torch.int64)


FAKES: dict[str, Callable[..., Any]] = {
    "select_above": _fake_select_above,
    "accumulate_select_": _fake_accumulate_select_,
    "log_histogram": _fake_log_histogram,
    "drift_select": _fake_drift_select,
    "gather_pieces": _fake_gather_pieces,
    "scatter_pieces_": _fake_scatter_pieces_,
    "all_finite": _fake_all_finite,
    "gather_clear_": _fake_gather_clear_,
    "scatter_update_": _fake_scatter_update_,
    "pack_sorted": _fake_pack_sorted,
    "unpack_sorted": _fake_unpack_sorted,
}

for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema)
    torch.library.register_fake(f"gradsieve::{_name}", FAKES[_name], lib=LIBRARY)
