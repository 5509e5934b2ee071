"""Every kernel in plain torch: what it means, and what the fast ones are tested against."""

import torch
from torch import Tensor

from gradsieve.ops.schema import BIN_SHIFT, BINS, LIBRARY


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


def all_finite(x: Tensor) -> Tensor:
    return x.isfinite().all()


def gather_clear_(x: Tensor, indices: Tensor) -> Tensor:
    values = x[indices]
    x[indices] = 0
    return values


def scatter_update_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    out.zero_()
    out[indices] = values.to(out.dtype)


for _kernel in (select_above, accumulate_select_, log_histogram, all_finite, gather_clear_, scatter_update_):
    LIBRARY.impl(_kernel.__name__, _kernel, "CompositeExplicitAutograd")
