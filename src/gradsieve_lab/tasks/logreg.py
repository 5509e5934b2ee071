"""Logistic regression: a convex problem, whose minimum is known."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from gradsieve._check import BadInput, one_of
from gradsieve_lab.tasks import _embedded, _files, _tables
from gradsieve_lab.tasks._optimum import minimise
from gradsieve_lab.tasks.base import Batch, Data, DataError, Metric, Recipe, Task

SAMPLES, FEATURES = 6000, 5000  # of the synthetic set, as gisette
COUNTS = {"a9a": 123, "w8a": 300, "gisette": 5000}  # features; a file need not mention the last ones
SHIFTS = {"synthetic": 0.005, "gisette": 0.005, "madelon": 1e-4}  # initial minus best weights; others start at 0
CONDITION = 10_000  # smoothness over l2
POWER_STEPS = 100
FILES = {
    "madelon": ("madelon.npz", "madelon.gz", "madelon"),
    "a9a": ("a9a.gz", "a9a"),
    "w8a": ("w8a.gz", "w8a"),
    "gisette": ("gisette_scale.bz2", "gisette_scale.gz", "gisette_scale"),
}


@dataclass(eq=False)
class Problem:
    """`f(x) = mean log(1 + exp(-y a.x)) + l2/2 |x|^2`, and its minimum, computed on first use."""

    rows: Tensor
    signs: Tensor

    @functools.cached_property
    def smoothness(self) -> float:
        """The largest curvature of the mean: `sigma_max(rows)^2 / (4 samples)`, by power iteration."""
        direction = torch.randn(self.rows.shape[1], generator=torch.Generator().manual_seed(0))
        for _ in range(POWER_STEPS):
            direction = self.rows.T @ (self.rows @ (direction / direction.norm()))
        # The last digits depend on the number of threads.
        return float(f"{float(direction.norm()) / (4 * len(self.rows)):.6g}")

    @property
    def l2(self) -> float:
        return self.smoothness / CONDITION

    @functools.cached_property
    def minimum(self) -> tuple[Tensor, float]:
        """The best weights and the objective there, in double precision."""
        return minimise(self.rows, self.signs, self.l2)


@dataclass
class LogReg(Task):
    """Logistic regression; a data set may also be the name of an svmlight file in the data folder.

    `width` is only for the synthetic set: it multiplies the number of features.
    """

    METRIC: ClassVar[Metric] = Metric("f - f*", higher_is_better=False)
    DATASETS: ClassVar[tuple[str, ...]] = ("synthetic", *FILES)
    MODELS: ClassVar[tuple[str, ...]] = ("linear",)

    def check_dataset(self) -> None:
        if self.dataset not in self.DATASETS and self.data_dir is None:
            one_of("dataset", self.dataset, self.DATASETS)
        if self.dataset != "synthetic" and self.width != 1:
            raise BadInput(f"width must be 1 with dataset {self.dataset}, got {self.width}")

    def check_files(self) -> None:
        if self.dataset != "synthetic":
            self._path()

    def _path(self) -> Path:
        names = FILES.get(self.dataset, (self.dataset,))
        return _files.find(self.data_dir, self.dataset, *(f"libsvm/{name}" for name in names), *names)

    @functools.cached_property
    def problem(self) -> Problem:
        if self.dataset == "synthetic":
            return _generated(min(self.limit or SAMPLES, SAMPLES), self.scaled(FEATURES), self.seed)
        return _read(self._path(), COUNTS.get(self.dataset, 0), self.limit)

    def load(self) -> Data:
        rows, signs = self.problem.rows, self.problem.signs
        return Data((rows, signs), (rows, signs), signs.long())

    @property
    def recipe(self) -> Recipe:
        step = 1 / (self.problem.smoothness + self.problem.l2)
        return Recipe(lr=step, batch=1, steps=3000, momentum=0.0, warm_up=0.0, decay="constant")

    def make_model(self) -> nn.Module:
        with self.seeded():
            model = nn.Linear(self.problem.rows.shape[1], 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def start(self, model: nn.Module) -> None:
        # With fewer features, a larger shift moves the margins as far.
        shift = SHIFTS.get(self.dataset, 0.0) / (self.scaled(FEATURES) / FEATURES)
        if shift:
            with torch.no_grad():
                next(model.parameters()).copy_(self.problem.minimum[0] + shift)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        rows, signs = batch
        fit = softplus(-signs * model(rows).squeeze(1)).mean()
        return fit + self.problem.l2 / 2 * sum(part.square().sum() for part in model.parameters())

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, int]:
        rows, signs = batch
        margins = signs.double() * (rows.double() @ _weights(model))
        return float(softplus(-margins).sum()), len(rows)

    def value(self, mean: float, model: nn.Module) -> float:
        square = float(_weights(model).square().sum())
        return mean + self.problem.l2 / 2 * square - self.problem.minimum[1]


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([part.detach().double().flatten() for part in model.parameters()])


# One problem is cached, so that several runs in a process compute its minimum only once.
@functools.lru_cache(maxsize=1)
def _generated(samples: int, features: int, seed: int) -> Problem:
    rows, signs = _embedded.logistic(samples, features, seed)
    return Problem(torch.from_numpy(rows), torch.from_numpy(signs).float())


@functools.lru_cache(maxsize=1)
def _read(path: Path, features: int, limit: int) -> Problem:
    reader = (
        _tables.read_arrays
        if path.suffix == ".npz"
        else functools.partial(_tables.read_svmlight, features=features)
    )
    rows, signs = reader(path)
    if limit and len(set(signs[:limit].tolist())) < 2:
        raise DataError(f"{path} must hold two classes in its first {limit} rows, got one")
    if not rows[: limit or None].any():
        raise DataError(f"{path} must hold a feature other than 0, got none")
    return Problem(torch.from_numpy(rows[: limit or None]), torch.from_numpy(signs[: limit or None]).float())
