"""Total error: on a given sequence nothing beats the constant threshold; and runs leave what is computed."""

import contextlib
import io
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsieve.comm.collectives import AllGather, AllReduce
from gradsieve.comm.traffic import traffic_of
from gradsieve_lab.analysis import (
    best_constant_threshold,
    bits,
    packed_index_bits,
    scheme_total_error,
    topk_total_error,
    total_error,
)
from gradsieve_lab.runs.records import read_run
from gradsieve_lab.runs.summary import summarise
from helpers import KINDS, ROOT, Group

CLOSE = 1e-12  # relative; float64 sums in different orders
Rows = list[list[float]]


def sequences(entries: st.SearchStrategy[float]) -> st.SearchStrategy[Rows]:
    """Up to 6 steps of up to 8 entries."""
    return st.integers(1, 8).flatmap(
        lambda n: st.lists(st.lists(entries, min_size=n, max_size=n), min_size=1, max_size=6)
    )


# Small whole numbers have many ties and zeros, and their sums are exact; floats have every size.
exact = sequences(st.integers(-4, 4).map(float))
rough = sequences(st.floats(-1e6, 1e6, width=32))
budgets = st.integers(0, 60)


def error_of(rows: Rows, sent: set[tuple[int, int]]) -> float:
    """By the definition: the squares of all that is not sent."""
    return math.fsum(x * x for t, row in enumerate(rows) for i, x in enumerate(row) if (t, i) not in sent)


def places(rows: Rows) -> list[tuple[int, int]]:
    return [(t, i) for t, row in enumerate(rows) for i in range(len(row))]


@given(rows=exact | rough, budget=budgets)
def test_it_sends_the_largest_of_all_steps(rows: Rows, budget: int) -> None:
    found = best_constant_threshold(rows, budget)
    by_size = sorted(places(rows), key=lambda place: (-abs(rows[place[0]][place[1]]), place))
    sent = by_size[:budget]
    assert found.counts == [sum(t == step for t, _ in sent) for step in range(len(rows))]
    assert found.threshold == (abs(rows[sent[-1][0]][sent[-1][1]]) if sent else math.inf)
    assert found.total_error == pytest.approx(error_of(rows, set(sent)), rel=CLOSE)
    assert sum(found.counts) == min(budget, len(by_size))


@given(rows=exact | rough, budget=budgets)
def test_the_threshold_separates_what_is_sent_from_what_is_kept(rows: Rows, budget: int) -> None:
    found = best_constant_threshold(rows, budget)
    for row, count in zip(rows, found.counts, strict=True):
        sizes = sorted(map(abs, row), reverse=True)
        assert all(size >= found.threshold for size in sizes[:count])
        assert all(size <= found.threshold for size in sizes[count:])


@given(rows=exact, budget=budgets, data=st.data())
def test_no_set_of_entries_does_better(rows: Rows, budget: int, data: st.DataObject) -> None:
    entries = st.sets(st.sampled_from(places(rows)), max_size=budget)
    assert best_constant_threshold(rows, budget).total_error <= error_of(rows, data.draw(entries))


@given(rows=rough, budget=budgets, data=st.data())
def test_no_set_of_rough_entries_does_better(rows: Rows, budget: int, data: st.DataObject) -> None:
    entries = st.sets(st.sampled_from(places(rows)), max_size=budget)
    assert best_constant_threshold(rows, budget).total_error <= error_of(rows, data.draw(entries)) * (1 + CLOSE)


@given(rows=exact, data=st.data())
def test_no_counts_do_better(rows: Rows, data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, len(row))) for row in rows]
    spare = data.draw(st.integers(0, 3))
    assert best_constant_threshold(rows, sum(counts) + spare).total_error <= scheme_total_error(rows, counts)


@given(rows=exact, data=st.data())
def test_counts_send_the_largest_of_each_step(rows: Rows, data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, len(row))) for row in rows]
    kept = [sorted(map(abs, row))[: len(row) - count] for row, count in zip(rows, counts, strict=True)]
    assert scheme_total_error(rows, counts) == sum(x * x for row in kept for x in row)


@given(rows=exact, budget=budgets)
def test_topk_never_does_better(rows: Rows, budget: int) -> None:
    assert best_constant_threshold(rows, budget).total_error <= topk_total_error(rows, budget)


