"""What part of the gain of data-parallel training a run keeps."""

import math
from pathlib import Path
from typing import Any

import pytest
from lines import HEADER, metric, record

from gradsieve_lab.runs.gains import gain_kept, gains_kept
from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.summary import summarise_all
from gradsieve_lab.tasks.base import Metric

ACCURACY, PERPLEXITY = Metric("accuracy", True, percent=True), Metric("perplexity", False)


def made(method: str, value: float, *, done: int = 2, **settings: Any) -> Run:
    header = HEADER | {"name": method, "settings": HEADER["settings"] | {"sparsifier": method} | settings}
    return Run(header, [record(0)], [metric(0, 0.1), metric(done, value)], None, Path())


@pytest.mark.parametrize(("value", "kept"), [(0.8, 0.0), (0.9, 1.0), (0.86, 0.6), (0.95, 1.5), (0.75, -0.5)])
def test_a_fraction_that_may_lie_outside(value: float, kept: float) -> None:
    assert gain_kept(value, alone=0.8, dense=0.9, metric=ACCURACY) == pytest.approx(kept)


def test_perplexities_by_their_logarithms() -> None:
    assert gain_kept(20.0, alone=40.0, dense=10.0, metric=PERPLEXITY) == pytest.approx(0.5)
    assert gain_kept(80.0, alone=40.0, dense=10.0, metric=PERPLEXITY) == pytest.approx(-0.5)


def test_nothing_to_gain_or_not_finite() -> None:
    assert gain_kept(0.9, alone=0.8, dense=0.8, metric=ACCURACY) is None
    assert gain_kept(math.nan, alone=0.8, dense=0.9, metric=ACCURACY) is None
    assert gain_kept(0.0, alone=40.0, dense=10.0, metric=PERPLEXITY) is None


def test_only_beside_both_yardsticks() -> None:
    dense, alone, topk = made("dense", 0.9), made("alone", 0.8), made("topk", 0.85)
    assert gains_kept([dense, topk]) == gains_kept([alone, topk]) == [None, None]
    rows = summarise_all([dense, topk, alone])
    assert [row.gain_kept for row in rows] == [1.0, pytest.approx(0.5), 0.0]


def test_yardsticks_are_of_the_same_seed_and_as_long() -> None:
    first = [made("dense", 0.9, seed=0), made("alone", 0.8, seed=0)]
    other = [made("dense", 1.0, seed=1), made("alone", 0.6, seed=1)]
    assert gains_kept([*first, *other, made("topk", 0.8, seed=1)])[-1] == pytest.approx(0.5)
    assert gains_kept([*first, made("topk", 0.8, seed=2)])[-1] is None
    assert gains_kept([*first, made("topk", 0.8, seed=0, done=1)])[-1] is None
