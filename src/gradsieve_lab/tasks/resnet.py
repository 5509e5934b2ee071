"""Residual networks for small images.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016: ResNet-20 as in the paper for CIFAR-10, and
ResNet-18 with a first layer of 3 x 3 and no pooling, as is usual for images of this size.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import relu

from gradsieve_lab.tasks._images import ImageTask
from gradsieve_lab.tasks.base import Recipe

SHAPES = {"resnet20": (16, (3, 3, 3)), "resnet18": (64, (2, 2, 2, 2))}  # first channels, blocks of each stage


@dataclass
class ResNet(ImageTask):
    MODELS: ClassVar[tuple[str, ...]] = tuple(SHAPES)

    @property
    def recipe(self) -> Recipe:
        steps = {"digits": 200, "mnist": 2000, "cifar10": 20_000}[self.dataset]
        return Recipe(lr=0.1, batch=16, steps=steps, weight_decay=1e-4, base_batch=64)

    def make_model(self) -> nn.Module:
        channels, blocks = SHAPES[self.model]
        with self.seeded():
            return network(self.kind.shape[0], self.scaled(channels), blocks, self.classes)


def network(colours: int, channels: int, blocks: tuple[int, ...], classes: int) -> nn.Module:
    """A residual network; each stage but the first halves the image and doubles the channels."""
    layers: list[nn.Module] = [convolution(colours, channels), nn.BatchNorm2d(channels), nn.ReLU()]
    have = channels
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Block(have, channels << stage, stride=2 if stage and not block else 1))
            have = channels << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(have, classes))


def convolution(inputs: int, outputs: int, stride: int = 1, size: int = 3) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = convolution(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.second, self.second_norm = convolution(outputs, outputs), nn.BatchNorm2d(outputs)
        self.around = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else nn.Sequential(convolution(inputs, outputs, stride, size=1), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.first_norm(self.first(x)))
        return relu(self.second_norm(self.second(y)) + self.around(x))
