"""The division of training examples among workers."""

import torch
from torch import Tensor

from gradsieve._check import BadInput, at_least, number


def shards(labels: Tensor, workers: int, skew: float = 0.0, seed: int = 0) -> list[Tensor]:
    """Disjoint sets of indices, one per worker, of equal size; a remainder is left out.

    Args:
        labels: one integer per example.
        skew: the fraction of each shard that is taken from examples sorted by label; the remainder is random.
    """
    at_least("workers", workers, 1)
    if not 0 <= number("skew", skew) <= 1:
        raise BadInput(f"skew must be in [0, 1], got {skew}")
    if workers > len(labels):
        raise BadInput(f"workers must be at most {len(labels)}, one training example each, got {workers}")
    each = len(labels) // workers
    similar = round(skew * each)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[: each * workers]
    by_label, mixed = order[: similar * workers], order[similar * workers :]
    by_label = by_label[labels[by_label].argsort(stable=True)]
    return [torch.cat(parts) for parts in zip(by_label.view(workers, -1), mixed.view(workers, -1), strict=True)]
