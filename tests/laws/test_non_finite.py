"""A NaN or Inf in any gradient calls the step off on every worker, without a trace and without a collective."""

import math

import pytest
import torch

from helpers import Group, assert_same, gradients

N = 3_000


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_step_is_called_off_everywhere(sparsifier: str, world_size: int, bad: float) -> None:
    group, clean = Group(sparsifier, 0.01, world_size), Group(sparsifier, 0.01, world_size)
    for step in range(14):
        grads = gradients("normal", N, world_size, step)
        if step in (0, 1, 4, 12):
            poisoned = [grad.clone() for grad in grads]
            poisoned[step % world_size][(step * 997) % N] = bad
            before = group.states() if step else None
            updates = group.step(poisoned)
            assert all(not update.isfinite().any() for update in updates)
            assert all(not report.finite and report.step == step for report in group.reports)
            if before:
                assert_same(dict(enumerate(group.states())), dict(enumerate(before)))
        expected, found = clean.step(grads), group.step(grads)
        assert torch.equal(expected[0], found[0]), f"step {step} differs after a bad one"
        assert group.reports[0].collectives == clean.reports[0].collectives or step == 0
    assert_same(dict(enumerate(group.states())), dict(enumerate(clean.states())))


def test_no_additional_collective(sparsifier: str) -> None:
    group = Group(sparsifier, 0.01, 3)
    for step in range(3):
        group.step(gradients("normal", N, 3, step))
    state = group.states()
    grads = gradients("normal", N, 3, 3)
    group.step(grads)
    clean = group.reports[1]
    for reducer, saved in zip(group.reducers, state, strict=True):
        reducer.load_state_dict(saved)
    group.step(grads)  # the handshake after loading
    for reducer, saved in zip(group.reducers, state, strict=True):
        reducer.load_state_dict(saved)
        reducer._agreed = True
    grads[1][5] = math.nan
    group.step(grads)
    assert not group.reports[0].finite
    assert group.reports[1].collectives == clean.collectives


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(sparsifier: str, dtype: torch.dtype) -> None:
    group = Group(sparsifier, 0.01, 2)
    group.step([grad.to(dtype) for grad in gradients("normal", N, 2, 0)])
    before = group.states()
    grads = [grad.to(dtype) for grad in gradients("normal", N, 2, 1)]
    grads[1][17] = math.inf
    updates = group.step(grads)
    assert all(update.dtype == dtype and update.isnan().all() for update in updates)
    assert_same(dict(enumerate(group.states())), dict(enumerate(before)))


def test_sums_that_overflow(sparsifier: str) -> None:
    """Gradients may be finite and their sum over workers, or over steps, not."""
    group = Group(sparsifier, 0.01, 4)
    largest = torch.full((N,), 3e38)
    updates = group.step([largest.clone() for _ in range(4)])
    sent = group.reports[0].union
    if sent:
        assert all(update.isnan().all() for update in updates)
        assert all(not e.any() for e in group.residuals(N))
    group.step([torch.zeros(N) for _ in range(4)])


def test_bad_gradient_written_in_place(sparsifier: str) -> None:
    """`out` may be the gradient itself, which then also keeps the old residual during the step."""
    group = Group(sparsifier, 0.01, 2)
    twin = Group(sparsifier, 0.01, 2)
    for step in range(6):
        grads = gradients("normal", N, 2, step)
        expected = twin.step(grads)
        in_place = [grad.clone() for grad in grads]
        if step == 3:
            before = group.states()
            bad = [grad.clone() for grad in grads]
            bad[0][0] = math.nan
            group.world.run([r.reduce(g, out=g) for r, g in zip(group.reducers, bad, strict=True)])
            assert_same(dict(enumerate(group.states())), dict(enumerate(before)))
        found = group.world.run([r.reduce(g, out=g) for r, g in zip(group.reducers, in_place, strict=True)])
        assert found[0] is not grads[0]
        assert found[0].data_ptr() == in_place[0].data_ptr()
        assert torch.equal(found[0], expected[0])
    assert_same(dict(enumerate(group.states())), dict(enumerate(twin.states())))
