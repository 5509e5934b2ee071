"""The threshold that is read off histograms: the same on all workers, and exactly as many elements as asked for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsieve import ops
from gradsieve.comm.step import Exactly
from gradsieve.sparsifiers.exdyna.threshold import BINS, WIDE, _begin, enough, next_cut
from gradsieve.sparsifiers.histograms import Histograms, narrowest, row
from helpers import Group, gradients

WIDTH = 16
rows = st.tuples(st.integers(1, 60), st.lists(st.integers(0, 50), min_size=WIDTH, max_size=WIDTH))


def table_of(counts: torch.Tensor, start: int = 4_000) -> Histograms:
    return Histograms(message(start, counts)[None])


def message(start: int, counts: torch.Tensor) -> torch.Tensor:
    everything = torch.zeros(ops.BINS, dtype=torch.int64)
    everything[start : start + len(counts)] = counts
    return row(everything, start, start, len(counts))


@given(messages=st.lists(rows, min_size=1, max_size=8), count=st.integers(1, 5_000))
def test_shares_add_up(messages: list[tuple[int, list[int]]], count: int) -> None:
    table = Histograms(torch.stack([message(start, torch.tensor(counts)) for start, counts in messages]))
    bin = table.bin_with(count)
    shares = table.shares(bin, count)
    assert sum(shares) == min(count, table.total)
    assert table.above(table.edge(bin)) >= min(count, table.total)
    assert table.above(table.edge(bin + 1)) < count
    assert table.level_of(count) == table.edge(bin)
    for (start, counts), share in zip(messages, shares, strict=True):
        first = max(table.first + bin - start, 0)
        behind = max(table.first + bin + 1 - start, 0)
        assert sum(counts[behind:]) <= share <= sum(counts[first:])


def test_a_row_tells_how_many_an_edge_lets_through() -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    start = ops.bin_of(0.7)
    table = Histograms(row(ops.log_histogram(x), start, start, BINS)[None])
    for bin in (0, 1, 50, BINS - 1):
        assert table.above(table.edge(bin)) == int((x.abs() >= table.edge(bin)).sum())
    assert (
        table.above(1.01) == int((x.abs() >= ops.bin_edge(ops.bin_of(1.01))).sum()) > int((x.abs() >= 1.01).sum())
    )
    assert table.above(1e-3) == table.total < len(x)  # below the first bin nothing was counted
    assert table.above(1e3) == table.above(math.inf) == 0
    short = Histograms(row(ops.log_histogram(x), start, start, 8)[None])
    assert short.total == table.total  # the last bin has no upper end


@settings(max_examples=50, deadline=None)
@given(size=st.sampled_from([300, 3_000, 70_000]), count=st.integers(1, 40_000))
def test_narrow_bins_still_tell_of_enough(size: int, count: int) -> None:
    """Equal values fill one bin beyond its type: all that is asked for is still found."""
    kind = narrowest(count)
    table = Histograms(row(ops.log_histogram(torch.ones(size)), 4_000, 4_000, BINS, kind)[None], kind)
    assert min(table.total, count) == min(size, count)


def test_next_cut_keeps_candidates_within_bounds() -> None:
    table = table_of(torch.full((BINS,), 50))
    assert next_cut(table, 1e-30, 100, 1_000_000) == table.edge(BINS - 16)  # far too low: at most 8 k candidates
    assert next_cut(table, 1e30, 100, 1_000_000) == table.edge(BINS - 4)  # far too high: at least 2 k
    scarce = torch.zeros(BINS, dtype=torch.int64)
    scarce[-1] = 150
    assert next_cut(table_of(scarce), 0.125, 100, 1_000_000) == 0.125  # below the old cut nothing is known
    assert next_cut(table_of(scarce), 0.0, 100, 1_000_000) > 0  # zeros never are candidates


def test_enough_is_more_than_k() -> None:
    assert enough(1) == 6
    assert enough(10_000) == 20_000


@pytest.mark.parametrize("factor", [1e-6, 0.01, 100.0, 1e6])
@pytest.mark.parametrize("world_size", [1, 4, 16])
def test_any_jump_of_scale(world_size: int, factor: float) -> None:
    """Residuals are scaled too, so that nothing of the old size is left to fill the gap."""
    group = Group("exdyna", 0.01, world_size)
    for step in range(30):
        scale = factor if step >= 20 else 1.0
        if step == 20:
            for reducer in group.reducers:
                reducer.residual.mul_(factor)
        group.step([grad * scale for grad in gradients("normal", 20_000, world_size, step)])
        assert group.reports[0].union == 200, f"step {step}"
        assert group.reports[0].collectives == 3


@pytest.mark.parametrize("name", ["exdyna", "micro"])
@pytest.mark.parametrize(("factor", "most"), [(1e-3, 0), (1.0, 1)])
def test_most_layers_die_at_once(name: str, factor: float, most: int) -> None:
    """Three quarters hold nothing at all. Who finds too little looks for all that is wanted; who finds its share
    does not know yet, so one step may fall short."""
    short, n = 0, 20_000
    group = Group(name, 0.01, 4)
    for step in range(40):
        grads = gradients("normal", n, 4, step)
        if step == 20:
            for reducer in group.reducers:
                reducer.residual[n // 4 :] = 0
                reducer.residual.mul_(factor)
        for grad in grads if step >= 20 else []:
            grad[n // 4 :] = 0
            grad *= factor
        group.step(grads)
        assert group.reports[0].collectives == 3
        assert group.reports[0].union <= 200
        short += group.reports[0].union < 190
    assert short <= most


@pytest.mark.parametrize("wide", [False, True])
def test_parts_of_crumbs_do_not_hide_what_matters(wide: bool) -> None:
    """Fewer large elements than a share: they are told apart, and the crumbs are counted below them."""
    values = torch.cat([torch.full((600,), 1e-30), torch.linspace(0.5, 1.5, 8), torch.zeros(100)])
    seen = ops.log_histogram(values)
    floor = ops.bin_of(0.125)
    start, deepest = _begin(seen, Exactly(80), 4, floor, wide)
    table = Histograms(row(seen, start, deepest, WIDE if wide else BINS)[None])
    assert table.above(0.5) == 8
    assert table.total == 608
    assert table.above(0.75) == int((values >= 0.75).sum())
    assert _begin(ops.log_histogram(torch.zeros(9)), Exactly(80), 4, floor, wide) == (1, 1)


def test_few_crumbs_do_not_move_the_histogram() -> None:
    """Fewer elements than a share, some of them tiny: the histogram begins where the large ones are told apart."""
    values = torch.cat([torch.full((6,), 1e-30), torch.linspace(0.5, 1.5, 8), torch.zeros(100)])
    begin, _ = _begin(ops.log_histogram(values), Exactly(80), 4, 1, wide=False)
    assert ops.bin_of(0.5) - BINS // 4 <= begin <= ops.bin_of(1.5)


@settings(max_examples=12, deadline=None)
@given(crumbs=st.floats(1e-36, 1e-3), large=st.integers(1, 150), seed=st.integers(0, 9))
def test_large_elements_among_crumbs_are_sent(crumbs: float, large: int, seed: int) -> None:
    """Most elements become crumbs, of a size of its own for each worker, and fewer than asked for stay large."""
    n, world_size = 4_000, 4
    group = Group("exdyna", 0.05, world_size)
    for step in range(14):
        grads = gradients("normal", n, world_size, step)
        if step >= 10:
            where = torch.randperm(n, generator=torch.Generator().manual_seed(seed + step))[:large]
            for rank, (grad, reducer) in enumerate(zip(grads, group.reducers, strict=True)):
                reducer.residual.zero_()
                kept = grad[where].sign() + grad[where]
                grad.mul_(crumbs ** (1 + rank / world_size)).index_copy_(0, where, kept)
        group.step(grads)
        assert group.reports[0].union == 200
        if step >= 10:
            assert max(float(reducer.residual.abs().max()) for reducer in group.reducers) < 1, f"step {step}"