@given(row=st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=8), steps=st.integers(1, 6), budget=budgets)
def test_topk_is_as_good_when_all_steps_look_the_same(row: list[float], steps: int, budget: int) -> None:
    rows = [row[step % len(row) :] + row[: step % len(row)] for step in range(steps)]  # the order says nothing
    budget -= budget % steps  # an even share for each
    assert best_constant_threshold(rows, budget).total_error == topk_total_error(rows, budget)


@given(rows=exact, budget=budgets)
def test_its_counts_say_all(rows: Rows, budget: int) -> None:
    found = best_constant_threshold(rows, budget)
    assert scheme_total_error(rows, found.counts) == found.total_error
    assert best_constant_threshold(torch.tensor(rows), budget) == found


@given(rows=exact, budget=st.integers(0, 48))
def test_topk_spreads_the_budget_evenly(rows: Rows, budget: int) -> None:
    budget = min(budget, len(places(rows)))
    counts = [budget // len(rows) + (step < budget % len(rows)) for step in range(len(rows))]
    assert topk_total_error(rows, budget) == scheme_total_error(rows, counts)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind(kind: str) -> None:
    vectors = [KINDS[kind](1000, torch.Generator().manual_seed(step)) * 0.8**step for step in range(12)]
    before = [vector.clone() for vector in vectors]
    found, even = best_constant_threshold(vectors, 500), topk_total_error(vectors, 500)
    assert sum(found.counts) == 500
    assert 0 <= found.total_error <= even * (1 + CLOSE)
    assert math.isfinite(even)
    assert all(torch.equal(left, right) for left, right in zip(before, vectors, strict=True))


def test_corners() -> None:
    rows = [[3.0, -4.0], [0.0, 1.0]]
    nothing, everything = best_constant_threshold(rows, 0), best_constant_threshold(rows, 99)
    assert (nothing.threshold, nothing.counts, nothing.total_error) == (math.inf, [0, 0], 26.0)
    assert (everything.threshold, everything.counts, everything.total_error) == (0.0, [2, 2], 0.0)
    assert best_constant_threshold([[2.0, 1.0]], 1).counts == [1]
    zeros = best_constant_threshold(torch.zeros(3, 2), 4)
    assert (zeros.threshold, zeros.counts, zeros.total_error) == (0.0, [2, 2, 0], 0.0)
    assert best_constant_threshold([[1.0, 1.0], [1.0, 2.0]], 2).counts == [1, 1]  # ties: the first steps'
    assert best_constant_threshold((torch.ones(2, dtype=torch.bfloat16) for _ in range(3)), 3).counts == [2, 1, 0]
    assert topk_total_error(rows, 0) == 26.0
    assert topk_total_error(rows, 99) == 0.0


@pytest.mark.parametrize("compute", [best_constant_threshold, topk_total_error])
@pytest.mark.parametrize(
    ("rows", "budget", "sentence"),
    [
        ([], 1, "sequence must hold at least one vector, got none"),
        (torch.zeros(0, 3), 1, "sequence must hold at least one vector, got none"),
        ([[]], 1, r"sequence\[0\] must be a vector of at least one entry, got shape \(0,\)"),
        ([1.0, 2.0], 1, r"sequence\[0\] must be a vector of at least one entry, got shape \(\)"),
        ([[1.0], [1.0, 2.0]], 1, r"sequence\[1\] must be as long as the first, 1, got 2"),
        ([[1.0], [math.nan]], 1, r"sequence\[1\] must be finite, got nan"),
        ([[1.0, -math.inf]], 1, r"sequence\[0\] must be finite, got -inf"),
        (torch.zeros(1, 2, dtype=torch.complex64), 1, r"sequence\[0\] must be real, got torch.complex64"),
        ([["a"]], 1, r"sequence\[0\] must be a vector of numbers, got \['a'\]"),
        ([[1.0]], -1, "budget must be at least 0, got -1"),
        ([[1.0]], 0.5, "budget must be a whole number, got 0.5"),
    ],
)
def test_what_cannot_be_is_refused(compute: Any, rows: Any, budget: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{sentence}$"):
        compute(rows, budget)


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ([1], "counts must hold one number for each of 2 steps, got 1"),
        ([1, 3], r"counts\[1\] must be at most 2, the entries of a step, got 3"),
        ([-1, 1], r"counts\[0\] must be at least 0, got -1"),
        ([0, 0.5], r"counts\[1\] must be a whole number, got 0.5"),
    ],
)
def test_counts_that_cannot_be_are_refused(counts: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{sentence}$"):
        scheme_total_error([[1.0, 2.0], [3.0, 4.0]], counts)


def test_total_error_of_steps_and_workers() -> None:
    assert total_error([0.5, 0]) == 0.5
    assert total_error([[1.0, 3.0], [2.0, 2.0]]) == 4.0
    assert total_error(torch.tensor([[1.0, 3.0], [2.0, 2.0]])) == 4.0
    assert total_error([torch.tensor(1.5), torch.tensor([1.0, 2.0])]) == 3.0


@pytest.mark.parametrize(
    ("norms", "sentence"),
    [
        ([], "norms_squared must hold at least one step, got none"),
        ([1.0, []], r"norms_squared\[1\] must hold at least one worker, got none"),
        ([1.0, math.inf], r"norms_squared\[1\] must be at least 0 and finite, got inf"),
        ([[1.0, math.nan]], r"norms_squared\[0\]\[1\] must be at least 0 and finite, got nan"),
        ([-1.0], r"norms_squared\[0\] must be at least 0 and finite, got -1.0"),
        ([1.0, None], r"norms_squared\[1\] must be a number, got None"),
    ],
)
def test_norms_that_cannot_be_are_refused(norms: Any, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{sentence}$"):
        total_error(norms)


def test_a_record_has_the_same_total_error_as_its_summary() -> None:
    run = read_run(ROOT / "benchmarks" / "reports" / "lab" / "exdyna")
    assert total_error([line.error for line in run.steps]) == pytest.approx(summarise(run).total_error)


def test_topk_is_what_a_run_of_topk_leaves() -> None:
    n, k, steps = 400, 8, 15
    group, generator = Group("topk", k / n, 1), torch.Generator().manual_seed(0)
    sequence, norms = [], []
    for step in range(steps):
        grad = torch.randn(n, generator=generator) * 0.8**step
        sequence.append(group.residuals(n)[0] + grad)
        group.step([grad])
        norms.append(float(group.residuals(n)[0].double().square().sum()))
    assert topk_total_error(sequence, k * steps) == pytest.approx(total_error(norms), rel=CLOSE)
    assert best_constant_threshold(sequence, k * steps).total_error < 0.99 * total_error(norms)


def test_bits_by_each_accounting() -> None:
    assert bits(10, "values") == 320
    assert bits(10, "values", value_bits=16) == 160
    assert bits(10) == 640
    assert bits(10, index_bits=packed_index_bits(1000)) == 420
    assert bits(0, "ring", workers=3) == 0
    assert bits(10, "ring", workers=1) == 0
    assert bits(10, "ring", workers=2) == 10 * 32 + 10 * 32 / 2


@given(n=st.integers(1, 2**40))
def test_packed_positions_need_no_more_bits(n: int) -> None:
    width = packed_index_bits(n)
    assert n <= 2**width
    assert width == 0 or n > 2 ** (width - 1)


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_the_ring_is_that_of_the_meter(workers: int) -> None:
    picked = [torch.zeros(6, dtype=torch.int32) for _ in range(workers)]
    gather = AllGather("indices", picked[0], lengths=[6] * workers)
    reduce = AllReduce("values", torch.zeros(6 * workers))
    metered = traffic_of(gather, picked, workers).ring_bytes + traffic_of(reduce, None, workers).ring_bytes
    assert bits(6 * workers, "ring", workers=workers) == pytest.approx(8 * metered)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"accounting": "rings"}, "accounting must be one of .*, got 'rings': did you mean ring?"),
        ({"accounting": "ring"}, "workers must be a whole number, got None"),
        ({"accounting": "ring", "workers": 0}, "workers must be at least 1, got 0"),
        ({"elements": -1}, "elements must be at least 0, got -1"),
        ({"value_bits": 0}, "value_bits must be at least 1, got 0"),
        ({"index_bits": -1}, "index_bits must be at least 0, got -1"),
    ],
)
def test_bits_that_cannot_be_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{sentence}"):
        bits(**{"elements": 1, **arguments})


def test_the_page_prints_what_it_shows() -> None:
    text = (ROOT / "docs" / "analysis.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, "docs/analysis.md", "exec"), {})
    assert printed.getvalue() == shown
