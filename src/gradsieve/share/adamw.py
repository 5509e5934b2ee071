"""AdamW for replicas, whose second moment counts noise as if it were averaged over the workers.

Adam divides by the root of the second moment, `signal**2 + noise`. In data-parallel training gradients are averaged
first, so the noise is that of all workers' batches together: smaller by their number. A replica sees only its own
batch, and its steps are too small wherever noise rules. How much is signal is estimated from a slower mean of its
own gradients; nothing more is sent.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsieve._check import at_least, below_one, number, positive


class ReplicaAdamW(Optimizer):
    """`torch.optim.AdamW`, with `v = signal + (v - signal) / workers` in the place of `v`.

    `signal = max(0, s**2 - v * (1 - slow) / (1 + slow))`, and v at the most, where s is the mean of gradients with
    the memory `slow`; what is subtracted is the noise that such a mean still has. With one worker it is AdamW.

    Args:
        workers: number of replicas whose weights are averaged.
        slow: memory of the mean that tells signal from noise, in [0, 1). It needs one more copy of the parameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        workers: int,
        slow: float = 0.99,
    ) -> None:
        positive("lr", lr)
        for name, value in (("betas[0]", betas[0]), ("betas[1]", betas[1]), ("slow", slow)):
            below_one(name, value)
        positive("eps", eps)
        if number("weight_decay", weight_decay) < 0:
            raise ValueError(f"weight_decay must be at least 0, got {weight_decay}")
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
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_(parameter, parameter.grad, group)
        return loss

    def _update_(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq", "slow_avg"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        step, lr, (beta1, beta2), slow = int(state["step"]), group["lr"], group["betas"], group["slow"]
        mean, square = state["exp_avg"].lerp_(grad, 1 - beta1), state["exp_avg_sq"]
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        corrected = square / (1 - beta2**step)
        slowly = state["slow_avg"].lerp_(grad, 1 - slow) / (1 - slow**step)
        divisor = averaged_noise(corrected, slowly, group["workers"], slow).sqrt_().add_(group["eps"])
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.addcdiv_(mean, divisor, value=-lr / (1 - beta1**step))


def averaged_noise(square: Tensor, slowly: Tensor, workers: int, slow: float) -> Tensor:
    """The second moment that the mean gradient of so many workers would have, from one worker's own."""
    signal = slowly.square().sub_(square, alpha=(1 - slow) / (1 + slow)).clamp_(min=0).minimum(square)
    return signal + (square - signal) / workers
