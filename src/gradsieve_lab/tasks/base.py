"""Base class of tasks: a model, training examples, a loss, and a metric on test examples."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradsieve._check import BadInput, at_least, one_of, positive

Batch = tuple[Tensor, ...]


class DataError(BadInput):
    """A data set is missing or unreadable; the message names the file."""


@dataclass(frozen=True)
class Metric:
    """A measure of how good a model is."""

    name: str
    higher_is_better: bool
    percent: bool = False

    def show(self, value: float) -> str:
        """
        >>> Metric("accuracy", True, percent=True).show(0.9876)
        '98.8 %'
        """
        return f"{value:.1%}".replace("%", " %") if self.percent else f"{value:.4g}"


@dataclass(frozen=True)
class Recipe:
    """The default hyper-parameters of a task."""

    lr: float
    batch: int  # examples per worker and step
    steps: int
    optimizer: str = "sgd"  # or adam
    momentum: float = 0.9  # of sgd
    weight_decay: float = 0.0
    base_batch: int = 0  # examples of all workers per step for which lr is right; lr scales with them; 0: never
    warm_up: float = 0.05  # fraction of the steps in which the learning rate rises
    decay: str = "cosine"  # or constant
    clip: float = 0.0  # largest norm of the gradient that the optimizer sees; 0: no limit


@dataclass(frozen=True)
class Data:
    """Examples as tensors of equal length: example i is the i-th entry of each."""

    train: Batch
    test: Batch
    labels: Tensor  # one integer per training example; label-skewed shards are sorted by it


@dataclass
class Task(ABC):
    """One task with its options. `load()` must come before anything that needs the data.

    Args:
        dataset: a name of `DATASETS`; empty is the first, which is embedded and needs no file.
        data_dir: where the files of real data sets are.
        model: a name of `MODELS`; empty is the first.
        width: multiplies the model's channels or hidden units.
        limit: number of training examples to use, and the most test examples; 0 is all.
        seed: of the model's initial weights and of generated data.
    """

    dataset: str = ""
    data_dir: Path | None = None
    model: str = ""
    width: float = 1.0
    limit: int = 0
    seed: int = 0

    METRIC: ClassVar[Metric]
    DATASETS: ClassVar[tuple[str, ...]]
    MODELS: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        self.dataset = self.dataset or self.DATASETS[0]
        self.check_dataset()
        self.model = one_of("model", self.model or self.MODELS[0], self.MODELS)
        positive("width", self.width)
        at_least("limit", self.limit, 0)
        at_least("seed", self.seed, 0)
        self.check_files()

    def check_dataset(self) -> None:
        """Raise `ValueError` for an unknown data set."""
        one_of("dataset", self.dataset, self.DATASETS)

    def check_files(self) -> None:  # noqa: B027 (embedded data needs none)
        """Raise `DataError`, naming the file, if the data set needs one that is not there. Reads nothing."""

    @abstractmethod
    def load(self) -> Data:
        """Read or generate the data; the same for the same options, in any process. Called once."""

    @property
    @abstractmethod
    def recipe(self) -> Recipe:
        """Hyper-parameters for this data set and model."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """A new model, the same for the same options; torch's random generator is left unchanged."""

    def start(self, model: nn.Module) -> None:  # noqa: B027
        """Set initial weights that are expensive to find; called on the leading worker only, others copy them."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a training batch, to call `backward()` on."""

    @abstractmethod
    def score(self, model: nn.Module, batch: Batch) -> tuple[float, int]:
        """For a batch of test examples: the sum of the values that the metric averages, and their number."""

    def value(self, mean: float, model: nn.Module) -> float:
        """The metric, from the mean of the scores over all test examples."""
        return mean

    def batch(self, data: Data, indices: Tensor, generator: torch.Generator) -> Batch:
        """The training batch of these examples; random numbers come from `generator` only."""
        return tuple(part[indices] for part in data.train)

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """A context in which torch's generator starts from the task's seed; restored on exit."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            yield

    def scaled(self, units: int, multiple: int = 1) -> int:
        """`width * units`, rounded to a multiple, at least one."""
        return max(1, round(self.width * units / multiple)) * multiple
