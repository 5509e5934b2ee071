"""What a task is: a model, examples to learn from, a loss, and a metric on examples kept aside."""

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
    """How good a model is, in one number."""

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
    """Hyper-parameters that a task trains well with, unless the user names others."""

    lr: float
    batch: int  # examples of one worker in a step
    steps: int
    optimizer: str = "sgd"  # or adam
    momentum: float = 0.9  # of sgd
    weight_decay: float = 0.0
    base_batch: int = 0  # examples of all workers in a step for which lr is right; it scales with them; 0: never
    warm_up: float = 0.05  # fraction of the steps in which the learning rate rises
    decay: str = "cosine"  # or constant
    clip: float = 0.0  # largest norm of the gradient that the optimizer sees; 0: no limit


@dataclass(frozen=True)
class Data:
    """Examples as tensors of one length: example i is the i-th entry of each."""

    train: Batch
    test: Batch
    labels: Tensor  # one whole number a training example: what label-skewed shards are sorted by


@dataclass
class Task(ABC):
    """One task with its options. `load()` must come before anything that needs the data.

    Args:
        dataset: a name of `DATASETS`; empty is the first, which is embedded and needs no file.
        data_dir: where the files of real data sets are.
        model: a name of `MODELS`; empty is the first.
        width: multiplies the model's channels or hidden units.
        limit: use only so many training examples, and at most as many for testing; 0 is all.
        seed: of the model's first weights and of generated data.
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
        """A new model, the same for the same options; the random generator of torch is left as it was."""

    def start(self, model: nn.Module) -> None:  # noqa: B027
        """First weights that take work to find: called by the leading worker only, the others take its weights."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a training batch, to call `backward()` on."""

    @abstractmethod
    def score(self, model: nn.Module, batch: Batch) -> tuple[float, int]:
        """On a batch of test examples: the sum of what the metric averages, and how much it is the sum of."""

    def value(self, mean: float, model: nn.Module) -> float:
        """The metric, from the mean of the scores over all test examples."""
        return mean

    def batch(self, data: Data, indices: Tensor, generator: torch.Generator) -> Batch:
        """The training batch of these examples; chance comes from `generator` only."""
        return tuple(part[indices] for part in data.train)

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Within it torch's generator begins with the task's seed; afterwards it is as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            yield

    def scaled(self, units: int, multiple: int = 1) -> int:
        """`width * units`, rounded to a multiple, at least one."""
        return max(1, round(self.width * units / multiple)) * multiple
