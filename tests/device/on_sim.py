"""Virtual workers on the simulated device; laws read what they check on the host."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

import virtual_replicas
from helpers import Group
from sim_device import to_host, to_sim


def host(value: Any) -> Any:
    return tree_map_only(Tensor, to_host, value)


def device(value: Any) -> Any:
    return tree_map_only(Tensor, to_sim, value)


class SimGroup(Group):
    """Virtual workers with gradients and residuals on the device."""

    def step(self, grads: list[Tensor]) -> list[Tensor]:
        return host(super().step(device(grads)))  # type: ignore[no-any-return]

    def residuals(self, n: int) -> list[Tensor]:
        return host(super().residuals(n))  # type: ignore[no-any-return]

    def states(self) -> list[dict[str, Any]]:
        return host(super().states())  # type: ignore[no-any-return]

    def accumulators(self, grads: list[Tensor]) -> list[Tensor]:
        before = [reducer.state_dict for reducer in self.reducers]
        for reducer, state_dict in zip(self.reducers, before, strict=True):
            reducer.state_dict = lambda state_dict=state_dict: host(state_dict())  # type: ignore[method-assign]
        try:
            return super().accumulators(grads)
        finally:
            for reducer in self.reducers:
                del reducer.state_dict


class SimWorkers(virtual_replicas.Workers):
    """Replicas whose weights, gradients and optimizers are on the device."""
