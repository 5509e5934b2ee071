"""What is special to each of the remaining sparsifiers."""

import itertools
import math

import pytest
import studies.sparsifiers  # noqa: F401  # those that only the studies need
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsieve import SPARSIFIERS, make_sparsifier
from gradsieve.sparsifiers.deft import cut, pack, share_out
from gradsieve.sparsifiers.hard_threshold import authors_rule
from helpers import LIBRARY, Group, gradients


@settings(max_examples=60, deadline=None)
@given(
    threshold=st.floats(1e-6, 10.0),
    world_size=st.integers(1, 5),
    seed=st.integers(0, 99),
    aggregation=st.sampled_from(["union", "own"]),
)
def test_hard_threshold_bounds_the_residual(threshold: float, world_size: int, seed: int, aggregation: str) -> None:
    group = Group("hard_threshold", 0.01, world_size, threshold=threshold, aggregation=aggregation)
    for step in range(6):
        group.step_lawfully(gradients("normal", 200, world_size, 100 * seed + step))
        for residual in group.residuals(200):
            assert float(residual.abs().max()) < threshold
            assert float(residual.norm()) <= threshold * math.sqrt(200)


def test_hard_threshold_of_own_picks_sends_nothing_for_others() -> None:
    group, n = Group("hard_threshold", 0.01, 3, threshold=2.0, aggregation="own"), 1_000
    grads = gradients("normal", n, 3, 0)
    update = group.step_lawfully(grads)
    large = [torch.where(grad.abs() >= 2, grad, torch.zeros(n)) for grad in grads]
    torch.testing.assert_close(update, sum(large[1:], large[0]) / 3)
    for grad, sent, residual in zip(grads, large, group.residuals(n), strict=True):
        assert torch.equal(residual, grad - sent)


def test_hard_threshold_uses_the_authors_rule() -> None:
    group = Group("hard_threshold", 0.01, 2)
    group.step(gradients("normal", 10_000, 2, 0))
    assert authors_rule(100) == 0.05
    assert all(float(e.abs().max()) < 0.05 for e in group.residuals(10_000))


def test_topk_union_builds_up_and_own_does_not_send_for_others() -> None:
    n, world_size = 10_000, 4
    union, own = Group("topk", 0.01, world_size), Group("topk", 0.01, world_size, aggregation="own")
    grads = gradients("normal", n, world_size, 0)
    update = union.step_lawfully(grads)
    picks = [set(grad.abs().topk(100).indices.tolist()) for grad in grads]
    everyone = sorted(set().union(*picks))
    assert torch.where(update)[0].tolist() == everyone
    assert union.reports[0].counts == [100] * 4
    assert union.reports[0].buildup == len(everyone) / 100 > 3
    own.step_lawfully(grads)
    for grad, picked, residual in zip(grads, picks, own.residuals(n), strict=True):
        expected = grad.clone()
        expected[sorted(picked)] = 0
        assert torch.equal(residual, expected)


def test_topk_needs_no_round_for_lengths() -> None:
    for aggregation in ("union", "own"):
        group = Group("topk", 0.01, 3, aggregation=aggregation)
        group.step(gradients("normal", 1_000, 3, 0))
        group.step(gradients("normal", 1_000, 3, 1))
        assert group.reports[0].collectives == 2


def test_cltk_sends_the_leaders_picks() -> None:
    group, n = Group("cltk", 0.01, 3), 1_000
    for step in range(7):
        grads = gradients("normal", n, 3, step)
        accs = [e + g for e, g in zip(group.residuals(n), grads, strict=True)]
        update = group.step_lawfully(grads)
        leader = step % 3
        assert torch.where(update)[0].tolist() == sorted(accs[leader].abs().topk(10).indices.tolist())
        assert group.reports[0].counts == [10 if rank == leader else 0 for rank in range(3)]


def test_cltk_with_beta_one_is_plain_error_feedback() -> None:
    """Against a literal low-pass filter with beta = 1, and against one with beta = 0.3."""
    for beta in (1.0, 0.3):
        group, n = Group("cltk", 0.05, 2, beta=beta), 400
        residuals = [torch.zeros(n), torch.zeros(n)]
        for step in range(20):
            grads = gradients("normal", n, 2, step)
            accs = [e + g for e, g in zip(residuals, grads, strict=True)]
            chosen = accs[step % 2].abs().topk(20).indices
            for rank in range(2):
                sent = torch.zeros(n)
                sent[chosen] = accs[rank][chosen]
                if beta == 1:
                    residuals[rank] = accs[rank] - sent
                else:
                    residuals[rank] = residuals[rank] + beta * (grads[rank] - sent)
            group.step(grads)
            for expected, found in zip(residuals, group.residuals(n), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0 if beta == 1 else 1e-5)


def test_only_the_leader_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    import gradsieve.sparsifiers.cltk as module

    calls = []
    monkeypatch.setattr(module, "largest", lambda acc, k: calls.append(1) or torch.arange(k))
    group = Group("cltk", 0.01, 5)
    for step in range(3):
        group.step(gradients("normal", 1_000, 5, step))
    assert len(calls) == 3


def test_randomk_is_the_same_everywhere_and_changes_every_step() -> None:
    group, seen = Group("randomk", 0.05, 3), set()
    for step in range(10):
        update = group.step_lawfully(gradients("normal", 1_000, 3, step))
        chosen = tuple(torch.where(update)[0].tolist())
        assert len(chosen) == 50
        seen.add(chosen)
        assert group.reports[0].collectives == 1 or step == 0
    assert len(seen) == 10
    other = Group("randomk", 0.05, 3, seed=1)
    assert not torch.equal(
        other.step(gradients("normal", 1_000, 3, 0))[0], group.step(gradients("normal", 1_000, 3, 0))[0]
    )


