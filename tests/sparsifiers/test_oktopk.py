"""Ok-Topk: the volume keeps its bound, thresholds and regions are reused, residuals keep what was not told."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.comm.traffic import Traffic
from gradsieve.sparsifiers.oktopk import OkTopkState, exceeds_mean, own_bounds, thin_out
from helpers import Group, assert_same, gradients

N, K = 20_000, 200


def learned(group: Group) -> list[OkTopkState]:
    states = [reducer.states.sparsifier for reducer in group.reducers]
    return [state for state in states if isinstance(state, OkTopkState)]


def sloped(step: int, world_size: int) -> list[Tensor]:
    """Gradients whose large magnitudes are at the end of the vector."""
    slope = torch.linspace(-4, 4, N).exp()
    return [grad * slope for grad in gradients("normal", N, world_size, step)]


@pytest.mark.parametrize("world_size", [2, 3, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_words_on_the_wire(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under 6k words a worker and step, counting an index as one word although it is packed into less."""
    group = Group("oktopk", K / N, world_size)
    seen: list[int] = []
    pack = ops.pack_sorted

    def spy(indices: Tensor, start: int, stop: int) -> Tensor:
        seen.append(len(indices))
        return pack(indices, start, stop)

    monkeypatch.setattr(ops, "pack_sorted", spy)
    words = []
    for step in range(80):
        seen.clear()
        group.step(sloped(step, world_size))
        ledgers = [reducer.ledger for reducer in group.reducers]
        if step < 2:  # the handshake, and regions that do not know the slope yet
            continue
        # Part by part to each worker, once more so where told picks are balanced first, and at last to all.
        parts, told = torch.tensor(seen[:-world_size]), torch.tensor(seen[-world_size:])
        parts = parts.view(-1, world_size, world_size).sum(0)
        shown = [ledger.by_tag.get("threshold", Traffic()).handed_bytes // 4 for ledger in ledgers]
        pairs = parts.sum(1) - parts.diag() + (world_size - 1) * told
        words.append(2 * pairs + (world_size - 1) * torch.tensor(shown))
        bytes_sent = sum(ledger.total.ring_bytes for ledger in ledgers)
        assert bytes_sent < 4 * int(words[-1].sum()) + 200 * world_size**2, "packing made it longer"
        assert float(words[-1].float().mean()) < 6 * K, f"step {step}"
    each = torch.stack(words).float().mean(0) / K
    assert float(each.max()) < 6, "a worker's mean over steps"


def test_volume_does_not_grow_with_the_workers() -> None:
    means = []
    for world_size in (4, 16):
        group, wire = Group("oktopk", K / N, world_size), 0.0
        for step in range(24):
            group.step(gradients("normal", N, world_size, step))
            wire += group.reports[0].ring_bytes
        means.append(wire)
    assert means[1] < 1.6 * means[0]


def test_thresholds_and_regions_are_reused() -> None:
    """Steady magnitudes: each is evaluated once in `reuse` or `rebalance` steps, by all at the same time."""
    group = Group("oktopk", K / N, 3, reuse=8, rebalance=16)
    evaluated: dict[str, list[int]] = {"threshold": [], "bounds": []}
    drawn = gradients("heavy tails", N, 3, 0)
    for step in range(64):
        # The residual's part stays small: what is large is sent in the step in which it comes.
        shifted = [grad.roll(997 * step) for grad in drawn]
        group.step(shifted)
        for tag, steps in evaluated.items():
            tagged = {tag in reducer.ledger.by_tag for reducer in group.reducers}
            assert len(tagged) == 1
            steps += [step] if tagged.pop() else []
        assert group.reports[0].union <= K
        assert group.reports[0].union >= 0.7 * K
    assert evaluated["bounds"] == [0, 16, 32, 48]
    assert len(evaluated["threshold"]) < 24
    assert max(b - a for a, b in zip(evaluated["threshold"], evaluated["threshold"][1:], strict=False)) <= 8


def test_regions_share_out_the_picks() -> None:
    group = Group("oktopk", K / N, 4)
    for step in range(3):
        group.step(sloped(step, 4))
    bounds = learned(group)[0].bounds
    assert bounds[0] == 0
    assert bounds[-1] == N
    assert bounds[1] > N // 2  # nearly all picks are in the last quarter
    assert max(group.reports[0].counts) < 2 * K / 4


def test_uneven_regions_are_balanced_before_all_are_told() -> None:
    """What is large is suddenly all in one worker's region: the others help to tell it."""
    group = Group("oktopk", K / N, 8)
    group.step(gradients("normal", N, 8, 0))
    assert all("balance" not in reducer.ledger.by_tag for reducer in group.reducers)
    grads = gradients("normal", N, 8, 1)
    for grad in grads:
        grad[100:250] = 50
    update = group.step_lawfully(grads)
    assert max(group.reports[0].counts) > 2 * K / 8
    assert all("balance" in reducer.ledger.by_tag for reducer in group.reducers)
    assert max(reducer.ledger.by_tag["values"].handed_bytes for reducer in group.reducers) < 8 * (K / 8 + 2)
    assert learned(group)[0].bounds_age == 0  # so that borders are drawn anew in the next step
    # The old threshold let too many through, so that some had to wait; they come now.
    update += group.step_lawfully([torch.zeros(N)] * 8)
    assert bool(update[100:250].all())


def test_residuals_are_cleared_where_a_worker_contributed() -> None:
    n = 8
    grads = [torch.zeros(n), torch.zeros(n)]
    grads[0][1], grads[0][2], grads[0][6] = 5.0, 4.0, 1.0
    grads[1][1], grads[1][5], grads[1][2] = 6.0, -3.0, 0.5
    group = Group("oktopk", 2 / n, 2)
    update = group.step_lawfully(grads)
    assert update.tolist() == [0, 5.5, 2, 0, 0, 0, 0, 0]
    first, second = group.residuals(n)
    assert first.tolist() == [0, 0, 0, 0, 0, 0, 1, 0]
    assert second.tolist() == [0, 0, 0.5, 0, 0, -3, 0, 0]  # not picked though sent; picked though not sent


def test_the_first_step_tells_the_top_k_of_the_sums() -> None:
    grads = gradients("heavy tails", N, 4, 0)
    group = Group("oktopk", K / N, 4)
    update = group.step_lawfully(grads)
    sums = torch.zeros(N)
    for grad in grads:
        picked = grad.abs().topk(K).indices
        sums[picked] += grad[picked]
    assert sorted(sums.abs().topk(K).indices.tolist()) == torch.where(update)[0].tolist()


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_sudden_change_of_scale(factor: float) -> None:
    """Reused thresholds are off by a factor of a million: picks are bounded at once, thresholds follow."""
    group = Group("oktopk", K / N, 4)
    for step in range(30):
        grads = gradients("normal", N, 4, step)
        if step >= 15:
            grads = [grad * factor for grad in grads]
            for reducer in group.reducers if step == 15 else []:
                reducer.residual.mul_(factor)
        group.step_lawfully(grads)
        assert group.reports[0].union <= K
        if step > 15:
            assert group.reports[0].union >= 0.7 * K
        assert sum(r.ledger.total.ring_bytes for r in group.reducers) / 4 / 4 < 6 * K or step == 0


def test_rescale_scales_thresholds() -> None:
    """A loss scale that doubles: the same elements are sent as without, and the same values but for the factor."""
    plain, scaled = Group("oktopk", K / N, 3), Group("oktopk", K / N, 3)
    for step in range(40):
        grads = gradients("normal", N, 3, step)
        if step == 20:
            for reducer in scaled.reducers:
                reducer.rescale(1024.0)
        expected = plain.step(grads)[0]
        found = scaled.step([grad * 1024 for grad in grads] if step >= 20 else grads)[0]
        assert torch.equal(found, expected * 1024 if step >= 20 else expected)
        assert scaled.reports[0].collectives == plain.reports[0].collectives


def test_another_world_size_evaluates_anew() -> None:
    old, new = Group("oktopk", K / N, 4), Group("oktopk", K / N, 6)
    for step in range(5):
        old.step(sloped(step, 4))
        new.step(sloped(step, 6))
    saved = old.states()[0]
    for rank, reducer in enumerate(new.reducers):
        reducer.load_state_dict({**saved, "rank": rank, "world_size": 6}, resized=True)
    for state in learned(new):
        assert len(state.bounds) == 7
        assert state.threshold_age == state.bounds_age == 0
        assert state.own_threshold == learned(old)[0].own_threshold > 0
    new.step_lawfully(sloped(5, 6))
    assert {"threshold", "bounds"} <= set(new.reducers[0].ledger.by_tag)
    assert len({state.fingerprint() for state in learned(new)}) == 1


def test_a_bad_step_keeps_evaluated_thresholds_back() -> None:
    """What was found in a step that is called off must not be used later, even where it was due."""
    group = Group("oktopk", K / N, 2, reuse=1, rebalance=1)
    group.step(gradients("normal", N, 2, 0))
    before = group.states()
    bad = gradients("huge", N, 2, 1)
    bad[1][3] = float("inf")
    group.step(bad)
    assert not group.reports[0].finite
    assert_same(dict(enumerate(group.states())), dict(enumerate(before)))


def test_a_sum_that_is_not_told_may_overflow() -> None:
    """As bf16, 3.4e38 is infinite, and two of opposite signs are a NaN, which no threshold finds."""
    group = Group("oktopk", 0.2, 2, values="bf16")
    grads = [torch.zeros(10), torch.zeros(10)]
    grads[0][3], grads[1][3] = 3.4e38, -3.4e38
    updates = group.step(grads)
    assert not group.reports[0].finite
    assert all(update.isnan().all() for update in updates)
    assert not any(residual.any() for residual in group.residuals(10))


def test_own_bounds() -> None:
    picked = torch.tensor([1, 2, 3, 50, 60, 99])
    assert own_bounds(picked, 100, 3) == [0, 3, 60, 100]
    assert own_bounds(picked, 100, 1) == [0, 100]
    assert own_bounds(picked[:0], 100, 4) == (0, 25, 50, 75, 100)
    assert own_bounds(picked[:1], 100, 3) == [0, 1, 1, 100]


@pytest.mark.parametrize("counts", [[0, 0], [5, 5], [10, 1, 0], [100, 0, 3], [7] * 9])
def test_thin_out(counts: list[int]) -> None:
    thinned = thin_out(counts, 10)
    assert sum(thinned) == min(10, sum(counts))
    assert all(0 <= after <= before for before, after in zip(counts, thinned, strict=True))


def test_exceeds_mean() -> None:
    assert exceeds_mean([9, 0, 0, 0, 0], 4)
    assert not exceeds_mean([4, 0, 0, 0], 4)
    assert not exceeds_mean([0, 0], 1.5)


@pytest.mark.parametrize("option", ["reuse", "rebalance"])
def test_bad_options(option: str) -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        (0, ValueError, f"{option} must be at least 1, got 0"),
        (2.5, TypeError, f"{option} must be a whole number, got 2.5"),
    ]
    for value, error, words in cases:
        with pytest.raises(error, match=words):
            Group("oktopk", 0.1, 1, **{option: value})


def test_nothing_is_lost_where_small_sums_travel_beside_large_ones() -> None:
    """What is told in eight bits goes by way of another worker, who rounds it once more, beside larger numbers."""
    n, workers = 384, 9
    group = Group("oktopk", 0.11257765777147055, workers, values="fp8")
    for step in range(3):
        makers = [torch.Generator().manual_seed(430623 + 10 * step + rank) for rank in range(workers)]
        grads = [torch.randn(n, generator=maker) for maker in makers]
        for grad in grads:
            grad[:31] *= 2.0**15
            grad[207:] *= 1 - step % 2
        accs = torch.stack(group.accumulators(grads)).double()
        update = group.step(grads)[0]
        after = workers * update.double() + torch.stack(group.residuals(n)).double().sum(0)
        assert ((accs.sum(0) - after).abs() <= workers * accs.abs().max(0).values * 2**-22).all(), f"step {step}"
