"""Virtual workers on the simulated device; laws read what they check on the host."""

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import virtual_replicas
from helpers import Group, added
from sim_device import module_to_sim, to_host, to_sim


def host(value: Any) -> Any:
    return tree_map_only(Tensor, to_host, value)


def device(value: Any) -> Any:
    return tree_map_only(Tensor, to_sim, value)


class SimGroup(Group):
    """Virtual workers with gradients and residuals on the device."""

    def step(self, grads: list[Tensor]) -> list[Tensor]:
        updates: list[Tensor] = host(super().step(device(grads)))
        return updates

    def residuals(self, n: int) -> list[Tensor]:
        found: list[Tensor] = host(super().residuals(n))
        return found

    def states(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = host(super().states())
        return found

    def accumulators(self, grads: list[Tensor]) -> list[Tensor]:
        parts = zip(self.residuals(len(grads[0])), self.states(), grads, strict=True)
        return [residual + added(state, grad) for residual, state, grad in parts]


def put_replicas_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and batches of `virtual_replicas` are made on the device from now on."""
    make_model, batch = virtual_replicas.make_model, virtual_replicas.batch

    def on_device(*arguments: Any, **keywords: Any) -> nn.Module:
        return module_to_sim(make_model(*arguments, **keywords))

    monkeypatch.setattr(virtual_replicas, "make_model", on_device)
    monkeypatch.setattr(virtual_replicas, "batch", lambda *arguments: device(batch(*arguments)))
