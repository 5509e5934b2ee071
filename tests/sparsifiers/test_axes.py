"""Every feedback works with every sparsifier, and a budget with every one that shows its magnitudes."""

import pytest
import torch
from torch import Tensor

from gradsieve import SPARSIFIERS
from gradsieve.density import Budget
from gradsieve.feedback import Feedback, LowPass, Momentum, Plain
from helpers import LIBRARY, Group, eventful, gradients

WORLD, SIZES = 3, [700, 100, 1_200]
N, DENSITY, K = 2_000, 0.02, 40
FEEDBACKS: list[Feedback] = [Plain(), Momentum(0.9), LowPass(0.3)]
SHOWN = [name for name in LIBRARY if SPARSIFIERS[name].SHOWS_MAGNITUDES]


def total(vectors: list[Tensor]) -> Tensor:
    return torch.stack(vectors).double().sum(0)


def check_states(group: Group) -> None:
    """What is shared is the same on all workers, and all is finite."""
    assert len({reducer.states.sparsifier.fingerprint() for reducer in group.reducers}) == 1
    for reducer in group.reducers:
        tensors = [reducer.residual]
        for part in reducer.states.to_dict().values():
            tensors += [value for value in part.values() if isinstance(value, Tensor)]
        assert all(bool(tensor.isfinite().all()) for tensor in tensors)


@pytest.mark.parametrize("feedback", FEEDBACKS[:2], ids=repr)
def test_nothing_is_lost_with_any_feedback_that_keeps_all(sparsifier: str, feedback: Feedback) -> None:
    group, moved = Group(sparsifier, DENSITY, WORLD, sizes=SIZES, feedback=feedback), torch.zeros(N)
    for step in range(14):
        moved += group.step_lawfully(eventful(N, WORLD, step)).abs()
        check_states(group)
    assert moved.any()


def test_a_low_pass_filter_keeps_its_part_of_what_was_not_sent(sparsifier: str) -> None:
    """`residual <- residual + beta * (grad - sent)`, as a sum over workers: then all of `sent` is in the update."""
    group = Group(sparsifier, DENSITY, WORLD, sizes=SIZES, feedback=LowPass(0.3))
    for step in range(14):
        grads = eventful(N, WORLD, step)
        before = total(group.residuals(N))
        updates = group.step(grads)
        assert all(torch.equal(update, updates[0]) for update in updates)
        # What was sent came from residual and gradient: beta of it is taken from what is kept.
        expected = before + 0.3 * (total(grads) - WORLD * updates[0].double())
        scale = float(total([grad.abs() for grad in grads]).max() + before.abs().max())
        torch.testing.assert_close(total(group.residuals(N)), expected, rtol=0, atol=1e-6 * scale)
        check_states(group)


@pytest.mark.parametrize("feedback", FEEDBACKS, ids=repr)
@pytest.mark.parametrize("name", SHOWN)
def test_a_budget_is_met_with_every_feedback(name: str, feedback: Feedback) -> None:
    steps, sent = 200, []
    group = Group(name, Budget(DENSITY, steps), WORLD, feedback=feedback)
    for step in range(steps):
        scale = 4.0 if 10 <= step < 20 else 0.5
        updates = group.step([grad * scale for grad in gradients("normal", N, WORLD, step)])
        assert all(torch.equal(update, updates[0]) for update in updates)
        sent.append(group.reports[0].union)
    check_states(group)
    assert sum(sent) == pytest.approx(K * steps, rel=0.02)
    assert sum(sent[10:20]) > 1.5 * 10 * K, "the surge was not sent as it came"
    assert max(sent) <= 20 * K


def test_budgets_are_for_those_that_show_magnitudes(sparsifier: str) -> None:
    if sparsifier in SHOWN:
        Group(sparsifier, Budget(DENSITY, 10), WORLD)
        return
    with pytest.raises(ValueError, match=f"a Budget needs a sparsifier with one threshold .*, got {sparsifier}$"):
        Group(sparsifier, Budget(DENSITY, 10), WORLD)


def test_who_shows_magnitudes() -> None:
    assert set(SHOWN) == {"exdyna", "micro", "shared_threshold"}
