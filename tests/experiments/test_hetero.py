"""Label skew: the judge, and the whole on little data."""

from dataclasses import replace
from pathlib import Path

import pytest
from studies.reproduce import hetero
from studies.reproduce.hetero import DENSE, EVEN, HARD, SKEWED, TOPK, Measured, Result, judge
from studies.reproduce.shelf import Shelf

from gradsieve_lab.runs.running import Stop


def measured(topk: tuple[float, float], hard: tuple[float, float], sent: float = 100.0) -> Measured:
    """Scores on even and on skewed shards; dense loses one point by the skew."""
    scores = {DENSE: (91.0, 90.0), TOPK: topk, HARD: hard}
    results = {
        (label, skew): Result([score - 0.5, score + 0.5], [sent if label == HARD else 100.0, 100.0])
        for label, pair in scores.items()
        for skew, score in zip((EVEN, SKEWED), pair, strict=True)
    }
    return Measured("made up", "points", results)


def holds(each: Measured) -> list[bool]:
    return [check.holds for check in judge([each], "").checks]


def test_verdicts() -> None:
    assert holds(measured(topk=(90, 80), hard=(90, 85))) == [True, True, True]
    assert holds(measured(topk=(90, 86), hard=(90, 85))) == [False, False, True]
    assert holds(measured(topk=(85, 84), hard=(90, 85))) == [True, False, True]  # worse, but not by the skew
    assert holds(measured(topk=(90, 86), hard=(91, 86))) == [False, False, True]
    assert holds(measured(topk=(90, 80), hard=(90, 85), sent=106.0)) == [True, True, False]


def test_costs_are_beyond_those_of_dense() -> None:
    each = measured(topk=(90, 80), hard=(90, 89))
    assert each.behind(TOPK) == pytest.approx(10)
    assert each.cost(TOPK) == pytest.approx(9)
    assert each.cost(HARD) == pytest.approx(0)


def test_runs_on_embedded_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    few = [
        replace(each, width=0.02 if each.task == "logreg" else 0.05, limit=100, steps=10, eval_every=2, workers=4)
        for each in hetero.tasks(quick=True)
    ]
    monkeypatch.setattr(hetero, "tasks", lambda quick: few)
    finding = hetero.run(Shelf(tmp_path, True, lambda line: None, Stop()))
    assert len(finding.checks) == 6
    assert [figure.title for figure in finding.figures] == ["logreg on synthetic", "mlp on digits"]
    assert len([*(tmp_path / "runs").iterdir()]) == 2 * 2 * 3
