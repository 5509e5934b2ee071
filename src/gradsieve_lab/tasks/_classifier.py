"""Base class of classifiers: cross-entropy as the loss, accuracy as the metric."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from gradsieve_lab.tasks.base import Batch, Metric, Task


@dataclass
class Classifier(Task):
    """A task whose examples are an input and a class."""

    METRIC: ClassVar[Metric] = Metric("accuracy", higher_is_better=True, percent=True)

    def inputs(self, batch: Batch) -> Tensor:
        """The model's input."""
        return batch[0]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(model(self.inputs(batch)), batch[1])

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, int]:
        right = model(self.inputs(batch)).argmax(1) == batch[1]
        return float(right.sum()), len(right)
