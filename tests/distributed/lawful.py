"""A DDP step that checks itself: the gradient is computed a second time without DDP, and nothing may be lost."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsieve import Sieve
from helpers import added


def flat_gradient(sieve: Sieve, loss: Tensor) -> Tensor:
    """This rank's own gradient, in the arena's order; zero where a parameter took no part."""
    parameters = list(sieve.hook.parameters.values())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).float().flatten()
            for p, g in zip(parameters, grads, strict=True)
        ]
    )


def flat_update(sieve: Sieve) -> Tensor:
    """What DDP left in `.grad`."""
    parameters = sieve.hook.parameters.values()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).float().flatten() for p in parameters])


def total(x: Tensor) -> Tensor:
    x = x.double()
    dist.all_reduce(x)
    return x


def lawful_backward(
    model: nn.Module, sieve: Sieve, losses: Callable[[nn.Module], Tensor], tolerance: float = 1e-6
) -> Tensor:
    """`losses(model).backward()` through DDP, with the law checked; returns the update."""
    for parameter in sieve.hook.parameters.values():
        parameter.grad = None
    gradient = flat_gradient(sieve, losses(model.module))  # type: ignore[arg-type]
    acc = sieve.reducer.residual + added(sieve.state_dict(), gradient)
    losses(model).backward()
    update, after = flat_update(sieve), sieve.reducer.residual
    check_law(acc, update, after, tolerance)
    return update


def check_law(acc: Tensor, update: Tensor, after: Tensor, tolerance: float) -> None:
    kept = after != 0
    assert torch.equal(after[kept], acc[kept]), "an element that was not sent changed"
    error = (total(acc) - dist.get_world_size() * update.double() - total(after)).abs()
    scale = total(acc.abs()).max().clamp_min(1e-30)
    assert float(error.max() / scale) <= tolerance, f"lost {float(error.max()):.3g} of {float(scale):.3g}"
    first = update.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, update), "workers hold different updates"
