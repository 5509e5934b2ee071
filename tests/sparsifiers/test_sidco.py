"""SIDCo's fits against samples of known distributions."""

import math

import numpy
import pytest
import scipy.stats
import torch
from torch import Tensor

from gradsieve.sparsifiers.sidco import SIDCoState, fit_threshold
from helpers import Group, gradients

SAMPLES, DENSITY = 2_000_000, 0.001


def draw(name: str) -> Tensor:
    """The quantiles of a distribution: samples without the noise of sampling, which would exceed 10 % at 0.09."""
    inverse = {"laplace": scipy.stats.laplace, "gaussian": scipy.stats.norm, "student-t 3": scipy.stats.t(3)}[
        name
    ].ppf
    return torch.tensor(inverse((numpy.arange(SAMPLES) + 0.5) / SAMPLES), dtype=torch.float32)


# Actual over target density for 1, 2, 3 and 4 stages, to two places.
@pytest.mark.parametrize(
    ("samples", "distribution", "expected"),
    [
        ("laplace", "exponential", (1.00, 1.00, 1.00, 1.00)),
        ("gaussian", "exponential", (0.0, 0.09, 0.71, 1.06)),
        ("gaussian", "pareto", (6.8, 1.21, 0.91, 0.93)),
        ("student-t 3", "pareto", (1.46, 0.95, 0.93, 0.94)),
    ],
)
def test_actual_over_target(samples: str, distribution: str, expected: tuple[float, ...]) -> None:
    x = draw(samples).abs()
    for stages, ratio in enumerate(expected, start=1):
        threshold = fit_threshold(x, DENSITY, stages, distribution)
        actual = float((x > threshold).double().mean()) / DENSITY
        assert actual == pytest.approx(ratio, abs=0.1 * ratio + 0.005), f"{stages} stages"


def test_gamma_fits_an_exponential_distribution() -> None:
    """A gamma distribution of shape 1 is the exponential one, so both fits must agree on Laplace samples."""
    x = draw("laplace").abs()
    for stages in (1, 2):
        actual = float((x > fit_threshold(x, DENSITY, stages, "gamma")).double().mean()) / DENSITY
        assert actual == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("distribution", ["exponential", "pareto", "gamma"])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_degenerate_vectors(distribution: str, stages: int) -> None:
    assert fit_threshold(torch.zeros(100), DENSITY, stages, distribution) == math.inf
    for x in (torch.ones(100), torch.full((100,), 1e30), torch.full((100,), 1e-40), torch.eye(10).flatten()):
        for density in (0.001, 0.25, 0.9):
            assert fit_threshold(x, density, stages, distribution) >= 0


def test_scale_does_not_matter() -> None:
    x = draw("gaussian").abs()[:10_000]
    for distribution in ("exponential", "pareto", "gamma"):
        one = fit_threshold(x, 0.01, 3, distribution)
        assert fit_threshold(x * 2.0**80, 0.01, 3, distribution) == pytest.approx(one * 2.0**80)


def stages(group: Group) -> int:
    state = group.reducers[0].states.sparsifier
    assert isinstance(state, SIDCoState)
    return state.stages


def test_stages_adapt() -> None:
    """Gaussian gradients need more than one exponential stage; their number settles where the density is right."""
    group = Group("sidco", 0.01, 1)
    for step in range(60):
        group.step([gradients("normal", 50_000, 1, step)[0]])
    assert 1 < stages(group) <= math.ceil(math.log2(1 / 0.01))


def test_stages_do_not_adapt_when_told_so() -> None:
    group = Group("sidco", 0.01, 1, adapt=False, stages=2)
    for step in range(12):
        group.step(gradients("normal", 5_000, 1, step))
    assert stages(group) == 2
