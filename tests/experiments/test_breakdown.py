"""The experiment on where a step's time goes: how it reads records and judges, and that it can be run."""

from dataclasses import replace
from pathlib import Path

import pytest
from lines import HEADER, record
from studies.reproduce import breakdown
from studies.reproduce.breakdown import EXPERIMENT, Phases, judge, phases_of
from studies.reproduce.shelf import Shelf

from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.running import Stop
from gradsieve_lab.runs.settings import Settings

TOPK = Phases("topk", forward=20.0, backward=30.0, select=60.0, communicate=10.0, density=0.004)
EXDYNA = replace(TOPK, method="exdyna", select=10.0, density=0.001)


class VirtualShelf(Shelf):
    """Spares the processes."""

    def run(self, settings: Settings) -> Run:
        return super().run(replace(settings, virtual=True))


def test_verdicts() -> None:
    def holds(topk: Phases) -> list[bool]:
        return [check.holds for check in judge([topk, EXDYNA], "").checks]

    assert holds(TOPK) == [True, True]
    assert holds(replace(TOPK, communicate=59.0)) == [True, True]
    assert holds(replace(TOPK, communicate=61.0)) == [False, True]
    assert holds(replace(TOPK, select=30.0)) == [True, True]
    assert holds(replace(TOPK, select=29.0)) == [True, False]


def test_note_has_the_authors_figures_as_theirs_and_what_failed_here() -> None:
    note = judge([replace(TOPK, communicate=70.0), EXDYNA], "On this machine.").note
    assert note.startswith("On this machine.")
    assert "212 of 275 ms" in note
    assert "neither measured nor judged here" in note
    assert "communication takes 70 ms" in note


def test_figure_climbs_by_each_phase() -> None:
    line = judge([TOPK, EXDYNA], "").figures[0].lines[0]
    assert line.y == [0.0, 20.0, 50.0, 110.0, 120.0]


def test_phases_are_medians_of_the_steps_that_count() -> None:
    slow = {"forward": 9.0, "backward": 9.0, "select": 9.0, "communicate": 9.0, "step": 36.0}
    first = [record(number, seconds=slow) for number in range(breakdown.SETTLED)]
    counted = [record(breakdown.SETTLED + number) for number in range(3)]
    settings = {**HEADER["settings"], "sparsifier": "topk"}
    run = Run({**HEADER, "settings": settings}, [*first, *counted], [], None, Path())
    assert phases_of(run).parts == [1.0, 2.0, 3.0, 4.0]
    dense = replace(run, header={**HEADER, "settings": {**settings, "sparsifier": "dense"}})
    assert phases_of(dense).parts == [1.0, 2.0, 0.0, 7.0]


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    monkeypatch.setattr(breakdown, "QUICK", breakdown.Sizes(0.05, 4))
    monkeypatch.setattr(breakdown, "SETTLED", 2)
    monkeypatch.setattr(breakdown, "WORKERS", 2)


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    found = EXPERIMENT.run(VirtualShelf(tmp_path, True, lambda told: None, Stop()))
    assert [row[0] for row in found.tables[0].rows] == list(breakdown.FEW)
    assert "on digits" in found.note


@pytest.mark.slow
def test_runs_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    found = EXPERIMENT.run(Shelf(tmp_path, True, lambda told: None, Stop()))
    assert all(part and part > 0 for line in found.figures[0].lines for part in line.y[1:])
