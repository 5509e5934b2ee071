"""The kernels as functions: each checks its input once and calls torch's dispatcher.

All take flat, contiguous vectors; some a list of pieces that stand for one vector, without concatenating them.
Residuals are float32; gradients may be float32, float64, float16 or bfloat16. Functions whose name ends in `_`
change their first argument.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradsieve._check import BadInput, BadType
from gradsieve.ops import on_cpu, on_gpu, reference
from gradsieve.ops.host import on_host, read, send
from gradsieve.ops.on_cpu import warm_up
from gradsieve.ops.reference import drift
from gradsieve.ops.schema import BIN_SHIFT, BINS, packed_bytes, packed_layout

__all__ = [
    "BINS",
    "GRAD_DTYPES",
    "accumulate_select_",
    "all_finite",
    "bin_edge",
    "bin_of",
    "drift",
    "drift_select",
    "gather_clear_",
    "gather_pieces",
    "log_histogram",
    "on_host",
    "pack_sorted",
    "packed_bytes",
    "packed_lengths",
    "read",
    "scatter_pieces_",
    "scatter_update_",
    "select_above",
    "send",
    "unpack_parts",
    "unpack_sorted",
    "warm_up",
]

GRAD_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

_REGISTERED = (reference, on_cpu, on_gpu)  # importing these registers the kernels


def select_above(
    x: Tensor, threshold: float, start: int = 0, stop: int | None = None, count: int | None = None
) -> Tensor:
    """Sorted int64 positions in `x` of all `|x[i]| >= threshold` with `start <= i < stop`; NaNs never count.

    `count` is their number, if known: then the host does not wait for the device.

    >>> select_above(torch.tensor([1.0, -3.0, 2.0, float("nan")]), 2.0)
    tensor([1, 2])
    """
    stop = x.numel() if stop is None else stop
    _check_vector("x", x, GRAD_DTYPES)
    _check_range(x, start, stop)
    count = count if start < stop else 0
    indices: Tensor = torch.ops.gradsieve.select_above(x, threshold, start, stop, count)
    return indices


def accumulate_select_(
    residual: Tensor,
    grad: Tensor,
    threshold: float,
    start: int = 0,
    stop: int | None = None,
    *,
    backup: Tensor | None = None,
    finite: Tensor | None = None,
) -> Tensor:
    """`residual += grad` everywhere, and the hits of `select_above` inside `[start, stop)`, in one pass.

    `backup`, where given, receives the residual as it was before; it may be `grad` itself (float32 or float64),
    so that a step can be taken back exactly without a further copy. `finite`, a one-element bool tensor, is set
    to False if a sum is not finite and is otherwise left alone, so that several calls can share one.

    >>> residual = torch.tensor([1.0, 1.0, 1.0])
    >>> accumulate_select_(residual, torch.tensor([0.5, -4.0, 2.0]), 2.0, 0, 3)
    tensor([1, 2])
    >>> residual
    tensor([ 1.5000, -3.0000,  3.0000])
    """
    stop = residual.numel() if stop is None else stop
    _check_vector("residual", residual, (torch.float32,))
    _check_vector("grad", grad, GRAD_DTYPES)
    _check_range(residual, start, stop)
    if grad.shape != residual.shape:
        raise BadInput(f"grad must have residual's shape {tuple(residual.shape)}, got {tuple(grad.shape)}")
    if backup is not None:
        _check_vector("backup", backup, (torch.float32, torch.float64))
        if backup.shape != residual.shape:
            raise BadInput(f"backup must have residual's shape {tuple(residual.shape)}, got {tuple(backup.shape)}")
    indices: Tensor = torch.ops.gradsieve.accumulate_select_(
        residual, grad, threshold, start, stop, backup=backup, finite=finite
    )
    return indices


def log_histogram(x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
    """How many `|x[i]|`, `start <= i < stop`, fall into each of `BINS` bins, 32 an octave: see `bin_edge`."""
    stop = x.numel() if stop is None else stop
    _check_vector("x", x, (torch.float32,))
    _check_range(x, start, stop)
    counts: Tensor = torch.ops.gradsieve.log_histogram(x, start, stop)
    return counts


def drift_select(
    shared: Tensor,
    weights: Sequence[Tensor],
    threshold: float,
    start: int = 0,
    stop: int | None = None,
    *,
    second: Sequence[Tensor] = (),
    counts: Tensor | None = None,
    count: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`select_above` on the drift `shared - weights` of weights in pieces, in one pass; the drift is never stored.

    Returns the positions, the drift at them, and the first position whose drift is not finite, or -1, as a tensor;
    such a drift counts as zero. `second`, if given, are second moments of gradients, one piece per weight, empty
    if there is none yet: the drift is then multiplied by their fourth root. The `log_histogram` of the drift is
    added to `counts`, `BINS` int64. `count` is as for `select_above`.

    >>> drift_select(torch.tensor([1.0, 2.0, 3.0]), [torch.tensor([1.0]), torch.tensor([4.0, 2.5])], 0.5)
    (tensor([1, 2]), tensor([-2.0000,  0.5000]), tensor(-1))
    """
    stop = shared.numel() if stop is None else stop
    _check_vector("shared", shared, (torch.float32, torch.float64))
    _check_pieces("weights", weights)
    _check_range(shared, start, stop)
    if (total := sum(map(Tensor.numel, weights))) != len(shared):
        raise BadInput(f"weights must have shared's {len(shared)} elements, got {total}")
    if second:
        _check_pieces("second", second)
        sizes, found = [*map(Tensor.numel, weights)], [*map(Tensor.numel, second)]
        if len(found) != len(sizes) or any(size not in (0, w) for size, w in zip(found, sizes, strict=True)):
            raise BadInput(f"second must have weights' sizes {sizes} or 0, got {found}")
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.gradsieve.drift_select(
        shared, weights, threshold, start, stop, second=second, counts=counts, count=count
    )
    return result


