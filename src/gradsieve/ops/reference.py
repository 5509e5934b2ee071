"""Every kernel in plain torch: what it means, and what the fast ones are tested against."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from gradsieve.ops.schema import BIN_SHIFT, BINS, LIBRARY, low_bits, packed_parts, wide_type


def select_above(x: Tensor, threshold: float, start: int, stop: int) -> Tensor:
    return torch.where(x[start:stop].abs() >= threshold)[0] + start


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
    before = residual.clone()
    residual.add_(grad.to(residual.dtype))
    if backup is not None:
        backup.copy_(before)
    if finite is not None:
        finite.logical_and_(residual.isfinite().all())
    return select_above(residual, threshold, start, stop)


def log_histogram(x: Tensor, start: int, stop: int) -> Tensor:
    magnitudes = x[start:stop].view(torch.int32).bitwise_and(0x7FFFFFFF)
    return torch.bincount(magnitudes >> BIN_SHIFT, minlength=BINS)


def drift(shared: Tensor, weights: Tensor) -> Tensor:
    """How far weights are from the agreed value, at the precision of the weights."""
    wide = torch.promote_types(weights.dtype, torch.float32)
    return (shared.to(weights.dtype).to(wide) - weights.to(wide)).float()


def drift_select(
    shared: Tensor,
    weights: Sequence[Tensor],
    threshold: float,
    start: int,
    stop: int,
    *,
    second: Sequence[Tensor],
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    found = torch.cat([drift(*pair) for pair in zip(shared.split(list(map(len, weights))), weights, strict=True)])
    found = found[start:stop]
    if second:
        pairs = zip(second, weights, strict=True)
        moments = [each if len(each) else torch.zeros_like(piece) for each, piece in pairs]
        found = found * torch.cat([each.float() for each in moments])[start:stop].sqrt().sqrt()
    bad = torch.where(~found.isfinite())[0]
    first = bad[0] + start if len(bad) else bad.new_full((), -1)
    found[bad] = 0
    if counts is not None:
        counts += log_histogram(found, 0, len(found))
    positions = select_above(found, threshold, 0, len(found))
    return positions + start, found[positions], first


def inside(pieces: Sequence[Tensor], positions: Tensor) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Each piece that rising positions reach: itself, where in it, and which of the positions these are."""
    starts = [0, *accumulate(map(Tensor.numel, pieces))]
    edges = torch.searchsorted(positions, torch.tensor(starts, device=positions.device)).tolist()
    for piece, start, first, behind in zip(pieces, starts, edges, edges[1:], strict=False):
        if first < behind:
            yield piece, positions[first:behind] - start, slice(first, behind)


def gather_pieces(pieces: Sequence[Tensor], positions: Tensor) -> Tensor:
    values = positions.new_empty(positions.shape, dtype=wide_type(pieces))
    for piece, where, among in inside(pieces, positions):
        values[among] = piece[where].to(values.dtype)
    return values


def scatter_pieces_(pieces: Sequence[Tensor], positions: Tensor, values: Tensor) -> None:
    for piece, where, among in inside(pieces, positions):
        piece[where] = values[among].to(piece.dtype)


def all_finite(x: Tensor) -> Tensor:
    return x.isfinite().all()


def gather_clear_(x: Tensor, indices: Tensor) -> Tensor:
    values = x[indices]
    x[indices] = 0
    return values


def scatter_update_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    out.zero_()
    out[indices] = values.to(out.dtype)


def pack_sorted(indices: Tensor, start: int, stop: int) -> Tensor:
    bits = low_bits(len(indices), stop - start)
    low_bytes, high_bytes = packed_parts(len(indices), stop - start)
    places = indices - start
    low = (places[:, None] >> _range(bits, indices)) & 1
    high = torch.zeros(high_bytes * 8, dtype=torch.int64, device=indices.device)
    high[(places >> bits) + _range(len(indices), indices)] = 1
    return torch.cat([_to_bytes(low.flatten(), low_bytes), _to_bytes(high, high_bytes)])


def unpack_sorted(packed: Tensor, count: int, start: int, stop: int) -> Tensor:
    bits = low_bits(count, stop - start)
    low_bytes, _ = packed_parts(count, stop - start)
    every = ((packed.long()[:, None] >> _range(8, packed)) & 1).flatten()
    low = (every[: count * bits].view(count, bits) << _range(bits, packed)).sum(1)
    high = torch.where(every[low_bytes * 8 :])[0] - _range(count, packed)
    return start + low + (high << bits)


def _range(length: int, like: Tensor) -> Tensor:
    return torch.arange(length, device=like.device)


def _to_bytes(bits: Tensor, length: int) -> Tensor:
    """Zeros and ones, the lowest bit of a byte first."""
    padded = torch.nn.functional.pad(bits, (0, length * 8 - len(bits))).view(length, 8)
    return (padded << _range(8, bits)).sum(1).to(torch.uint8)


_KERNELS = (
    select_above,
    accumulate_select_,
    log_histogram,
    drift_select,
    gather_pieces,
    scatter_pieces_,
    all_finite,
    gather_clear_,
    scatter_update_,
    pack_sorted,
    unpack_sorted,
)
for _kernel in _KERNELS:
    LIBRARY.impl(_kernel.__name__, _kernel, "CompositeExplicitAutograd")
