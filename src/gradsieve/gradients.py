"""Gradients as vectors: checks, and writing an update in place of a gradient."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve._check import BadInput, BadType
from gradsieve.comm.step import Sent

_BELOW_MAX = 0.9375  # float8 rounds up by at most 1/16


def check_grad(grad: Any, n: int | None, dtype: str, sizes: Sequence[int] | None) -> None:
    """Check that a gradient is a contiguous vector of n elements, of the same type as before."""
    if not isinstance(grad, Tensor) or grad.dtype not in ops.GRAD_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in ops.GRAD_DTYPES)
        raise BadType(f"grad must be a tensor of one of {known}, got {_kind(grad)}")
    if grad.dim() != 1 or not grad.is_contiguous() or len(grad) == 0:
        raise BadInput(f"grad must be a contiguous vector with an element at least, got shape {tuple(grad.shape)}")
    if n is not None and len(grad) != n:
        raise BadInput(f"grad must have n = {n} elements as before, got {len(grad)}")
    if dtype and str(grad.dtype) != dtype:
        raise BadType(f"grad must stay {dtype.removeprefix('torch.')}, got {_kind(grad)}")
    if sizes is not None and sum(sizes) != len(grad):
        raise BadInput(f"sizes must add up to n = {len(grad)}, got {sum(sizes)}")


def largest_update(dtype: torch.dtype) -> float:
    """The largest magnitude of an update of this type; slightly below the type's own, for rounded values."""
    return _BELOW_MAX * torch.finfo(dtype).max if dtype == torch.float16 else math.inf


def checked_residual(residual: Any, n: int) -> Tensor:
    """Check the residual of a state dict."""
    if not isinstance(residual, Tensor) or residual.dtype != torch.float32 or residual.shape != (n,):
        raise BadInput(f"residual must be a float32 vector of {n} elements, got {residual!r}")
    return residual


def checked_out(out: Any, grad: Tensor) -> Tensor:
    """Check the tensor for the update, which must be like the gradient; a new one if there is none."""
    if out is None:
        return torch.empty_like(grad)
    if not isinstance(out, Tensor):
        raise BadType(f"out must be a tensor, got {out!r}")
    if out.shape != grad.shape or out.dtype != grad.dtype or not out.is_contiguous():
        raise BadInput(
            f"out must be a contiguous {_kind(grad)} vector of {len(grad)}, got {_kind(out)} {tuple(out.shape)}"
        )
    given: Tensor = out.detach()
    return given


def write_(out: Tensor, sent: Sent) -> None:
    """Write the update as a vector: what was sent, and zero elsewhere; NaN if the step was skipped."""
    if not sent.finite:
        out.fill_(math.nan)
    elif sent.indices is None:
        out.copy_(sent.values)
    else:
        ops.scatter_update_(out, sent.indices, sent.values)


def _kind(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.") if isinstance(x, Tensor) else repr(x)
