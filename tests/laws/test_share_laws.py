"""Laws of sharing weights, for every sparsifier that can: replicas agree, nothing is lost, and limits are exact."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsieve import NonFiniteWeights, VirtualWorld, make_sparsifier
from gradsieve.share.average import average_
from helpers import LIBRARY, assert_same
from virtual_replicas import Workers, backward, make_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def works_on_weights(name: str) -> bool:
    return not make_sparsifier(name).for_gradients_only()


ABLE = [name for name in LIBRARY if works_on_weights(name)]


def effective(workers: Workers) -> Tensor:
    """The sum over workers of `shared - drift`: of the weights, with what `shared` holds beyond their precision."""
    parts = []
    for weights in (replica.weights for replica in workers.replicas):
        drift = weights.drift(weights.all, weights.read(weights.all))
        parts.append(weights.shared.double() - drift.double())
    return torch.stack(parts).sum(0)


def check_round(workers: Workers) -> None:
    """Make and apply a round: what all must have in common they have, and the sum of weights does not change."""
    before, size = effective(workers), max(float(w.abs().max()) for w in workers.weights())
    workers.driver.after_step()
    after, shared = effective(workers), workers.shared()
    assert all(torch.equal(each, shared[0]) for each in shared), "agreed weights differ"
    # A few roundings of float32 for each worker, and of the weights' own type.
    bound = len(shared) * size * (2**-21 + 2 * torch.finfo(next(workers.models[0].parameters()).dtype).eps)
    assert float((before - after).abs().max()) <= bound


@pytest.mark.parametrize("values", ["fp32", "fp8"])
def test_every_sparsifier_that_can(sparsifier: str, values: str) -> None:
    if not works_on_weights(sparsifier):
        with pytest.raises(
            ValueError, match=f"sparsifier must work on weights, got {type(make_sparsifier(sparsifier)).__name__}"
        ):
            Workers(2, sparsifier=sparsifier)
        return
    workers = Workers(3, 0.05, sparsifier, settings={"values": values})
    for step in range(6):
        workers.compute(step)
        check_round(workers)
        report = workers.replicas[0].report
        assert report is not None
        assert report.finite
        assert all(replica.report.counts == report.counts for replica in workers.replicas if replica.report)


def test_entries_are_judged_by_curvature_where_adam_knows_it() -> None:
    """Two entries drift alike; the one whose gradients are larger is exchanged."""
    workers = Workers(2, 1 / 392, optimizer=torch.optim.AdamW, lr=0.01)
    workers.step(0)
    for replica, optimizer in zip(workers.replicas, workers.optimizers, strict=True):
        parameter = next(iter(replica.weights.parameters.values()))
        replica.weights.write_(replica.weights.all, replica.weights.shared)
        optimizer.state[parameter]["exp_avg_sq"].fill_(1e-4)
        with torch.no_grad():
            parameter[0, :2] += torch.tensor([0.1, 0.09])
            optimizer.state[parameter]["exp_avg_sq"][0, 1] = 2e-4  # times its fourth root, 0.09 is more than 0.1
    before = workers.shared()[0]
    workers.driver.after_step()
    assert torch.where(before != workers.shared()[0])[0].tolist() == [1]


def test_weights_at_exchanged_positions_are_equal() -> None:
    for name in ("exdyna", "topk", "cltk"):
        workers = Workers(4, 0.1, name, lr=0.05, momentum=0.9)
        for step in range(6):
            before = workers.shared()[0]
            workers.step(step)
            moved = before != workers.shared()[0]
            assert moved.any()
            for weights in workers.weights():
                assert torch.equal(weights[moved], workers.shared()[0][moved])


@settings(max_examples=15)
@given(
    name=st.sampled_from(sorted(ABLE)),
    world_size=st.integers(1, 6),
    density=st.floats(0.003, 1.0),
    values=st.sampled_from(["fp32", "bf16", "fp8"]),
    dtype=st.sampled_from(DTYPES),
    delay=st.integers(0, 1),
    every=st.integers(1, 3),
)
def test_nothing_is_lost(
    name: str, world_size: int, density: float, values: str, dtype: torch.dtype, delay: int, every: int
) -> None:
    workers = Workers(
        world_size, density, name, delay=delay, dtype=dtype, settings={"values": values, "every": every}
    )
    for step in range(5):
        workers.compute(step)
        check_round(workers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_common_steps_add_up_in_narrow_types(dtype: torch.dtype) -> None:
    """One of four workers moves by its smallest step, again and again: the mean moves by a quarter each time."""
    workers = Workers(4, 1.0, "dense", dtype=dtype)
    first = workers.replicas[0].weights
    start, ulp = first.shared[0].item(), None
    for _ in range(8):
        parameter = next(workers.models[0].parameters())
        with torch.no_grad():
            above = torch.nextafter(parameter[0, 0], torch.tensor(math.inf, dtype=dtype))
            ulp = float(above) - float(parameter[0, 0])
            parameter[0, 0] = above
        workers.driver.after_step()
    assert first.shared[0].item() == pytest.approx(start + 2 * ulp, rel=1e-3)
    assert float(next(workers.models[3].parameters()).detach()[0, 0]) > start


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_density_one_equals_data_parallel_training(momentum: float) -> None:
    workers, plain = Workers(4, 1.0, lr=0.05, momentum=momentum), make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=momentum)
    for step in range(12):
        workers.step(step)
        optimizer.zero_grad()
        for rank in range(4):
            backward(plain, rank, step)
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter.grad /= 4
        optimizer.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
    for weights in workers.weights():
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("every", [1, 3, 4])
def test_density_one_equals_averaging_all_weights(every: int) -> None:
    workers, plain = Workers(3, 1.0, settings={"every": every}), Workers(3)
    for step in range(12):
        workers.step(step)
        plain.compute(step)
        if (step + 1) % every == 0:
            models = [list(model.parameters()) for model in plain.models]
            VirtualWorld(3).run([average_(parameters, 3) for parameters in models])
    for found, expected in zip(workers.weights(), plain.weights(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.05, 1.0])
def test_one_worker_is_plain_training(delay: int, dtype: torch.dtype, density: float) -> None:
    options = {"lr": 0.01} if dtype == torch.float16 else {"lr": 0.05, "momentum": 0.9}
    workers, plain = (Workers(1, density, delay=delay, dtype=dtype, **options) for _ in range(2))
    for step in range(10):
        workers.step(step)
        plain.compute(step)
    assert torch.equal(workers.weights()[0], plain.weights()[0])


def test_a_delayed_round_equals_ten_lines() -> None:
    """delay=1, exclusive by a fixed partition: picks of step t move the weights after step t + 1."""
    workers, plain = Workers(2, 0.1, "micro", delay=1), Workers(2)
    n = plain.replicas[0].weights.n
    shared, k, half, pending = plain.weights()[0].clone(), max(1, round(0.1 * n)), n // 2, None
    for step in range(9):
        workers.step(step)
        plain.compute(step)
        weights = plain.weights()
        if pending is not None:
            where, mean, owns = pending
            weights = [w.index_put((where,), w[where] + (mean - own)) for w, own in zip(weights, owns, strict=True)]
            shared[where] = mean
        drift = [shared - w for w in weights]
        first, second = (drift[0], drift[1]) if step % 2 == 0 else (drift[1], drift[0])
        judged = torch.cat([first[:half], second[half:]]).abs()
        where = judged.topk(k).indices.sort().values
        pending = (
            where,
            shared[where] - (drift[0][where] + drift[1][where]) / 2,
            [w[where].clone() for w in weights],
        )
        for replica, w in zip(plain.replicas, weights, strict=True):
            replica.weights.write_(replica.weights.all, w)
        assert torch.equal(workers.shared()[0], shared)
        assert all(torch.equal(a, b) for a, b in zip(workers.weights(), weights, strict=True)), f"step {step}"


@pytest.mark.parametrize("delay", [0, 1])
def test_saved_and_loaded_equals_never_stopped(sparsifier: str, delay: int) -> None:
    if not works_on_weights(sparsifier):
        pytest.skip(f"{sparsifier} {make_sparsifier(sparsifier).for_gradients_only()}")
    through, first, second = (Workers(3, 0.05, sparsifier, delay=delay) for _ in range(3))
    for step in range(5):
        through.step(step)
        first.step(step)
    for old, new in zip(first.replicas, second.replicas, strict=True):
        new.load_state_dict(old.state_dict())
    if first.driver.pending is not None:
        pairs = zip(first.driver.pending, first.replicas, strict=True)
        states = [old.made_state(found) for found, old in pairs]
        loaded = [new.load_made_state(state) for state, new in zip(states, second.replicas, strict=True)]
        second.driver.pending = [found for found in loaded if found is not None]
    for step in range(5, 11):
        through.step(step)
        second.step(step)
    for old, new in zip(through.replicas, second.replicas, strict=True):
        assert_same(new.state_dict(), old.state_dict())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["exdyna", "topk", "dense"])
def test_weights_that_are_not_finite(name: str, bad: float) -> None:
    workers = Workers(3, 0.1, name)
    for step in range(3):
        workers.step(step)
    before = workers.shared()
    workers.compute(3)
    with torch.no_grad():
        for parameter in workers.models[1].parameters():
            parameter.fill_(bad)
    others = workers.weights()
    with pytest.raises(NonFiniteWeights, match=r"not finite after step 4: \S+ of rank 1; nothing was averaged"):
        workers.driver.after_step()
    assert all(torch.equal(a, b) for a, b in zip(before, workers.shared(), strict=True))
    assert torch.equal(others[0], workers.weights()[0])


def test_a_replica_that_is_not_finite_is_restored() -> None:
    workers = Workers(3, 0.1, settings={"on_nonfinite": "restore"})
    for step in range(3):
        workers.step(step)
    workers.compute(3)
    with torch.no_grad():
        next(workers.models[2].parameters()).fill_(math.nan)
    workers.driver.after_step()
    assert torch.equal(workers.weights()[2], workers.shared()[0])
    assert all(replica.report and replica.report.restored == [2] for replica in workers.replicas)
    for step in range(4, 8):
        workers.compute(step)
        check_round(workers)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"dense_steps": -1}, "dense_steps must be at least 0, got -1"),
        ({"values": "fp4"}, "values must be one of fp32, bf16, fp8, got 'fp4'"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of raise, restore, got 'ignore'"),
    ],
)
def test_bad_settings(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Workers(2, settings=change)


def test_bad_delay() -> None:
    with pytest.raises(ValueError, match="delay must be one of 0, 1, got 2"):
        Workers(2, delay=2)


def test_foreign_state_changes_nothing() -> None:
    workers, other = Workers(2), Workers(2)
    workers.step(0)
    before = workers.replicas[0].state_dict()
    state = {**other.replicas[0].state_dict(), "world_size": 3}
    with pytest.raises(ValueError, match="this replica's world_size, 2, got 3"):
        workers.replicas[0].load_state_dict(state)
    assert_same(workers.replicas[0].state_dict(), before)
