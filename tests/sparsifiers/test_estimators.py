"""Thresholds that are guessed, Gaussian-k's and SAGE's, and Accordion's regimes."""

import math

import pytest
import torch

from gradsieve.sparsifiers.accordion import AccordionState, changed
from gradsieve.sparsifiers.gaussiank import moments, normal_threshold
from gradsieve.sparsifiers.sage import SAGEState, beta, sample_size
from helpers import Group, gradients

N = 20_000


def test_moments() -> None:
    x = torch.randn(200_001) * 3 + 1
    assert moments(x) == pytest.approx((float(x.double().mean()), float(x.double().std(correction=0))))
    assert moments(torch.full((100_000,), 1e30)) == pytest.approx((1e30, 0.0), abs=1e24)
    assert moments(torch.zeros(5)) == (0, 0)


def test_normal_threshold() -> None:
    assert normal_threshold(0.0, 1.0, 0.05) == pytest.approx(1.959964, rel=1e-6)
    assert normal_threshold(-2.0, 3.0, 0.05) == normal_threshold(2.0, 3.0, 0.05) == pytest.approx(7.879892)


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_gaussiank_needs_no_adjustment_for_normal_gradients(density: float) -> None:
    group = Group("gaussiank", density, 2)
    group.step_lawfully(gradients("normal", N, 2, 0))
    assert group.reports[0].threshold == pytest.approx(normal_threshold(0, 1, density), rel=0.02)
    for count in group.reports[0].counts:
        assert 2 / 3 * density * N <= count <= 4 / 3 * density * N


def test_gaussiank_is_adjusted_where_the_guess_is_far_off() -> None:
    """A spike makes the first threshold too high: it is halved, which is too low, then raised, and both again."""
    group, grad = Group("gaussiank", 0.01, 1), gradients("normal", N, 1, 0)[0]
    grad[5] = 200.0
    group.step_lawfully([grad])
    mean, std = moments(grad)
    first = normal_threshold(mean, std, 0.01)
    tried = [first * factor for factor in (1, 0.5, 0.75, 0.375, 0.5625)]
    counts = [int((grad.abs() >= threshold).sum()) for threshold in tried]
    assert [count < 2 / 3 * 200 for count in counts[:4]] == [True, False, True, False]
    assert [count > 4 / 3 * 200 for count in counts[:4]] == [False, True, False, True]
    assert group.reports[0].threshold == pytest.approx(tried[-1])
    assert group.reports[0].counts == counts[-1:]


@pytest.mark.parametrize("constant", [0.25, -0.25])
def test_gaussiank_of_a_constant(constant: float) -> None:
    group = Group("gaussiank", 0.01, 1)
    group.step_lawfully([torch.full((N,), constant)])
    assert group.reports[0].counts == [N]
    group.step_lawfully([torch.zeros(N)])
    assert group.reports[0].counts == [0]


def test_sage_follows_the_scale_at_once() -> None:
    """The threshold is a multiple of the average magnitude, whatever that does from step to step."""
    group, threshold = Group("sage", 0.01, 1, threshold=2.5), 0.0
    reducer = group.reducers[0]
    for step, scale in enumerate((1.0, 100.0, 1e-3, 1.0)):
        if step:
            reducer.residual.zero_()
        group.step([scale * gradients("normal", N, 1, 0)[0]])
        threshold = group.reports[0].threshold or 0.0
        assert threshold / scale == pytest.approx(2.5, rel=0.2)  # the error of the samples
        assert group.reports[0].counts[0] / N == pytest.approx(0.0124, rel=0.9)


def test_sage_literal_rule() -> None:
    group = Group("sage", 0.01, 2, threshold=1.0)
    state = [(1.0, 0.0)] * 2
    for step in range(5):
        grads = gradients("normal", N, 2, step)
        accs = group.accumulators(grads)
        update = group.step(grads)[0]
        for rank, reducer in enumerate(group.reducers):
            before, average = state[rank]
            found = reducer.states.sparsifier
            assert isinstance(found, SAGEState)
            if step:
                alpha = found.average / average
                exam = float((accs[rank].abs() >= before * alpha).sum()) / N
                assert found.threshold == pytest.approx(before * alpha * 2 / (0.99975 + math.exp(0.01 - exam)))
            else:
                assert found.threshold == 1.0
            assert found.average == pytest.approx(float(accs[rank].abs().mean()), rel=0.2)
            assert bool((update[accs[rank].abs() >= found.threshold * 1.001] != 0).all())
            state[rank] = found.threshold, found.average


def test_sage_corrections() -> None:
    assert beta(0.01, 0.01) == pytest.approx(1.000125, rel=1e-6)
    assert beta(0.01, 0.5) > 1.1
    assert 0.99 < beta(0.01, 0.0) < 1
    assert [sample_size(n) for n in (1, 400, 10**9)] == [1, 200, 399]


def test_sage_comes_to_the_density() -> None:
    group = Group("sage", 0.05, 2)  # the start of the hard threshold's rule is far too low here
    for step in range(300):
        group.step(gradients("normal", 4_000, 2, step))
    assert group.reports[0].counts[0] == pytest.approx(200, rel=0.5)


def test_accordion_decides_by_the_norm_of_the_sum_of_updates() -> None:
    group, total = Group("accordion", 0.05, 3, high=2.0, interval=5), torch.zeros(1_000)
    norms, regimes = [0.0], [True]
    for step in range(25):
        scale = 1 + 9 * (step >= 15)
        total += group.step_lawfully([scale * grad for grad in gradients("normal", 1_000, 3, step)])
        assert group.reports[0].counts == [100 if regimes[-1] else 50] * 3
        if step % 5 == 4:
            norms.append(float(total.double().norm()))
            regimes.append(changed(norms[-2], norms[-1], 0.5))
            total.zero_()
            state = group.reducers[0].states.sparsifier
            assert isinstance(state, AccordionState)
            assert state.norm == pytest.approx(norms[-1])
            assert not state.total.any()
            assert len({reducer.states.sparsifier.fingerprint() for reducer in group.reducers}) == 1
    assert regimes == [True, True, False, False, True, False]


def test_changed() -> None:
    assert changed(0.0, 0.0, 0.5)
    assert changed(1.0, 1.5, 0.5)
    assert changed(1.0, 0.5, 0.5)
    assert not changed(1.0, 1.4, 0.5)
