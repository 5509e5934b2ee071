"""At density 1 every sparsifier is a mean all-reduce."""

import pytest
import torch

from helpers import PLAIN, Group, gradients


@pytest.mark.parametrize("n", [1, 33, 32_769])
@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_equals_the_mean(sparsifier: str, n: int, world_size: int) -> None:
    group = Group(sparsifier, 1.0, world_size, **PLAIN.get(sparsifier, {}))
    for step in range(3):
        grads = gradients("normal", n, world_size, step)
        update = group.step_lawfully(grads)
        mean = sum(grads[1:], grads[0].clone()) / world_size
        assert torch.equal(update, mean)
        assert all(not e.any() for e in group.residuals(n))
        report = group.reports[0]
        assert report.density == 1
        assert report.selected == n
        assert report.residual_norm == 0


def test_dense_at_any_density() -> None:
    group = Group("dense", 0.001, 3)
    grads = gradients("normal", 1_000, 3, 0)
    assert torch.equal(group.step_lawfully(grads), (grads[0] + grads[1] + grads[2]) / 3)
