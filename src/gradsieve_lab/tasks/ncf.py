"""Recommendation by NeuMF; the metric is how often a held-out item is among the first ten.

He et al., "Neural Collaborative Filtering", WWW 2017.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gradsieve_lab.tasks import _embedded, _files
from gradsieve_lab.tasks._tables import read_ratings
from gradsieve_lab.tasks.base import Batch, Data, DataError, Metric, Recipe, Task

NEGATIVES = 4  # items per training example that the user has not chosen
RIVALS = 99  # such items against which the held-out one is ranked
FIRST = 10
REDRAWS = 3
FACTORS, UNITS = 16, 64


@dataclass
class NCF(Task):
    """An example is a user and an item that the user chose. The last choice of each user is held out."""

    METRIC: ClassVar[Metric] = Metric(f"hit rate@{FIRST}", higher_is_better=True, percent=True)
    DATASETS: ClassVar[tuple[str, ...]] = ("generated", "ml-100k")
    MODELS: ClassVar[tuple[str, ...]] = ("neumf",)

    def check_files(self) -> None:
        if self.dataset == "ml-100k":
            _files.find(self.data_dir, self.dataset, "ml-100k/u.data")

    def load(self) -> Data:
        if self.dataset == "generated":
            pairs = _embedded.ratings(self.seed)
        else:
            pairs = read_ratings(_files.find(self.data_dir, self.dataset, "ml-100k/u.data"))
        self.users, self.items = (int(many) + 1 for many in pairs.max(axis=0))
        last = np.zeros(len(pairs), dtype=bool)
        last[len(pairs) - 1 - np.unique(pairs[::-1, 0], return_index=True)[1]] = True
        rng = np.random.default_rng(self.seed)
        train = rng.permutation(pairs[~last])[: self.limit or None]
        chosen = np.zeros((self.users, self.items), dtype=bool)
        chosen[pairs[:, 0], pairs[:, 1]] = True
        test = [
            (user, item, *np.resize(rng.permutation(np.flatnonzero(~chosen[user])), RIVALS))
            for user, item in pairs[last][: self.limit or None]
            if not chosen[user].all()
        ]
        if not len(train) or not test:
            raise DataError(
                f"dataset {self.dataset} must hold a user's two choices and an item not chosen, got none"
            )
        held_out = torch.tensor(np.array(test))
        self.chosen = torch.from_numpy(chosen)
        users, items = torch.from_numpy(train[:, 0].copy()), torch.from_numpy(train[:, 1].copy())
        return Data((users, items), (held_out[:, 0], held_out[:, 1:]), users)

    @property
    def recipe(self) -> Recipe:
        steps = 1000 if self.dataset == "generated" else 2000
        return Recipe(lr=5e-3, batch=64, steps=steps, optimizer="adam", base_batch=256)

    def make_model(self) -> nn.Module:
        with self.seeded():
            return NeuMF(self.users, self.items, self.scaled(FACTORS), self.scaled(UNITS, multiple=4))

    def batch(self, data: Data, indices: Tensor, generator: torch.Generator) -> Batch:
        """Users, and for each user the chosen item followed by others."""
        users, items = super().batch(data, indices, generator)
        others = torch.randint(self.items, (len(users), NEGATIVES), generator=generator)
        for _ in range(REDRAWS):
            again = torch.randint(self.items, others.shape, generator=generator)
            others = torch.where(self.chosen[users[:, None], others], again, others)
        return users, torch.cat([items[:, None], others], dim=1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(*batch)
        truth = torch.zeros_like(logits)
        truth[:, 0] = 1
        return nn.functional.binary_cross_entropy_with_logits(logits, truth)

    def score(self, model: nn.Module, batch: Batch) -> tuple[float, int]:
        logits = model(*batch)
        before = ~(logits[:, 1:] < logits[:, :1])  # a tie or NaN is not a hit
        return float((before.sum(1) < FIRST).sum()), len(logits)


class NeuMF(nn.Module):
    """A product of factors beside an MLP. Users are of shape (batch), items and logits of (batch, many)."""

    def __init__(self, users: int, items: int, factors: int, units: int) -> None:
        super().__init__()
        self.user_factors, self.item_factors = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.user_units, self.item_units = nn.Embedding(users, units // 2), nn.Embedding(items, units // 2)
        self.tower = nn.Sequential(
            nn.Linear(units // 2 * 2, units // 2),
            nn.ReLU(),
            nn.Linear(units // 2, units // 4),
            nn.ReLU(),
        )
        self.out = nn.Linear(factors + units // 4, 1)
        for table in (self.user_factors, self.item_factors, self.user_units, self.item_units):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        product = self.user_factors(users)[:, None] * self.item_factors(items)
        user_units = self.user_units(users)[:, None].expand(-1, items.shape[1], -1)
        tower = self.tower(torch.cat([user_units, self.item_units(items)], dim=-1))
        logits: Tensor = self.out(torch.cat([product, tower], dim=-1))
        return logits.squeeze(-1)
