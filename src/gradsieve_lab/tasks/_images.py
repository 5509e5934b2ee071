"""Base class of image tasks: the data sets, scaled pixels, and mirrored and shifted training images."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from gradsieve_lab.tasks import _embedded, _files
from gradsieve_lab.tasks._classifier import Classifier
from gradsieve_lab.tasks._files import CLASSES, Images
from gradsieve_lab.tasks.base import Batch, Data

SHIFT = 4  # most pixels by which a training image of CIFAR-10 is moved


@dataclass(frozen=True)
class Kind:
    """The images of a data set: pixels from 0 to `peak`; mean and deviation after scaling to [0, 1]."""

    shape: tuple[int, int, int]
    peak: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


KINDS = {
    "digits": Kind((1, 8, 8), 16, (0.305,), (0.376,)),
    "mnist": Kind((1, 28, 28), 255, (0.1307,), (0.3081,)),
    "cifar10": Kind((3, 32, 32), 255, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


@dataclass
class ImageTask(Classifier):
    """A task on images, which stay bytes until a batch is made of them."""

    DATASETS: ClassVar[tuple[str, ...]] = tuple(KINDS)

    def check_files(self) -> None:
        if self.dataset == "mnist":
            for name in _files.MNIST:
                _files.find(self.data_dir, self.dataset, f"{name}.gz", name)
        if self.dataset == "cifar10":
            for name in (*_files.CIFAR_TRAIN, _files.CIFAR_TEST):
                _files.find(self.data_dir, self.dataset, name)

    def load(self) -> Data:
        train, test = self._read()
        many = self.limit or None
        x, y = torch.from_numpy(train[0][:many]), torch.from_numpy(train[1][:many])
        return Data((x, y), (torch.from_numpy(test[0][:many]), torch.from_numpy(test[1][:many])), y)

    def _read(self) -> tuple[Images, Images]:
        if self.dataset == "digits":
            return _embedded.digits()
        if self.dataset == "mnist":
            paths = [_files.find(self.data_dir, self.dataset, f"{name}.gz", name) for name in _files.MNIST]
            return _files.read_mnist(*paths[:2]), _files.read_mnist(*paths[2:])
        *train, test = (
            _files.read_cifar(_files.find(self.data_dir, self.dataset, name))
            for name in (*_files.CIFAR_TRAIN, _files.CIFAR_TEST)
        )
        x, y = zip(*train, strict=True)
        return (np.concatenate(x), np.concatenate(y)), test

    @property
    def kind(self) -> Kind:
        return KINDS[self.dataset]

    @property
    def classes(self) -> int:
        return CLASSES

    def inputs(self, batch: Batch) -> Tensor:
        mean, deviation = (
            torch.tensor(v, device=batch[0].device)[:, None, None] for v in (self.kind.mean, self.kind.deviation)
        )
        return (batch[0].float() / self.kind.peak - mean) / deviation

    def batch(self, data: Data, indices: Tensor, generator: torch.Generator) -> Batch:
        images, labels = super().batch(data, indices, generator)
        return (jitter(images, generator) if self.dataset == "cifar10" else images), labels


def jitter(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each image by up to 4 pixels along both axes, and mirror it with probability 1/2."""
    count, channels, height, width = images.shape
    top, left = torch.randint(2 * SHIFT + 1, (2, count, 1), generator=generator)
    mirror = torch.rand(count, 1, generator=generator) < 0.5
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    columns = torch.where(mirror, columns.flip(1), columns)
    padded = pad(images, (SHIFT, SHIFT, SHIFT, SHIFT))
    image, channel = torch.arange(count)[:, None, None, None], torch.arange(channels)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
