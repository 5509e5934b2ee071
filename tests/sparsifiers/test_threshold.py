"""The threshold that is read off histograms: the same on all workers, and exactly k elements."""

import itertools
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsieve.exchange import Step
from gradsieve.sparsifiers._threshold import (
    BINS,
    enough,
    fine_edge,
    fine_histogram,
    next_cut,
    shares,
    threshold_bin,
)

tables = st.integers(1, 8).flatmap(
    lambda workers: st.lists(
        st.lists(st.integers(0, 50), min_size=BINS, max_size=BINS), min_size=workers, max_size=workers
    )
)


@settings(max_examples=100, deadline=None)
@given(rows=tables, k=st.integers(1, 5_000))
def test_shares_add_up_to_k(rows: list[list[int]], k: int) -> None:
    table = torch.tensor(rows)
    bin = threshold_bin(table, k)
    counts = shares(table, bin, k)
    assert sum(counts) == min(k, int(table.sum()))
    for row, count in zip(table, counts, strict=True):
        assert int(row[bin + 1 :].sum()) <= count <= int(row[bin:].sum())


def test_edges_are_floats_that_grow_by_little() -> None:
    for cut in (1e-30, 0.5, 1.0, 3.7, 1e30):
        cut = float(torch.tensor(cut))
        edges = [fine_edge(cut, bin) for bin in range(BINS)]
        assert edges[0] == cut
        ratios = [b / a for a, b in itertools.pairwise(edges)]
        assert min(ratios) > 1.007
        assert max(ratios) < 1.016


def test_next_cut_keeps_candidates_within_bounds() -> None:
    step = Step(index=0, n=1_000_000, k=100, rank=0, world_size=1)
    table = torch.full((1, BINS), 50)
    edge = partial(fine_edge, 1.0)
    assert next_cut(table, edge, 1e-6, step) == edge(BINS - 16)  # far too low: at most 8 k candidates
    assert next_cut(table, edge, 100.0, step) == edge(BINS - 4)  # far too high: at least 2 k
    scarce = torch.zeros(1, BINS, dtype=torch.int64)
    scarce[0, -1] = 150
    assert next_cut(scarce, edge, 0.5, step) == 0.5  # below the old cut nothing is known
    assert next_cut(scarce, edge, 0.0, step) > 0  # zeros never are candidates


def test_fine_histogram_tells_how_many_an_edge_lets_through() -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0)).abs()
    cut = float(torch.tensor(0.7))
    counts = fine_histogram(x[x >= cut], cut)
    for bin in (0, 1, 50, BINS - 1):
        assert int(counts[bin:].sum()) == int((x >= fine_edge(cut, bin)).sum())


def test_enough_is_more_than_k() -> None:
    assert enough(1) == 6
    assert enough(10_000) == 20_000
