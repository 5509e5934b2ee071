"""A network with two hidden layers, for small images."""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch import nn

from gradsieve_lab.tasks._images import ImageTask
from gradsieve_lab.tasks.base import Recipe


@dataclass
class MLP(ImageTask):
    """167,178 parameters on the digits."""

    MODELS: ClassVar[tuple[str, ...]] = ("mlp",)

    @property
    def recipe(self) -> Recipe:
        if self.dataset == "digits":
            return Recipe(lr=0.1, batch=16, steps=400, base_batch=64)
        return Recipe(lr=0.05, batch=16, steps=2000, base_batch=64)

    def make_model(self) -> nn.Module:
        first, second = self.scaled(512), self.scaled(256)
        with self.seeded():
            return nn.Sequential(
                nn.Flatten(),
                nn.Linear(prod(self.kind.shape), first),
                nn.ReLU(),
                nn.Linear(first, second),
                nn.ReLU(),
                nn.Linear(second, self.classes),
            )