def gather_pieces(pieces: Sequence[Tensor], positions: Tensor) -> Tensor:
    """The elements at rising positions of a vector in pieces.

    >>> gather_pieces([torch.tensor([1.0]), torch.tensor([4.0, 2.5])], torch.tensor([0, 2]))
    tensor([1.0000, 2.5000])
    """
    _check_pieces("pieces", pieces)
    _check_positions("positions", positions, 0, sum(map(Tensor.numel, pieces)))
    values: Tensor = torch.ops.gradsieve.gather_pieces(pieces, positions)
    return values


def scatter_pieces_(pieces: Sequence[Tensor], positions: Tensor, values: Tensor) -> None:
    """Set the elements at rising positions of a vector in pieces."""
    _check_pieces("pieces", pieces)
    _check_positions("positions", positions, 0, sum(map(Tensor.numel, pieces)))
    if positions.shape != values.shape:
        raise BadInput(f"values must have positions' shape {tuple(positions.shape)}, got {tuple(values.shape)}")
    torch.ops.gradsieve.scatter_pieces_(pieces, positions, values)


def bin_edge(index: int) -> float:
    """The smallest magnitude of bin `index`: `log_histogram(x)[index:].sum() == len(select_above(x, edge))`."""
    return float(np.int32(index << BIN_SHIFT).view(np.float32))


def bin_of(magnitude: float) -> int:
    """The bin of `log_histogram` that a magnitude falls into.

    >>> bin_edge(bin_of(1.0)), bin_edge(bin_of(1.04))
    (1.0, 1.03125)
    """
    with np.errstate(over="ignore"):
        return int(np.float32(magnitude).view(np.int32)) >> BIN_SHIFT


def all_finite(x: Tensor) -> Tensor:
    """Whether no element is NaN or infinite, as a tensor: see `read`."""
    _check_vector("x", x, GRAD_DTYPES)
    finite: Tensor = torch.ops.gradsieve.all_finite(x)
    return finite


def gather_clear_(x: Tensor, indices: Tensor) -> Tensor:
    """Return `x[indices]` and set those elements of `x` to zero."""
    _check_vector("x", x, GRAD_DTYPES)
    values: Tensor = torch.ops.gradsieve.gather_clear_(x, indices)
    return values