@given(
    pieces=st.lists(st.tuples(st.floats(0, 1e30), st.integers(1, 500)), min_size=1, max_size=40),
    share=st.floats(0.001, 1.0),
)
def test_deft_shares_out_k(pieces: list[tuple[float, int]], share: float) -> None:
    norms, lengths = [p[0] for p in pieces], [p[1] for p in pieces]
    k = max(1, round(share * sum(lengths)))
    picks = share_out(norms, lengths, k)
    assert sum(picks) == k
    assert all(0 <= pick <= length for pick, length in zip(picks, lengths, strict=True))
    if k >= len(pieces):
        assert min(picks) >= 1


@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=30).filter(any), world_size=st.integers(1, 12))
def test_deft_cuts_tensors_without_a_gap(sizes: list[int], world_size: int) -> None:
    pieces = list(cut(sizes, world_size))
    assert pieces[0][0] == 0
    assert pieces[-1][1] == sum(sizes)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert all(start < stop for start, stop in pieces)


def test_deft_balances_its_bins() -> None:
    lengths, picks = [100, 90, 80, 10, 10, 5], [10, 10, 10, 1, 10, 1]
    bins = pack(lengths, picks, 3)
    assert len({bins[0], bins[1], bins[2]}) == 3
    assert all(0 <= bin < 3 for bin in bins)


def test_deft_prefers_tensors_with_large_norms() -> None:
    group = Group("deft", 0.01, 2, sizes=[500, 500])
    grads = [torch.cat([torch.randn(500) * 100, torch.randn(500)]) for _ in range(2)]
    update = group.step_lawfully(grads)
    assert int((update[:500] != 0).sum()) == 9
    assert int((update[500:] != 0).sum()) == 1


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("nonsense", {}, ValueError, "sparsifier must be one of dense, topk, .*, got 'nonsense'"),
        ("topk", {"agregation": "own"}, ValueError, "option of topk must be one of aggregation, got 'agregation'"),
        ("topk", {"aggregation": "sum"}, ValueError, "aggregation must be one of union, own, got 'sum'"),
        ("dense", {"x": 1}, ValueError, r"option of dense must be one of \(none\), got 'x'"),
        ("cltk", {"beta": 0}, ValueError, r"beta must be in \(0, 1\], got 0"),
        ("cltk", {"beta": math.nan}, ValueError, r"beta must be in \(0, 1\], got nan"),
        ("hard_threshold", {"threshold": -1.0}, ValueError, "threshold must be positive and finite, got -1.0"),
        ("hard_threshold", {"aggregation": "sum"}, ValueError, "aggregation must be one of union, own, got 'sum'"),
        ("hard_threshold", {"threshold": "x"}, TypeError, "threshold must be a number, got 'x'"),
        ("sidco", {"distribution": "normal"}, ValueError, "distribution must be one of exponential, pareto, gamma"),
        ("sidco", {"stages": 0}, ValueError, "stages must be at least 1, got 0"),
        ("sage", {"threshold": 0}, ValueError, "threshold must be positive and finite, got 0"),
        ("sage", {"seed": 1.5}, TypeError, "seed must be a whole number, got 1.5"),
        ("dgc", {"momentum": 1}, ValueError, r"momentum must be in \[0, 1\), got 1"),
        ("dgc", {"momentum": None}, TypeError, "momentum must be a number, got None"),
        ("dgc", {"clip": 0.0}, ValueError, "clip must be positive and finite, got 0.0"),
        ("accordion", {"high": 0.5}, ValueError, "high must be at least 1 and finite, got 0.5"),
        ("accordion", {"eta": -0.5}, ValueError, "eta must be positive and finite, got -0.5"),
        ("accordion", {"interval": 0}, ValueError, "interval must be at least 1, got 0"),
        ("accordion", {"aggregation": "sum"}, ValueError, "aggregation must be one of union, own, got 'sum'"),
        ("gaussiank", {"x": 1}, ValueError, r"option of gaussiank must be one of \(none\), got 'x'"),
        ("randomk", {"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        (
            "exdyna",
            {"block": 9},
            ValueError,
            "option of exdyna must be one of blocks, got 'block': did you mean blocks",
        ),
        ("exdyna", {"blocks": 0}, ValueError, "blocks must be at least 1, got 0"),
        ("exdyna", {"blocks": 2.5}, TypeError, "blocks must be a whole number, got 2.5"),
        ("micro", {"blocks": 9}, ValueError, r"option of micro must be one of \(none\), got 'blocks'"),
        ("released_exdyna", {"blocks": 64}, ValueError, r"option of released_exdyna must be one of \(none\), got"),
        ("fixed_exdyna", {"threshold": -1.0}, ValueError, "threshold must be positive and finite, got -1.0"),
        ("fixed_exdyna", {"blocks": 0}, ValueError, "blocks must be at least 1, got 0"),
    ],
)
def test_bad_options(name: str, options: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_sparsifier(name, **options)


def test_every_sparsifier_explains_its_options() -> None:
    for name in LIBRARY:
        text = " ".join(str(kind.__doc__) for kind in SPARSIFIERS[name].__mro__ if kind is not object)
        for option in make_sparsifier(name).options():
            assert f"{option}:" in text, f"the docstring of {name} does not explain {option}"
