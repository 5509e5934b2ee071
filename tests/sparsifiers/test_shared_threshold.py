"""The shared threshold: everybody judges everything, and their picks are k positions, within 5 %, in every step."""

import math
from typing import Any

import pytest
import studies.sparsifiers  # noqa: F401  # the oracle
import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.step import Decision, Exactly, Magnitudes, Step
from gradsieve.sparsifiers.exdyna.threshold import BINS, ThresholdState
from gradsieve.sparsifiers.histograms import Histograms, row
from gradsieve.sparsifiers.shared_threshold import (
    Overlapping,
    PicksDecision,
    SharedThresholdState,
    _asked,
    _learned,
    largest_beside,
    most_voted,
)
from gradsieve.states import State
from helpers import EVENTFUL_STEPS, Group, assert_same, eventful, gradients

NAME = "shared_threshold"
N, K = 20_000, 200


def learned(group: Group) -> SharedThresholdState:
    state = group.reducers[0].states.sparsifier
    assert isinstance(state, SharedThresholdState)
    return state


def picks(state: SharedThresholdState, step: Step) -> int:
    """How many picks of all workers together are asked for."""
    return _asked(state, step).quota.expected


def histogram(values: Tensor) -> Histograms:
    start = ops.bin_of(0.1)
    return Histograms(row(ops.log_histogram(values), start, start, BINS)[None])


def at(index: int, k: int = K, world_size: int = 4) -> Step:
    return Step(index, N, k, 0, world_size)


@pytest.mark.parametrize("values", ["fp32", "fp8"])
@pytest.mark.parametrize("world_size", [1, 2, 7, 16])
def test_union_is_k_in_every_step(world_size: int, values: str) -> None:
    group = Group(NAME, K / N, world_size, values=values)
    for step in range(EVENTFUL_STEPS):
        grads = eventful(N, world_size, step)
        if values == "fp32":
            group.step_lawfully(grads)
        else:
            group.step(grads)
        assert 0.95 * K <= group.reports[0].union <= K, f"step {step}"
        assert len({reducer.states.sparsifier.fingerprint() for reducer in group.reducers}) == 1


@pytest.mark.parametrize("factor", [1e-6, 0.1, 10.0, 1e6])
def test_a_drop_of_the_learning_rate_or_a_rise(factor: float) -> None:
    """Residuals are scaled too, so that nothing of the old size is left to fill the gap."""
    group = Group(NAME, K / N, 4)
    for step in range(20):
        if step == 12:
            for reducer in group.reducers:
                reducer.residual.mul_(factor)
        scale = factor if step >= 12 else 1.0
        group.step([grad * scale for grad in gradients("normal", N, 4, step)])
        assert 0.95 * K <= group.reports[0].union <= K, f"step {step}"


def test_workers_that_come_to_agree() -> None:
    """The overlap jumps from about 1 to 8 and back: a second round fills the gap, and is then no longer needed."""
    group = Group(NAME, K / N, 8)
    collectives = []
    for step in range(30):
        grads = gradients("normal", N, 8, step)
        if step % 20 == 10:
            for reducer in group.reducers:
                reducer.residual.zero_()
        group.step([grads[0].clone() for _ in grads] if 10 <= step < 20 else grads)
        collectives.append(group.reports[0].collectives)
        assert 0.95 * K <= group.reports[0].union <= K, f"step {step}"
    assert collectives[10] == 5
    assert collectives[12:20] == [3] * 8
    assert group.reports[0].counts != [0] * 8


def test_three_collectives_when_nothing_jumps() -> None:
    group = Group(NAME, K / N, 4)
    for step in range(40):
        group.step(gradients("normal", N, 4, step))
        assert group.reports[0].collectives == 3
        assert group.reports[0].selected < 1.5 * K  # no more than that travels to agree on k


def test_few_elements_and_none() -> None:
    """With fewer than k elements that are not zero, all of them are sent, and no zeros."""
    group = Group(NAME, K / N, 3)
    for step in range(14):
        grads = [torch.zeros(N) for _ in range(3)]
        if step % 2 == 0:
            grads[step % 3][step * 100 : step * 100 + 50] = 1.0
        update = group.step_lawfully(grads)
        assert group.reports[0].union == int((update != 0).sum()) == (0 if step % 2 else 50)


def test_one_worker_has_all() -> None:
    group = Group(NAME, K / N, 4)
    for step in range(20):
        grads = gradients("normal", N, 4, step)
        group.step([grad * (1.0 if rank == step % 4 else 1e-9) for rank, grad in enumerate(grads)])
        assert 0.95 * K <= group.reports[0].union <= K, f"step {step}"


def test_large_for_anyone_is_sent_at_once() -> None:
    """What only one worker sees does not wait until that worker has its turn."""
    group = Group(NAME, K / N, 8)
    for step in range(16):
        grads = gradients("normal", N, 8, step)
        hot = 1_000 * step + torch.arange(10)
        grads[step % 8][hot] = 1e3
        assert (group.step(grads)[0][hot] != 0).all(), f"step {step}"


