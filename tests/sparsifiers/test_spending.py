"""Budgets: what is sent over a run is what was asked for, whatever gradients do; and no step is out of bounds."""

import math
from typing import Any

import pytest
import studies.sparsifiers  # noqa: F401  # fixed and still forms of ExDyna
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import ops
from gradsieve.density import Budget
from gradsieve.density.budget import LEARNING, RESERVE
from helpers import Group, assert_same, gradients

N, DENSITY, K = 2_000, 0.01, 20


def budget(total_steps: int, world_size: int = 2, **options: float) -> Group:
    return Group("exdyna", Budget(DENSITY, total_steps, **options), world_size)


def curve(step: int, total: int, exponent: float, jump: float) -> float:
    """Gradients that grow or shrink over the run, and jump in the middle of it."""
    return ((step + 1) / total) ** exponent * (jump if step > total // 2 else 1.0)


@settings(max_examples=8, deadline=None)
@given(
    total=st.integers(200, 260),
    exponent=st.floats(-2, 2),
    jump=st.sampled_from([0.01, 0.1, 1.0, 10.0, 100.0]),
    world_size=st.sampled_from([1, 2, 3]),
)
def test_the_total_is_the_budget(total: int, exponent: float, jump: float, world_size: int) -> None:
    group, sent = budget(total, world_size), []
    for step in range(total):
        grads = gradients("normal", N, world_size, step % 40)
        group.step([grad * curve(step, total, exponent, jump) for grad in grads])
        assert group.reports[0].collectives == 3
        sent.append(group.reports[0].union)
    assert abs(sum(sent) / (K * total) - 1) <= 0.02
    assert max(sent) <= 20 * K


def test_more_is_sent_while_gradients_surge_and_nothing_is_lost() -> None:
    group, sent = budget(300), []
    for step in range(300):
        scale = 5.0 if 10 <= step < 30 else 0.3
        group.step_lawfully([grad * scale for grad in gradients("normal", N, 2, step)])
        sent.append(group.reports[0].union)
    assert sum(sent[10:30]) > 1.5 * 20 * K
    assert max(sent[30:]) - min(sent[30:]) <= 1, "every later step sends an equal share of what is left"
    assert RESERVE * K - 1 <= min(sent[30:]) < K
    assert sum(sent) == pytest.approx(300 * K, rel=0.02)


def test_dense_steps_teach_nothing() -> None:
    """The first eight sparse steps send the mean, whatever gradients do, after any number of dense ones."""
    for dense_steps in (0, 5, 10):
        group, sent = Group("exdyna", Budget(DENSITY, 300), 2, dense_steps=dense_steps), []
        for step in range(dense_steps + 12):
            scale = 5.0 ** max(0, step - dense_steps - 2)
            group.step([grad * scale for grad in gradients("normal", N, 2, step)])
            sent.append(group.reports[0].union)
        assert sent[: dense_steps + LEARNING] == [N] * dense_steps + [K] * LEARNING
        assert max(sent[dense_steps + LEARNING :]) > K


def test_what_is_a_surge_does_not_depend_on_the_length_of_the_run() -> None:
    def sent(total: int) -> list[int]:
        group, counts = budget(total), []
        for step in range(40):
            group.step([grad * (2.0 if step >= 10 else 1.0) for grad in gradients("normal", N, 2, step)])
            counts.append(group.reports[0].union)
        return counts

    usual, long = sent(480), sent(4_800)
    assert sum(long) > 1.5 * 40 * K
    assert max(abs(one - other) for one, other in zip(usual, long, strict=True)) <= 1, "but for the mean"


@pytest.mark.parametrize("shrinks", [0.9, 0.97])
def test_without_a_surge_every_step_sends_the_mean(shrinks: float) -> None:
    group, sent = budget(300), []
    for step in range(50):
        group.step([grad * shrinks**step for grad in gradients("normal", N, 2, step)])
        sent.append(group.reports[0].union)
    assert sent == [K] * 50


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize(("drift", "noise", "later", "times"), [(1.0, 0.1, 0.9, 10), (0.2, 1.0, 1.0, 5)])
def test_where_residuals_fill_but_gradients_do_not_surge_a_budget_is_a_constant(
    drift: float, noise: float, later: float, times: int, world_size: int
) -> None:
    """Thresholds rise many times over, since gradients have a direction in common, and yet all is as with a
    constant density: where gradients become smaller, or where residuals fill no faster than the level rises."""
    steady, group = Group("exdyna", DENSITY, world_size), budget(480, world_size)
    direction = torch.randn(N, generator=torch.Generator().manual_seed(7))
    for step in range(60):
        scale = 1.0 if step < 8 else later
        grads = [scale * (drift * direction + noise * each) for each in gradients("normal", N, world_size, step)]
        one, other = steady.step([grad.clone() for grad in grads])[0], group.step(grads)[0]
        assert torch.equal(one, other), f"step {step}"
    assert steady.reports[0].threshold is not None
    assert steady.reports[0].threshold > times * float(grads[0].abs().quantile(1 - DENSITY))


@pytest.mark.parametrize("alive", [20, 60])
def test_what_is_alive_is_sent_and_the_total_met_where_most_of_a_gradient_dies(alive: int) -> None:
    """As units of a network do: zeros nearly everywhere, crumbs at some places, and few elements of any size."""
    total, world_size, density = 300, 4, 2 * DENSITY
    group, sent = Group("exdyna", Budget(density, total), world_size), 0
    places = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    for step in range(total):
        grads = gradients("normal", N, world_size, step)
        for rank, grad in enumerate(grads if step >= 20 else []):
            some = torch.rand(alive, generator=torch.Generator().manual_seed(100 * step + rank)) < 0.4
            grad[places[:alive]] *= some
            grad[places[alive : alive + 400]] *= 10.0 ** -(6 + rank)
            grad[places[alive + 400 :]] = 0
        group.step(grads)
        sent += group.reports[0].union
        if step > total // 2:
            assert max(float(reducer.residual.abs().max()) for reducer in group.reducers) < 5.5, f"step {step}"
    assert sent == pytest.approx(total * density * N, rel=0.02)


@pytest.mark.parametrize("ceiling", [1.0, 2.0, 20.0])
def test_no_step_is_above_the_ceiling(ceiling: float) -> None:
    group = budget(200, ceiling=ceiling)
    for step in range(200):
        scale = 1000.0 if step % 50 == 10 else 1.0
        group.step([grad * scale for grad in gradients("normal", N, 2, step)])
        assert group.reports[0].union <= math.floor(ceiling * K)


@pytest.mark.parametrize("later", [150, 400])
def test_the_total_follows_a_changed_end(later: int) -> None:
    group, sent = budget(250), 0
    for step in range(later):
        if step == 100:
            for reducer in group.reducers:
                reducer.set_density(Budget(DENSITY, later))
        group.step(gradients("normal", N, 2, step))
        sent += group.reports[0].union
    assert sent == pytest.approx(later * K, rel=0.02)


def test_a_run_that_goes_on_past_its_end_is_steady() -> None:
    group = budget(200)
    for step in range(230):
        group.step(gradients("normal", N, 2, step))
        if step >= 201:
            assert group.reports[0].union == K


def surging(step: int) -> list[Tensor]:
    return [grad * (1 + step % 30) for grad in gradients("normal", N, 2, step)]


def test_saved_and_loaded_equals_never_stopped() -> None:
    through, first, second = budget(200), budget(200), budget(200)
    for step in range(60):
        through.step(surging(step))
        first.step(surging(step))
    for reducer, state in zip(second.reducers, first.states(), strict=True):
        reducer.load_state_dict(state)
    for step in range(60, 120):
        assert torch.equal(through.step(surging(step))[0], second.step(surging(step))[0])
    for one, other in zip(through.states(), second.states(), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("total", [150, 260])
def test_a_loaded_run_ends_where_its_own_budget_says(total: int) -> None:
    """What was spent is loaded; how long the run is, the constructor says."""
    first, second, sent = budget(200), budget(total), 0
    for step in range(60):
        first.step(surging(step))
        sent += first.reports[0].union
    assert sent > 1.1 * 60 * K
    for reducer, state in zip(second.reducers, first.states(), strict=True):
        reducer.load_state_dict(state)
    for step in range(60, total):
        second.step(surging(step))
        sent += second.reports[0].union
    assert sent == pytest.approx(total * K, rel=0.02)


@pytest.mark.parametrize("steps", [0, 12, 30])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_called_off_costs_nothing(steps: int, bad: float) -> None:
    group = budget(200)
    group.step(gradients("normal", N, 2, 0))
    for step in range(1, steps):
        group.step(gradients("normal", N, 2, step))
    before = group.states()
    broken = gradients("normal", N, 2, steps)
    broken[1][7] = bad
    group.step(broken)
    assert not group.reports[0].finite
    assert_same(dict(enumerate(group.states())), dict(enumerate(before)))


@pytest.mark.parametrize("change", [4, 14, 30])
def test_loss_scales_do_not_matter(change: int) -> None:
    """Neither before, nor in, nor after a surge of gradients."""
    small, large, sent = budget(200), budget(200), []
    for step in range(60):
        grads = [grad * (4.0 if 10 <= step < 18 else 1.0) for grad in gradients("normal", N, 2, step)]
        if step == change:
            for reducer in large.reducers:
                reducer.rescale(4096.0)
        factor = 1.0 if step < change else 4096.0
        one, other = small.step(grads)[0], large.step([grad * factor for grad in grads])[0]
        assert torch.equal(one * factor, other), f"step {step}"
        sent.append(small.reports[0].union)
    assert max(sent) > 2 * K


def test_gradients_too_large_for_their_energy_are_spent_like_others() -> None:
    usual, huge = budget(200), budget(200)
    for step in range(40):
        grads = gradients("normal", N, 2, step)
        one, other = usual.step(grads)[0], huge.step([grad * 2.0**100 for grad in grads])[0]
        assert torch.equal(one * 2.0**100, other), f"step {step}"


@pytest.mark.parametrize("threshold", [0.5, 1.0, 3.0])
def test_a_fixed_threshold_sends_what_lies_above_it(threshold: float) -> None:
    group, edge = (
        Group("fixed_exdyna", DENSITY, 1, threshold=threshold),
        ops.bin_edge(ops.bin_of(threshold)),
    )
    for step in range(40):
        grads = gradients("normal" if step % 10 else "zeros", N, 1, step)
        acc = group.residuals(N)[0] + grads[0]
        group.step_lawfully(grads)
        assert group.reports[0].union == int((acc.abs() >= edge).sum())


def test_without_rotation_a_worker_sends_from_its_own_partition_only() -> None:
    group = Group("still_exdyna", DENSITY, 2)
    for step in range(5):
        grads = gradients("normal", N, 2, step)
        grads[0][N // 2 :] = 100.0  # large, but not worker 0's to judge
        assert (group.step_lawfully(grads)[: N // 2] != 0).any()
        assert int((group.residuals(N)[0][N // 2 :] >= 100).sum()) > N // 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"total_steps": 0}, "total_steps must be at least 1, got 0"),
        ({"total_steps": 2.5}, "total_steps must be a whole number, got 2.5"),
        ({"total_steps": 9, "ceiling": 0.5}, "ceiling must be at least 1 and finite, got 0.5"),
        ({"total_steps": 9, "ceiling": math.inf}, "ceiling must be at least 1 and finite, got inf"),
        ({"total_steps": 9, "ceiling": math.nan}, "ceiling must be at least 1 and finite, got nan"),
        ({"total_steps": 9, "ceiling": "x"}, "ceiling must be a number, got 'x'"),
        ({"total_steps": 9, "density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
    ],
)
def test_bad_input(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        Budget(**{"density": DENSITY, **options})
