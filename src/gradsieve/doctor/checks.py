"""Checks for every device: kernels return the same as the plain ones, and steps lose nothing.

A check returns a short description of what it tested, or raises `Failed` with what it found.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsieve.doctor.group import Group
from gradsieve.ops import BINS, GRAD_DTYPES, reference
from gradsieve.reducer import SparseReducer
from gradsieve.sparsifiers import make_sparsifier
from gradsieve.state.replicas import checksum

SIZES = (1, 1_000, 4_099, 70_001)  # around the sizes of tiles
STEPS, SIZE, DENSITY = 6, 50_000, 0.01
SPARSIFIERS = ("exdyna", "topk", "dense")
ROOT_TOLERANCE = 1e-6  # of a fourth root in float32: not all libraries round to nearest


class Failed(AssertionError):
    """A check failed."""


def _vector(n: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * seed + n)).to(dtype).to(device)


def _expect(what: str, found: Any, expected: Any) -> None:
    """Equality to the last bit, of tensors or of all of several."""
    if isinstance(found, Tensor):
        if found.shape != expected.shape or not torch.equal(found.cpu(), expected.cpu()):
            raise Failed(f"{what} is not what the plain kernel returns")
    else:
        for ours, theirs in zip(found, expected, strict=True):
            _expect(what, ours, theirs)


def selecting_kernels(group: Group) -> str:
    """accumulate_select_, select_above, log_histogram, all_finite."""
    op, device = torch.ops.gradsieve, group.device
    for n in SIZES:
        for dtype in GRAD_DTYPES:
            x = _vector(n, 1, device, dtype)
            _expect("select_above", op.select_above(x, 1.1, n // 3, n), reference.select_above(x, 1.1, n // 3, n))
            _expect("all_finite", op.all_finite(x), reference.all_finite(x))
            residual, finite = _vector(n, 2, device), torch.tensor(True, device=device)
            ours, theirs, kept = residual.clone(), residual.clone(), torch.empty_like(residual)
            hits = op.accumulate_select_(ours, x, 1.0, 0, n // 2, backup=kept, finite=finite)
            expected = reference.accumulate_select_(theirs, x, 1.0, 0, n // 2, finite=finite)
            _expect("accumulate_select_", (hits, ours, kept), (expected, theirs, residual))
        x = _vector(n, 3, device)
        _expect("log_histogram", op.log_histogram(x, 0, n), reference.log_histogram(x, 0, n))
    return f"{len(SIZES)} sizes, {len(GRAD_DTYPES)} types"


def moving_kernels(group: Group) -> str:
    """drift_select, gather and scatter, also in pieces, packing."""
    op, device = torch.ops.gradsieve, group.device
    for n in SIZES:
        shared, x = _vector(n, 4, device), _vector(n, 5, device)
        for dtype in GRAD_DTYPES[::2]:
            pieces = [part.clone() for part in x.to(dtype).tensor_split([n // 5, n // 5, n // 2])]
            positions = _drift(shared, pieces, device)
            values = op.gather_pieces(pieces, positions)
            _expect("gather_pieces", values, reference.gather_pieces(pieces, positions))
            others = [piece.clone() for piece in pieces]
            op.scatter_pieces_(pieces, positions, values + 1)
            reference.scatter_pieces_(others, positions, values + 1)
            _expect("scatter_pieces_", pieces, others)
        indices, other, out = op.select_above(x, 1.0, 0, n), x.clone(), torch.empty_like(x)
        found, expected = op.gather_clear_(x, indices), reference.gather_clear_(other, indices)
        _expect("gather_clear_", (found, x), (expected, other))
        op.scatter_update_(out, indices, found)
        reference.scatter_update_(other, indices, found)
        _expect("scatter_update_", out, other)
        packed = op.pack_sorted(indices, 0, n)
        _expect("pack_sorted", packed, reference.pack_sorted(indices, 0, n))
        _expect("unpack_sorted", op.unpack_sorted(packed, len(indices), 0, n), indices)
    return f"{len(SIZES)} sizes, pieces of {len(GRAD_DTYPES[::2])} types"


def _drift(shared: Tensor, pieces: Sequence[Tensor], device: torch.device) -> Tensor:
    """The positions that drifted, with and without second moments."""
    op, n = torch.ops.gradsieve, len(shared)
    counts, expected = (torch.zeros(BINS, dtype=torch.int64, device=device) for _ in range(2))
    found = op.drift_select(shared, pieces, 1.0, 0, n, second=[], counts=counts)
    plain = reference.drift_select(shared, pieces, 1.0, 0, n, second=[], counts=expected)
    _expect("drift_select", (*found, counts), (*plain, expected))
    second = [torch.rand(len(piece), device=device) for piece in pieces]
    scaled = op.drift_select(shared, pieces, 0.0, 0, n, second=second)[1]
    root = reference.drift_select(shared, pieces, 0.0, 0, n, second=second)[1]
    if not torch.allclose(scaled, root, rtol=ROOT_TOLERANCE, atol=0):
        raise Failed("drift_select with second moments is not near what the plain kernel returns")
    positions: Tensor = found[0]
    return positions


def nothing_is_lost(group: Group) -> str:
    """Gradients equal what was sent plus what is kept, and the update is the same on all workers, bit for bit."""
    for name in SPARSIFIERS:
        reducer = SparseReducer(make_sparsifier(name), DENSITY, rank=group.rank, world_size=group.size)
        kept = torch.zeros(SIZE, device=group.device)
        for step in range(STEPS):
            grad = _vector(SIZE, 10 * step + group.rank, group.device)
            had = kept + grad
            update = group.world.run([reducer.reduce(grad.clone())])[0]
            kept = reducer.residual.clone()
            sums = torch.stack([had, kept]).double().cpu()
            if len({*group.gather(checksum(update))}) > 1:
                raise Failed(f"{name}, step {step}: workers hold different updates")
            every = torch.stack(group.gather(sums)).sum(0)
            lost = (every[0] - every[1] - group.size * update.double().cpu()).abs().max()
            if not lost <= group.size * 2**-22 * float(every.abs().max()):
                raise Failed(f"{name}, step {step}: up to {float(lost):.3g} of an element was lost")
    return f"{', '.join(SPARSIFIERS)}, {STEPS} steps of {SIZE} elements"


CHECKS: dict[str, Callable[[Group], str]] = {
    "kernels that select": selecting_kernels,
    "kernels that move": moving_kernels,
    "steps lose nothing": nothing_is_lost,
}
