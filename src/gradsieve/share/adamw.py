"""AdamW for replicas, with the noise in its second moment divided by the number of workers.

Adam divides by the root of the second moment, `signal**2 + noise`. In data-parallel training gradients are
averaged first, which divides the noise by the number of workers. A replica sees only its own batch, so its steps
are too small wherever noise dominates. The signal is estimated from a slower mean of the replica's own gradients;
nothing more is sent.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from gradsieve._check import BadInput, BadType, at_least, below_one, number, positive

_AT_ONCE = 1 << 20  # elements that are updated together at most, unless one parameter has more
_MEANS = ("exp_avg", "exp_avg_sq", "slow_avg")


def _listed(params: Any) -> list[Any]:
    """Parameters, named parameters or dicts of them, as torch's optimizers take them."""
    listed = list(params) if isinstance(params, Iterable) and not isinstance(params, Tensor | str) else None
    if not listed or not all(isinstance(each, Tensor | dict | tuple) for each in listed):
        raise BadType(f"params must be parameters, or dicts of them with options, got {params!r}")
    return listed


class ReplicaAdamW(Optimizer):
    """`torch.optim.AdamW`, with `v = signal + (v - signal) / workers` in the place of `v`.

    `signal = max(0, s**2 - v * (1 - slow) / (1 + slow))`, and v at the most, where s is the mean of gradients with
    the memory `slow`; what is subtracted is the noise that such a mean still has. With one worker it is AdamW.

    Args:
        workers: number of replicas whose weights are averaged; by default the processes of this job.
        slow: decay of the mean that separates signal from noise, in [0, 1). It needs one more copy of the
            parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        workers: int | None = None,
        slow: float = 0.99,
    ) -> None:
        positive("lr", lr)
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise BadType(f"betas must be two numbers, got {betas!r}")
        params = _listed(params)
        for name, value in (("betas[0]", betas[0]), ("betas[1]", betas[1]), ("slow", slow)):
            below_one(name, value)
        positive("eps", eps)
        if number("weight_decay", weight_decay) < 0:
            raise BadInput(f"weight_decay must be at least 0, got {weight_decay}")
        if workers is None:
            workers = dist.get_world_size() if dist.is_initialized() else 1
        at_least("workers", workers, 1)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "workers": workers, "slow": slow})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameters in _together(trained):
                self._update_(parameters, group)
        return loss

    def _update_(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step for a group of parameters, with one call per operation."""
        states = [self._state(parameter) for parameter in parameters]
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        means, squares, slows = ([state[name] for state in states] for name in _MEANS)
        torch._foreach_add_([state["step"] for state in states], 1)
        steps = [int(state["step"]) for state in states]
        lr, (beta1, beta2), slow = group["lr"], group["betas"], group["slow"]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_lerp_(slows, grads, 1 - slow)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
        divisors = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        slowly = torch._foreach_div(slows, [1 - slow**step for step in steps])
        averaged_noise_([*divisors], [*slowly], group["workers"], slow)
        torch._foreach_sqrt_(divisors)
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, means, divisors, [-lr / (1 - beta1**step) for step in steps])

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            for name in _MEANS:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def averaged_noise_(squares: list[Tensor], slowly: list[Tensor], workers: int, slow: float) -> None:
    """Turn one worker's second moments into those of the mean over all workers; `slowly` is changed as well."""
    signals = slowly
    torch._foreach_mul_(signals, signals)
    torch._foreach_add_(signals, squares, alpha=-(1 - slow) / (1 + slow))
    torch._foreach_clamp_min_(signals, 0.0)
    torch._foreach_minimum_(signals, squares)
    torch._foreach_lerp_(squares, signals, 1 - 1 / workers)


def _together(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group small parameters, so that each operation is called once; large ones stay alone, to save memory."""
    few: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if few and size + parameter.numel() > _AT_ONCE:
            yield few
            few, size = [], 0
        few.append(parameter)
        size += parameter.numel()
    if few:
        yield few
