"""Every kernel in plain torch: the definition, and the reference in tests of the fast ones."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradsieve.ops.schema import BIN_SHIFT, BINS, LIBRARY, low_bits, packed_parts, wide_type


def select_above(x: Tensor, threshold: float, start: int, stop: int, count: int | None = None) -> Tensor:
    return _true(x[start:stop].abs() >= threshold, count) + start


def _true(mask: Tensor, count: int | None) -> Tensor:
    """Where a mask is true, in `count` places; if that is not known, the host waits for a device to learn it."""
    return torch.where(mask)[0] if count is None else torch.nonzero_static(mask, size=count).flatten()


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
    return select_above(residual, threshold, start, stop, None if start < stop else 0)


def log_histogram(x: Tensor, start: int, stop: int) -> Tensor:
    bins = (x[start:stop].view(torch.int32).bitwise_and(0x7FFFFFFF) >> BIN_SHIFT).long()
    # Not `bincount`, which makes the host wait to learn the largest.
    return torch.zeros(BINS, dtype=torch.int64, device=x.device).scatter_add_(0, bins, torch.ones_like(bins))


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
    count: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    found = torch.cat([drift(*pair) for pair in zip(shared.split(list(map(len, weights))), weights, strict=True)])
    found = found[start:stop]
    if second:
        pairs = zip(second, weights, strict=True)
        moments = [each if len(each) else torch.zeros_like(piece) for each, piece in pairs]
        found = found * torch.cat([each.float() for each in moments])[start:stop].sqrt().sqrt()
    places = torch.arange(start, stop, device=found.device)
    behind = places.new_full((1,), stop)  # stands for "none", as no position is there
    first = torch.cat([places.where(~found.isfinite(), stop), behind]).min()
    found = found.where(found.isfinite(), 0)
    if counts is not None:
        counts += log_histogram(found, 0, len(found))
    positions = select_above(found, threshold, 0, len(found), count)
    return positions + start, found[positions], first.where(first < stop, -1)


def gather_pieces(pieces: Sequence[Tensor], positions: Tensor) -> Tensor:
    values = positions.new_zeros(positions.shape, dtype=wide_type(pieces))
    for piece, inside, places in _among(pieces, positions):
        values = torch.where(inside, piece[places].to(values.dtype), values)
    return values


def scatter_pieces_(pieces: Sequence[Tensor], positions: Tensor, values: Tensor) -> None:
    if not len(positions):
        return
    for piece, inside, places in _among(pieces, positions):
        # Positions in other pieces write what is written at one position anyway: nothing has to be left out, which
        # would make the host wait to learn how many there are.
        one = inside.int().argmax(keepdim=True)
        written = torch.where(inside, values.to(piece.dtype), piece[places])
        piece[torch.where(inside, places, places[one])] = torch.where(inside, written, written[one])


def _among(pieces: Sequence[Tensor], positions: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each piece that is not empty: itself, which positions are in it, and where in it all would be, cut off."""
    stop = 0
    for piece in pieces:
        start, stop = stop, stop + len(piece)
        if len(piece):
            yield piece, (positions >= start) & (positions < stop), (positions - start).clamp(0, len(piece) - 1)


def all_finite(x: Tensor) -> Tensor:
    return x.isfinite().all()


def gather_clear_(x: Tensor, indices: Tensor) -> Tensor:
    values = x[indices]
    x[indices] = 0
    return values


def scatter_update_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    out.zero_()
    used = indices >= 0
    if len(out):  # positions do not repeat, so sums are single values; what is skipped adds a zero to the first
        out.index_add_(0, indices.clamp(min=0), values.to(out.dtype).where(used, 0))


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
    high = _true(every[low_bytes * 8 :], count) - _range(count, packed)
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
