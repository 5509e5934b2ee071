"""Shards of the training examples, for any labels, number of workers and skew."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsieve_lab.tasks import shards

LABELS = st.lists(st.integers(-3, 9), min_size=1, max_size=200).map(torch.tensor)
SKEWS = st.floats(0, 1)


def labels_a_shard(parts: list[Tensor], labels: Tensor) -> float:
    return sum(len(labels[part].unique()) for part in parts) / len(parts)


@given(LABELS, st.integers(1, 20), SKEWS, st.integers(0, 5))
def test_equal_and_disjoint(labels: Tensor, workers: int, skew: float, seed: int) -> None:
    workers = min(workers, len(labels))
    parts = shards(labels, workers, skew, seed)
    assert [len(part) for part in parts] == [len(labels) // workers] * workers
    together = torch.cat(parts)
    assert len(together.unique()) == len(together)
    assert int(together.min()) >= 0
    assert int(together.max()) < len(labels)


@given(LABELS, SKEWS, st.integers(0, 5))
def test_the_seed_decides(labels: Tensor, skew: float, seed: int) -> None:
    torch.manual_seed(1)
    first = shards(labels, 1, skew, seed)
    torch.manual_seed(2)
    assert all(map(torch.equal, first, shards(labels, 1, skew, seed)))


def test_another_seed_splits_otherwise() -> None:
    labels = torch.arange(100) % 10
    assert not torch.equal(shards(labels, 4, 0.0, 0)[0], shards(labels, 4, 0.0, 1)[0])


def test_skew_sorts() -> None:
    labels = torch.arange(1000) % 10
    assert labels_a_shard(shards(labels, 10, 1.0), labels) == 1
    assert labels_a_shard(shards(labels, 10, 0.0), labels) > 9
    half = shards(labels, 10, 0.5)
    for part in half:
        assert int(labels[part].bincount().max()) >= 35


@given(LABELS, st.integers(2, 8))
def test_fully_skewed_shards_follow_each_other(labels: Tensor, workers: int) -> None:
    workers = min(workers, len(labels))
    parts = [labels[part] for part in shards(labels, workers, 1.0)]
    for before, after in pairwise(parts):
        assert int(before.max()) <= int(after.min())


@pytest.mark.parametrize(
    ("workers", "skew", "message"),
    [
        (4, 0.0, "workers must be at most 3, one training example each, got 4"),
        (0, 0.0, "workers must be at least 1, got 0"),
        (1, 1.5, r"skew must be in \[0, 1\], got 1.5"),
        (1, float("nan"), r"skew must be in \[0, 1\], got nan"),
    ],
)
def test_errors(workers: int, skew: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shards(torch.zeros(3), workers, skew)