def scatter_update_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Set `out` to zero but for `out[indices] = values`; negative indices are skipped."""
    _check_vector("out", out, GRAD_DTYPES)
    if indices.shape != values.shape:
        raise BadInput(f"values must have indices' shape {tuple(indices.shape)}, got {tuple(values.shape)}")
    torch.ops.gradsieve.scatter_update_(out, indices, values)


def pack_sorted(indices: Tensor, start: int, stop: int) -> Tensor:
    """Rising positions in `[start, stop)` as bytes, close to the optimum: 12 bits each at a density of 0.001.

    This is Elias-Fano coding: the low bits of each position are stored as they are; the high bits are a bitmap in
    which the bit `(position >> low bits) + j` is set for the j-th position. Receivers know the length,
    `packed_bytes(count, stop - start)`, already, so messages need no padding and no exchange of lengths.

    >>> pack_sorted(torch.tensor([3, 700, 901]), 0, 1000).numel(), packed_bytes(3, 1000)
    (4, 4)
    """
    _check_positions("indices", indices, start, stop)
    packed: Tensor = torch.ops.gradsieve.pack_sorted(indices, start, stop)
    return packed


def unpack_sorted(packed: Tensor, count: int, start: int, stop: int) -> Tensor:
    """The positions that were packed.

    >>> unpack_sorted(pack_sorted(torch.tensor([3, 700, 901]), 0, 1000), 3, 0, 1000)
    tensor([  3, 700, 901])
    """
    _check_vector("packed", packed, (torch.uint8,))
    if packed.numel() != packed_bytes(count, stop - start):
        raise BadInput(f"packed must have {packed_bytes(count, stop - start)} bytes, got {packed.numel()}")
    indices: Tensor = torch.ops.gradsieve.unpack_sorted(packed, count, start, stop)
    return indices


def packed_lengths(counts: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """The bytes of several messages of `pack_sorted`."""
    return [sum(packed_layout(count, stop - start)[1:]) for count, (start, stop) in zip(counts, spans, strict=True)]


def unpack_parts(packed: Sequence[Tensor], counts: Sequence[int], spans: Sequence[tuple[int, int]]) -> Tensor:
    """The positions of several messages, one after the other: on CPUs one call of a kernel, however many they are.

    >>> parts = [pack_sorted(torch.tensor([3, 700]), 0, 1000), pack_sorted(torch.tensor([5]), 0, 10)]
    >>> unpack_parts(parts, [2, 1], [(0, 1000), (0, 10)])
    tensor([  3, 700,   5])
    """
    if not packed[0].is_cpu:
        calls = zip(packed, counts, spans, strict=True)
        return torch.cat([unpack_sorted(part, count, *span) for part, count, span in calls])
    for worker, (length, part) in enumerate(zip(packed_lengths(counts, spans), packed, strict=True)):
        if part.numel() != length:
            raise BadInput(f"packed must have {length} bytes from worker {worker}, got {part.numel()}")
    positions: Tensor = on_cpu.module("cpu_pack").unpack_parts(torch.cat(list(packed)), counts, spans)
    return positions


def _check_positions(name: str, x: Tensor, start: int, stop: int) -> None:
    _check_vector(name, x, (torch.int64,))
    if x.is_cpu and len(x) and not (start <= int(x[0]) and int(x[-1]) < stop and bool((x[1:] > x[:-1]).all())):
        raise BadInput(f"{name} must rise from {start} at least to below {stop}, got others")


def _check_pieces(name: str, pieces: Sequence[Tensor]) -> None:
    for piece in pieces:
        _check_vector(name, piece, GRAD_DTYPES)


def _check_vector(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if x.dim() != 1 or not x.is_contiguous():
        raise BadInput(f"{name} must be a contiguous vector, got shape {tuple(x.shape)}, strides {x.stride()}")
    if x.dtype not in dtypes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise BadType(f"{name} must be one of {known}, got {str(x.dtype).removeprefix('torch.')}")


def _check_range(x: Tensor, start: int, stop: int) -> None:
    if not 0 <= start <= stop <= x.numel():
        raise BadInput(f"start and stop must satisfy 0 <= start <= stop <= {x.numel()}, got {start} and {stop}")
