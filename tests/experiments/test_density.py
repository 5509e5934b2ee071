"""Density and build-up: both sides of every criterion, and a small run of all sparsifiers."""

from dataclasses import replace
from pathlib import Path

import pytest
from studies.reproduce import _registry, density
from studies.reproduce._registry import RELEASE, every_method
from studies.reproduce.base import thinned
from studies.reproduce.density import Measured, judge_buildup, judge_density
from studies.reproduce.shelf import Shelf

from gradsieve_lab.runs.running import Stop

SIZES = (2, 4, 8, 16)
ONES = [1.0] * 10
Found = dict[tuple[str, int], Measured]


def good() -> Found:
    found: Found = {}
    for size in SIZES:
        for method in ("exdyna", "micro", "cltk"):
            found[method, size] = Measured(ONES, [float(size)] * 10)
        found["topk", size] = Measured([density.TOPK[size]] * 10, [density.TOPK[size]] * 10)
        found["hard_threshold", size] = Measured([0.4] * 10, [0.9 * size] * 10)
        found["sidco", size] = Measured([3.0] * 10, [0.8 * size] * 10)
        found[RELEASE, size] = Measured([30.0] * 5 + [0.92] * 5, [float(size)] * 10)
    return found


def with_ratios(method: str, size: int, ratios: list[float]) -> Found:
    found = good()
    return {**found, (method, size): replace(found[method, size], ratios=ratios)}


def test_density_holds() -> None:
    finding = judge_density(good(), "Made up.")
    assert [check.holds for check in finding.checks] == [True] * 5
    assert {line.label for line in finding.figures[0].lines} == {method for method, _ in good()}
    assert "30" not in finding.checks[-1].found  # its warm-up is not counted, but told
    assert "15.5 (P = 2)" in finding.note


@pytest.mark.parametrize(
    ("check", "method", "ratios"),
    [
        (0, "topk", [2.4]),
        (1, "cltk", [*ONES, 1.001]),
        (3, "exdyna", [1.06, *ONES]),
        (4, RELEASE, [1.0] * 5 + [0.89] * 5),
    ],
)
def test_density_fails(check: int, method: str, ratios: list[float]) -> None:
    holds = [each.holds for each in judge_density(with_ratios(method, 2, ratios), "").checks]
    assert holds == [index != check for index in range(5)]


def test_hard_threshold_must_be_off_somewhere() -> None:
    found = good()
    for size in SIZES:
        found["hard_threshold", size] = Measured([1.9], [1.0])
    assert not judge_density(found, "").checks[2].holds
    found["hard_threshold", 4] = Measured([2.1], [1.0])
    assert judge_density(found, "").checks[2].holds
    found["hard_threshold", 4] = Measured([0.0], [])
    assert judge_density(found, "").checks[2].holds


def test_buildup() -> None:
    assert [check.holds for check in judge_buildup(good(), "").checks] == [True] * 6
    assert not judge_buildup(with_ratios("topk", 4, [2.0]), "").checks[0].holds
    flat = good()
    flat["sidco", 16] = Measured([50.0], [6.0])
    assert not judge_buildup(flat, "").checks[2].holds
    assert not judge_buildup(with_ratios("micro", 8, [1.0, 0.999]), "").checks[4].holds


def test_lines_are_thinned() -> None:
    line = thinned("long", list(map(float, range(1000))), ONES * 100)
    assert len(line.x) == len(line.y) == 250


def test_every_sparsifier_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    monkeypatch.setattr(_registry, "QUICK", 3)
    monkeypatch.setattr(density, "QUICK_WORKERS", (2,))
    monkeypatch.setattr(density, "QUICK_RELEASE_STEPS", 4)
    shelf = Shelf(tmp_path, True, lambda _: None, Stop())
    first, second = (experiment.run(shelf) for experiment in density.EXPERIMENTS)
    assert len(list((tmp_path / "runs").iterdir())) == len(every_method())  # shared by both
    assert first.checks[1].holds
    assert first.checks[3].holds
    assert [row[0] for row in first.tables[0].rows] == every_method()
    assert all(check.holds for check in second.checks[3:])
    assert "embedded" in second.note
