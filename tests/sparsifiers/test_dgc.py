"""DGC: momentum before the exchange, which waits with the gradient, and thresholds read off samples."""

import math

import pytest
import torch

from gradsieve import dgc_warm_up
from gradsieve.comm.step import Step
from gradsieve.sparsifiers.dgc import sampled_threshold
from helpers import KINDS, Group, assert_same, check_loss_scale, gradients, run_in_pieces

N = 2_000


def velocities(group: Group) -> list[torch.Tensor]:
    return [state["state"]["feedback"]["velocity"] for state in group.states()]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_density_one_is_sgd_with_momentum(momentum: float) -> None:
    """Of the mean gradient, with an optimizer that has no momentum itself."""
    group, weights = Group("dgc", 1.0, 4, momentum=momentum), torch.randn(N)
    ours, theirs = (torch.nn.Parameter(weights.clone()) for _ in range(2))
    plain = torch.optim.SGD([ours], lr=0.1)
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=momentum)
    for step in range(20):
        grads = gradients("normal", N, 4, step)
        ours.grad = group.step_lawfully(grads)
        theirs.grad = torch.stack(grads).mean(0)
        plain.step()
        reference.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert all(not e.any() for e in group.residuals(N))


def test_literal_rule() -> None:
    """Against the paper's lines, with the positions that were sent."""
    group = Group("dgc", 0.02, 3, momentum=0.9)
    u, v = torch.zeros(3, N), torch.zeros(3, N)
    for step in range(30):
        grads = gradients("normal", N, 3, step)
        u = 0.9 * u + torch.stack(grads)
        v = v + u
        update = group.step(grads)[0]
        sent = update != 0
        torch.testing.assert_close(update[sent], v[:, sent].mean(0))
        u[:, sent] = 0
        v[:, sent] = 0
        for rank in range(3):
            torch.testing.assert_close(group.residuals(N)[rank], v[rank])
            torch.testing.assert_close(velocities(group)[rank], u[rank])


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"zeros", "few"}))
@pytest.mark.parametrize("density", [0.001, 0.02, 0.3])
def test_count_is_near_k(kind: str, density: float) -> None:
    group = Group("dgc", density, 2)
    for step in range(6):
        group.step_lawfully(gradients(kind, 20_000, 2, step))
        for count in group.reports[0].counts:
            assert 0.8 * group.reports[0].k <= count <= 1.3 * group.reports[0].k
        assert group.reports[0].threshold is not None


def test_zeros_are_not_sent() -> None:
    group, grad = Group("dgc", 0.1, 1), torch.zeros(1_000)
    grad[[3, 500]] = torch.tensor([2.0, -1.0])
    assert torch.equal(group.step([grad])[0], grad)
    assert group.reports[0].counts == [2]


def test_samples_are_enough_and_move_on() -> None:
    acc = torch.arange(100_000.0)
    assert sampled_threshold(acc, Step(0, 100_000, 1_000, 0, 1)) == pytest.approx(99_000, rel=0.01)
    # 2/d = 20,000 samples: every fifth element.
    assert sampled_threshold(acc, Step(0, 100_000, 10, 0, 1)) == 99_990
    assert sampled_threshold(acc, Step(6, 100_000, 10, 0, 1)) == 99_991


def test_a_step_that_is_called_off_leaves_the_momentum() -> None:
    group = Group("dgc", 0.01, 2)
    for step in range(4):
        group.step(gradients("normal", N, 2, step))
    before, grads = group.states(), gradients("normal", N, 2, 9)
    grads[1][7] = math.inf
    run_in_pieces(group, grads, [0, 500, N], {})
    assert not group.reports[0].finite
    assert_same(dict(enumerate(group.states())), dict(enumerate(before)))
    group.reducers[0].begin()
    group.reducers[0].add(grads[0], 0, grads[0])
    group.reducers[0].abandon()
    assert_same(group.reducers[0].state_dict(), before[0])


def test_momentum_of_parts_that_are_held_back_waits() -> None:
    group, edges = Group("dgc", 0.05, 2), [0, 400, 1_000]
    for step in range(5):
        run_in_pieces(group, gradients("normal", 1_000, 2, step), edges, {})
    before, grads = velocities(group), gradients("normal", 1_000, 2, 99)
    grads[0][400:] = 0
    run_in_pieces(group, grads, edges, {0: {1}})
    after = velocities(group)
    assert torch.equal(after[0][400:], before[0][400:])
    assert not torch.equal(after[0][:400], before[0][:400])
    assert not torch.equal(after[1][400:], before[1][400:])


def test_clipping_follows_the_loss_scale() -> None:
    check_loss_scale(Group("dgc", 0.05, 2, clip=20.0), Group("dgc", 0.05, 2, clip=20.0))


def test_clipping_by_tensor() -> None:
    """A norm of `clip / sqrt(P)` for each tensor, whatever the pieces in which they come."""
    sizes, edges = [300, 500, 200], [0, 300, 1_000]
    groups = [Group("dgc", 0.05, 4, sizes=sizes, clip=3.0, momentum=0.5) for _ in range(2)]
    u, v = torch.zeros(4, 1_000), torch.zeros(4, 1_000)
    for step in range(6):
        grads = gradients("normal", 1_000, 4, step)
        for grad in grads:
            grad[300:800] *= 1e-3  # small enough to pass as it is
        parts = [part for grad in grads for part in grad.split(sizes)]
        clipped = torch.cat([part * min(1.0, 1.5 / float(part.norm())) for part in parts]).view(4, 1_000)
        u = 0.5 * u + clipped
        v = v + u
        update = groups[0].step(grads)[0]
        assert torch.equal(run_in_pieces(groups[1], grads, edges, {})[0], update)
        torch.testing.assert_close(update[update != 0], v.mean(0)[update != 0])
        u[:, update != 0] = 0
        v[:, update != 0] = 0
        torch.testing.assert_close(torch.stack(groups[0].residuals(1_000)), v)


def test_warm_up() -> None:
    """The paper's densities come from a schedule; the momentum goes on through all of them."""
    group = Group("dgc", dgc_warm_up(0.001, steps_per_epoch=2), 2)
    densities = []
    for step in range(10):
        group.step_lawfully(gradients("normal", 20_000, 2, step))
        densities.append(group.reports[0].k / 20_000)
    assert densities == [0.25, 0.25, 0.0625, 0.0625, 0.0156, 0.0156, 0.004, 0.004, 0.001, 0.001]
