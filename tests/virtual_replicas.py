"""Virtual workers that train replicas of a small model, and the laws that every round is held to."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradsieve import VirtualWorld, make_sparsifier
from gradsieve.density import as_density
from gradsieve.share import Replica
from gradsieve.share.driver import Driver
from gradsieve.share.parameters import second_moments

SGD: Callable[..., torch.optim.Optimizer] = torch.optim.SGD


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A few hundred parameters, among them tensors of one element."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(9, 23), nn.ReLU(), nn.Linear(23, 7), nn.ReLU(), nn.Linear(7, 1)).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 9, generator=chance)
    return x.to(dtype), (x[:, :1] * x[:, 1:2] + x[:, 2:3]).to(dtype)


def backward(model: nn.Module, rank: int, step: int) -> None:
    dtype = next(model.parameters()).dtype
    x, y = batch(rank, step, dtype)
    (model(x) - y).square().mean().backward()


class Workers:
    """`world_size` replicas, each with an optimizer of its own, in one process."""

    def __init__(
        self,
        world_size: int,
        density: Any = 0.05,
        sparsifier: str = "exdyna",
        *,
        delay: int = 0,
        dtype: torch.dtype = torch.float32,
        optimizer: Callable[..., torch.optim.Optimizer] = SGD,
        settings: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        **optimizer_options: Any,
    ) -> None:
        self.models = [make_model(dtype=dtype) for _ in range(world_size)]
        optimizer_options = optimizer_options or {"lr": 0.05}
        self.optimizers = [optimizer(model.parameters(), **optimizer_options) for model in self.models]
        self.replicas = []
        for rank, (model, made) in enumerate(zip(self.models, self.optimizers, strict=True)):
            chooses = make_sparsifier(sparsifier, **(options or {}))
            self.replicas.append(
                Replica(
                    dict(model.named_parameters()),
                    chooses,
                    as_density(density),
                    rank=rank,
                    world_size=world_size,
                    second=second_moments([made], "auto", chooses),
                    **(settings or {}),
                )
            )
        self.driver = Driver(self.replicas, VirtualWorld(world_size), delay)

    def compute(self, step: int, ranks: Sequence[int] | None = None) -> None:
        """Forward, backward and the optimizer's step of each worker."""
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            backward(model, rank if ranks is None else ranks[rank], step)
            optimizer.step()

    def step(self, step: int) -> None:
        self.compute(step)
        self.driver.after_step()

    def weights(self) -> list[Tensor]:
        """A copy of each worker's, as one vector."""
        return [replica.weights.read(replica.weights.all) for replica in self.replicas]

    def shared(self) -> list[Tensor]:
        return [replica.weights.shared.clone() for replica in self.replicas]