def held_back(name: str) -> float:
    """The mean over steps of what waits in the residuals' sum; each worker meets large values of its own."""
    group, waiting = Group(name, K / N, 8), 0.0
    for step in range(40):
        grads = gradients("normal", N, 8, step)
        for rank, grad in enumerate(grads):
            where = torch.randperm(N, generator=torch.Generator().manual_seed(100 * step + rank))[: K // 16]
            grad[where] *= 300
        group.step(grads)
        waiting += float(torch.stack(group.residuals(N)).sum(0).square().sum()) / 40
    return waiting


def test_nearer_to_the_oracle_than_exclusive_judges() -> None:
    exclusive, shared, oracle = (held_back(name) for name in ("exdyna", NAME, "oracle"))
    assert oracle < shared < exclusive
    assert exclusive - shared > 0.5 * (exclusive - oracle), (exclusive, shared, oracle)


def test_most_votes_win_and_equals_take_turns() -> None:
    indices, votes = torch.arange(0, N, 100), torch.ones(200, dtype=torch.int64)
    votes[50:60] = 2
    assert most_voted(indices, votes, 200, at(3)) is indices
    kept = torch.zeros(200, dtype=torch.int64)
    for index in range(60):
        found = most_voted(indices, votes, 150, at(index))
        assert torch.equal(found, found.unique())
        assert torch.isin(indices[50:60], found).all()
        kept[found // 100] += 1
    assert len(found) == 150
    assert int(kept[:50].min()) > 30  # 60 * 140 / 190 on average
    assert int(kept.min()) > 30


def test_largest_beside_leaves_out_what_is_known_and_zeros() -> None:
    acc = torch.tensor([5.0, -4.0, 0.0, 3.0, 0.0, -1.0])
    assert largest_beside(acc, torch.tensor([0, 3]), 4).tolist() == [1, 5]
    assert largest_beside(acc, torch.tensor([0, 3]), 6).tolist() == [1, 5]
    assert acc[0] == 5


def test_overlap_asks_for_enough_picks() -> None:
    state = SharedThresholdState(ThresholdState())
    assert K < picks(state, at(0)) < 1.1 * K
    state = _learned(state, 2 * K, K)
    assert (state.overlap, state.swing) == (2.0, math.log(2))
    assert picks(state, at(1)) >= 2 * 2 * K  # it doubled: so it may again
    for _ in range(100):
        state = _learned(state, 2 * K, K)
    assert 2 * K < picks(state, at(1)) < 2.1 * K
    assert picks(state, at(1, world_size=1)) == K  # one worker cannot pick a position twice
    assert _learned(state, 0, 0) is state


def test_a_quota_in_picks_decides_in_positions() -> None:
    """What asks for positions sees counts of positions, and its decision is turned into picks."""
    quota = Overlapping(Exactly(K), picks_per_position=2.5, workers=4)
    decided = quota.decide(histogram(torch.ones(10)), None)
    assert isinstance(decided, PicksDecision)
    assert (decided.positions.count, decided.count) == (K, 500)
    assert Overlapping(Exactly(K), picks_per_position=9.0, workers=4).expected == 4 * K

    class Curious(Exactly):
        def decide(self, seen: Magnitudes, energy: float | None) -> Decision:
            assert seen.level_of(4) == seen.level_of(2) == 1.0
            assert seen.level_of(5) == 0.5
            return Decision(seen.above(1.0), State())

    seen = histogram(torch.cat([torch.ones(10), torch.full((10,), 0.5)]))
    assert Overlapping(Curious(K), 2.5, 4).decide(seen, None).count == 10


def test_state_goes_on_and_fits_another_world_size() -> None:
    group, other = Group(NAME, K / N, 4), Group(NAME, K / N, 4)
    for step in range(12):
        group.step(eventful(N, 4, step))
    for reducer, state in zip(other.reducers, group.states(), strict=True):
        reducer.load_state_dict(state)
    for step in range(12, 20):
        assert torch.equal(group.step(eventful(N, 4, step))[0], other.step(eventful(N, 4, step))[0])
    assert_same(group.states()[0], other.states()[0])
    before, larger = learned(group), Group(NAME, K / N, 5)
    assert before.overlap > 1
    assert before.swing > 0
    for rank, reducer in enumerate(larger.reducers):
        reducer.load_state_dict({**group.states()[0], "rank": rank, "world_size": 5}, resized=True)
    assert learned(larger) == SharedThresholdState(before.threshold)
    larger.step_lawfully(eventful(N, 5, 20))
    assert 0.95 * K <= larger.reports[0].union <= K


def test_candidates_come_from_the_accumulating_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first steps, nobody reads the vector a second time."""
    group, looks, search = Group(NAME, K / N, 4), [], ops.select_above

    def spy(*arguments: Any) -> Tensor:
        looks.append(arguments)
        return search(*arguments)

    for step in range(30):
        if step == 12:
            monkeypatch.setattr(ops, "select_above", spy)
        group.step(gradients("normal", N, 4, step))
    assert len(looks) <= 2
