"""A small convolutional network with batch normalisation, most of whose parameters are in one layer."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gradsieve_lab.tasks._images import ImageTask
from gradsieve_lab.tasks.base import Recipe

HIDDEN = 128


@dataclass
class CNN(ImageTask):
    """421,834 parameters on MNIST."""

    MODELS: ClassVar[tuple[str, ...]] = ("cnn",)

    @property
    def recipe(self) -> Recipe:
        steps = {"digits": 200, "mnist": 1000, "cifar10": 10_000}[self.dataset]
        return Recipe(lr=0.05, batch=16, steps=steps, base_batch=64)

    def make_model(self) -> nn.Module:
        colours, height, width = self.kind.shape
        first, second = self.scaled(32), self.scaled(64)
        with self.seeded():
            return nn.Sequential(
                *_stage(colours, first),
                *_stage(first, second),
                nn.Flatten(),
                nn.Linear(second * (height // 4) * (width // 4), HIDDEN),
                nn.ReLU(),
                nn.Linear(HIDDEN, self.classes),
            )


def _stage(inputs: int, outputs: int) -> list[nn.Module]:
    """A convolution, and pooling to half the size."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
