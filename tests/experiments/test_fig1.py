"""Figure 1: the judges, the search for equal bits, and the whole on little data."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from studies.reproduce import fig1
from studies.reproduce._equal_bits import TRIES, Rehearsal, search
from studies.reproduce.base import POINTS
from studies.reproduce.fig1 import HARD, SGD, TOPK, Case, Curve, Measured, judge_a, judge_b, judge_c
from studies.reproduce.shelf import Shelf

from gradsieve_lab.runs.methods import parse_method
from gradsieve_lab.runs.running import Stop, run
from gradsieve_lab.runs.settings import Settings

EPOCHS = [0.0, 0.5, 1.0, 1.5, 2.0]


def curve(
    early: float = 1e-3, end: float = 1e-3, total: float = 400.0, errors: tuple[float, ...] = (1.0, 1.0)
) -> Curve:
    return Curve(EPOCHS, [8.0, 1.0, early, early, end], [0.0, 100.0, 200.0, 300.0, total], list(errors))


def measured(**changes: Curve) -> Measured:
    """Everything holds, unless changed."""
    curves = {
        SGD: curve(),
        TOPK: curve(early=0.05, end=0.009, errors=(20.0, 2.0)),
        HARD: curve(early=2e-3, total=410.0, errors=(1.5, 1.0)),
    }
    named = {"sgd": SGD, "topk": TOPK, "hard": HARD}
    curves |= {named[name]: changed for name, changed in changes.items()}
    return Measured("made up", 100, 2, 1, published=0.5, threshold=0.2, way=0.3, curves=curves)


def test_early_convergence() -> None:
    assert judge_a([measured()]).verdict == "reproduced"
    assert [c.holds for c in judge_a([measured(hard=curve(early=3.1e-3))]).checks] == [False, True]
    assert [c.holds for c in judge_a([measured(topk=curve(early=9.9e-3))]).checks] == [True, False]
    assert len(judge_a([measured(), measured()]).checks) == 4


def test_bits() -> None:
    assert judge_b([measured()]).verdict == "reproduced"
    never = curve(early=0.05, end=0.05)
    assert judge_b([measured(topk=never)]).verdict == "reproduced"
    assert [c.holds for c in judge_b([measured(hard=never)]).checks] == [False, True]
    assert [c.holds for c in judge_b([measured(topk=never, hard=never)]).checks] == [False, True]
    assert [c.holds for c in judge_b([measured(topk=curve(early=5e-3))]).checks] == [
        False,
        True,
    ]  # as many, not fewer
    assert [c.holds for c in judge_b([measured(hard=curve(total=421.0))]).checks] == [True, False]
    assert "2.0x the whole way" in judge_b([replace(measured(), way=0.1)]).note
    assert "whole way" not in judge_b([measured()]).note
    assert "no nearer than f - f* = 0.05" in judge_b([measured(sgd=never)]).note


def test_errors() -> None:
    assert judge_c([measured()]).verdict == "reproduced"
    assert [c.holds for c in judge_c([measured(topk=curve(errors=(14.0, 2.0)))]).checks] == [False, True, True]
    assert [c.holds for c in judge_c([measured(hard=curve(errors=(1.5, 12.0)))]).checks] == [False, False, False]
    long = measured(topk=curve(errors=(20.0, *[0.0] * 5)), hard=curve(errors=(2.0,) * 6))
    assert [c.holds for c in judge_c([replace(long, steps=6)]).checks] == [True, False, True]
    assert [c.holds for c in judge_c([replace(measured(), threshold=0.1)]).checks] == [True, True, False]


def test_figures_fit_a_logarithmic_axis() -> None:
    line = fig1._line("x", [float(step) for step in range(1001)], [math.inf, 0.0, *[1.0] * 999])
    assert len(line.x) <= POINTS
    assert min(line.x) > 0
    assert {*fig1._line("x", [1.0, 2.0, 3.0], [math.inf, 0.0, 1.0]).y} == {None, 1.0}


@pytest.mark.parametrize("power", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("first", [1e-4, 1.0, 1e3])
def test_search_finds_the_threshold(power: float, first: float) -> None:
    found = search(lambda threshold: 1000 * threshold**-power, wanted=500, first=first, enough=0.0)
    assert found.ratio == pytest.approx(1, abs=0.02)
    assert 1 < found.tries <= TRIES


def test_search_keeps_a_first_guess_that_will_do_and_the_best_of_what_it_tried() -> None:
    assert search(lambda threshold: 480.0, wanted=500, first=2.0, enough=0.05).tries == 1
    steps = search(lambda threshold: 600.0 if threshold < 3 else 100.0, wanted=500, first=1.0, enough=0.05)
    assert steps.ratio == 1.2


@pytest.mark.parametrize(("task", "threshold"), [("logreg", 0.6), ("mlp", 0.02)])
def test_rehearsals_count_as_runs_do(task: str, threshold: float, tmp_path: Path) -> None:
    base = Settings(task, width=0.02, limit=60, workers=3, virtual=True, steps=12, batch=2, skew=0.5, save=False)
    method = parse_method(f"hard_threshold:aggregation=own:threshold={threshold}", 0.01)
    made = run(base.with_method(method), tmp_path / "run", lambda line: None, Stop())
    assert made is not None
    sent = sum(line.selected for line in made.steps) / 3
    assert 0 < sent < 0.9 * 12 * made.header["n"]
    assert Rehearsal(base).elements(threshold) == pytest.approx(sent, rel=0.01)


def test_the_three_share_their_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    monkeypatch.setattr(fig1, "WORKERS", 4)
    monkeypatch.setattr(fig1, "QUICK", (Case("madelon", 1, 5e-4), Case("synthetic", 1, 5e-3, 3, 0.02, 80)))
    shelf = Shelf(tmp_path, True, lambda line: None, Stop())
    findings = {each.id: each.run(shelf) for each in fig1.EXPERIMENTS}
    assert [*findings] == ["fig1a", "fig1b", "fig1c"]
    assert len([*(tmp_path / "runs").iterdir()]) == 3
    for finding in findings.values():
        assert len(finding.figures) == 1
        assert "synthetic, of gisette's kind, 80 x 100" in finding.note
    assert findings["fig1b"].checks[1].holds  # equal bits
    assert findings["fig1c"].checks[2].holds  # the bound
