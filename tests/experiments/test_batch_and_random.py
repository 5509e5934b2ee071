"""Batch sizes, and random-k: the judges, and the whole on little data."""

from pathlib import Path

import pytest
from studies.reproduce import batch, randomk
from studies.reproduce.batch import Point, Size
from studies.reproduce.randomk import DENSE, RANDOM, TOPK, Curve
from studies.reproduce.shelf import Shelf

from gradsieve_lab.runs.running import Stop


def points(*gaps: float) -> list[Point]:
    return [Point(16 * 2**i, 100 // 2**i, 0.9, 0.9 - gap) for i, gap in enumerate(gaps)]


def test_batch_verdicts() -> None:
    assert batch.judge(points(0.01, 0.03, 0.02, 0.08), "").verdict == "reproduced"
    assert [check.holds for check in batch.judge(points(0.02, 0.01, 0.01, 0.02), "").checks] == [False, False]
    assert [check.holds for check in batch.judge(points(0.02, 0.09, 0.0, 0.03), "").checks] == [True, False]
    assert "after the 25 steps of the largest batch" in batch.judge(points(0.1, 0.05, 0.01), "").note


def curves(dense: float, topk: float, random: float) -> dict[str, Curve]:
    ends = {DENSE: dense, TOPK: topk, RANDOM: random}
    return {label: Curve([0, 10, 20], [0.1, end - 0.01, end + 0.01]) for label, end in ends.items()}


def test_random_verdicts() -> None:
    assert randomk.judge(curves(0.92, 0.91, 0.85), "").verdict == "reproduced"
    assert randomk.judge(curves(0.92, 0.91, 0.87), "").verdict == "not reproduced"
    assert randomk.judge(curves(0.92, 0.91, 0.95), "").verdict == "not reproduced"
    assert "Top-k is itself 60.0 points below dense" in randomk.judge(curves(0.9, 0.3, 0.28), "").note


def test_they_run_on_embedded_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    monkeypatch.setattr(batch, "QUICK", Size("", 40, 1, (5, 10)))
    monkeypatch.setattr(batch, "WIDTH", 0.25)
    monkeypatch.setattr(randomk, "WIDTH", 0.02)
    monkeypatch.setattr(randomk, "QUICK_STEPS", 2)
    shelf = Shelf(tmp_path, True, lambda line: None, Stop())
    found = batch.EXPERIMENT.run(shelf)
    assert [row[:2] for row in found.tables[0].rows] == [["10", "4"], ["20", "2"]]
    assert len(randomk.EXPERIMENT.run(shelf).figures[0].lines) == 3
