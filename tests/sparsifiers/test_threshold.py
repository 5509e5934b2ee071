"""The threshold that is read off histograms: the same on all workers, and exactly k elements."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsieve import ops
from gradsieve.sparsifiers._threshold import BINS, edge, first_cut, next_cut, shares, threshold_bin
from gradsieve.sparsifiers.base import Step

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
        edges = [edge(cut, bin) for bin in range(BINS)]
        assert edges[0] == cut
        ratios = [b / a for a, b in itertools.pairwise(edges)]
        assert min(ratios) > 1.007
        assert max(ratios) < 1.016


def test_first_cut_lets_enough_through() -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    for wanted in (1, 10, 1_000, 49_999):
        cut = first_cut(ops.log_histogram(x), wanted)
        assert cut is not None
        found = len(ops.select_above(x, cut))
        assert wanted <= found <= wanted * 1.6 + 10
    assert first_cut(ops.log_histogram(torch.zeros(100)), 5) is None
    few = torch.zeros(100)
    few[3] = 1e-3
    cut = first_cut(ops.log_histogram(few), 5)
    assert cut is not None
    assert ops.select_above(few, cut).tolist() == [3]


def test_next_cut_keeps_candidates_within_bounds() -> None:
    step = Step(index=0, n=1_000_000, k=100, rank=0, world_size=1)
    table = torch.full((1, BINS), 50)
    plenty = next_cut(table, 1.0, 1e-6, step)  # asked for far too low a cut: at most 8 k candidates
    assert plenty == edge(1.0, BINS - 16)
    assert next_cut(table, 1.0, 100.0, step) == edge(1.0, BINS - 4)  # far too high: at least 2 k
    scarce = torch.zeros(1, BINS, dtype=torch.int64)
    scarce[0, -1] = 150
    assert next_cut(scarce, 1.0, 0.5, step) == 0.5  # below the old cut nothing is known
    assert next_cut(scarce, 1.0, 0.0, step) > 0  # zeros never are candidates
