"""Warnings at the first optimizer step: momentum applied twice, and a GradScaler that was not passed."""

import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_DONE: list[Any] = []  # hooks that have seen their step
_FRAMES = 12  # between a scaler's `step` and the hooks of the optimizer that it steps


def watch_first_step(parameters: Iterable[Tensor], *, momentum: float, scaled: bool) -> None:
    """Warn, at the first step of the optimizer that trains `parameters`, of mistakes that would stay silent.

    Args:
        momentum: that the sieve applies itself: the optimizer should have none.
        scaled: whether a scaler was passed to `sparsify`.
    """
    while _DONE:  # a hook must not be removed while hooks are called
        _DONE.pop().remove()
    mine = {id(parameter) for parameter in parameters}
    alive = weakref.ref(next(iter(parameters)))

    def check(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if handle in _DONE:
            return
        if alive() is None:
            _DONE.append(handle)
        elif any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
            _DONE.append(handle)
            if momentum:
                _check_momentum(optimizer, momentum)
            if not scaled:
                _check_scaler()

    handle = register_optimizer_step_pre_hook(check)


def _check_momentum(optimizer: Optimizer, momentum: float) -> None:
    theirs = [group.get("momentum") or 0.0 for group in optimizer.param_groups]
    if any(theirs):
        warnings.warn(
            f"momentum is applied twice: {momentum} by the sieve before the exchange and {max(theirs)} by "
            f"{type(optimizer).__name__} after it; set the optimizer's momentum to 0",
            stacklevel=2,
        )


def _check_scaler() -> None:
    """The hook runs inside `GradScaler.step`, if there is one."""
    frame = sys._getframe()
    for _ in range(_FRAMES):
        found = frame.f_locals.get("self")
        if isinstance(found, GradScaler) and found.is_enabled():
            warnings.warn(
                "a GradScaler steps the optimizer, but sparsify was called without it: what is kept back would be "
                "in the wrong units when the scale changes; call sparsify(..., scaler=scaler)",
                stacklevel=2,
            )
            return
        if frame.f_back is None:
            return
        frame = frame.f_back
