"""VGG-16 with batch normalisation, for small images.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from gradsieve_lab.tasks._images import ImageTask
from gradsieve_lab.tasks.base import Recipe
from gradsieve_lab.tasks.resnet import convolution

STAGES = (64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3


@dataclass
class VGG(ImageTask):
    """14.7 million parameters. One linear layer follows the convolutions, as is usual for images of this size."""

    MODELS: ClassVar[tuple[str, ...]] = ("vgg16",)

    @property
    def recipe(self) -> Recipe:
        steps = {"digits": 150, "mnist": 1000, "cifar10": 20_000}[self.dataset]
        return Recipe(lr=0.05, batch=16, steps=steps, weight_decay=5e-4, base_batch=64)

    def make_model(self) -> nn.Module:
        have, size, _ = self.kind.shape
        layers: list[nn.Module] = []
        with self.seeded():
            for stage in STAGES:
                for channels in map(self.scaled, stage):
                    layers += [convolution(have, channels), nn.BatchNorm2d(channels), nn.ReLU()]
                    have = channels
                if size > 1:  # an image of 8 x 8 is one pixel after three stages
                    layers.append(nn.MaxPool2d(2))
                    size //= 2
            return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(have, self.classes))
