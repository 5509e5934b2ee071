"""The experiment on accuracy: how it judges accuracies and perplexities, what it says of laggards, and a run."""

from dataclasses import replace
from pathlib import Path

import pytest
from lines import HEADER, metric, record
from studies.reproduce import accuracy
from studies.reproduce.accuracy import (
    ALONE,
    DENSE,
    EXDYNA,
    EXPERIMENTS,
    OF_WEIGHTS,
    PAPERS,
    SHARE,
    Curve,
    Outcome,
    curve_of,
    judge,
)
from studies.reproduce.shelf import Shelf, dataset

from gradsieve_lab.runs.records import Run
from gradsieve_lab.runs.running import Stop
from gradsieve_lab.runs.settings import Settings
from gradsieve_lab.tasks.base import Metric

ACCURACY = Metric("accuracy", higher_is_better=True, percent=True)
PERPLEXITY = Metric("perplexity", higher_is_better=False)


def outcome(metric: Metric, dense: float, ours: float | None, sent: float = 50.0) -> Outcome:
    start = 0.1 if metric.higher_is_better else 60.0
    curves = {
        DENSE: Curve(DENSE, [start, dense, dense], [0.0, 500.0, 1000.0], [0.0, 1.0, 2.0]),
        EXDYNA: Curve(EXDYNA, [start, start, ours], [0.0, sent / 2, sent], [0.0, 0.5, 1.0]),
        SHARE: Curve(SHARE, [start, start, ours], [0.0, sent / 2, sent], [0.0, 0.5, 1.0]),
        ALONE: Curve(ALONE, [start, start, start], [0.0, 0.0, 0.0], [0.0, 1.0, 2.0]),
    }
    return Outcome("task", "task: data", metric, {EXDYNA: 3.0, SHARE: 3.0}, curves)


@pytest.mark.parametrize(
    ("metric", "dense", "ours", "holds"),
    [
        (ACCURACY, 0.95, 0.941, True),
        (ACCURACY, 0.95, 0.939, False),
        (ACCURACY, 0.95, 0.99, True),
        (ACCURACY, 0.95, None, False),
        (PERPLEXITY, 5.0, 5.04, True),
        (PERPLEXITY, 5.0, 5.06, False),
        (PERPLEXITY, 5.0, 4.5, True),
    ],
)
def test_a_point(metric: Metric, dense: float, ours: float | None, holds: bool) -> None:
    finding = judge([outcome(metric, dense, ours)], PAPERS)
    assert finding.checks[0].holds is holds
    assert (finding.note == judge([outcome(metric, dense, dense)], PAPERS).note) is holds  # else it says why


def test_perplexities_of_weights_may_lag_by_three_percent() -> None:
    assert judge([outcome(PERPLEXITY, 5.0, 5.14)], OF_WEIGHTS).checks[0].holds
    assert not judge([outcome(PERPLEXITY, 5.0, 5.16)], OF_WEIGHTS).checks[0].holds
    assert not judge([outcome(ACCURACY, 0.95, 0.939)], OF_WEIGHTS).checks[0].holds


def test_gain_kept_in_the_table() -> None:
    rows = {row[0]: row[2] for row in judge([outcome(ACCURACY, 0.9, 0.5)], PAPERS).tables[0].rows}
    assert rows == {"task, dense": "100%", "task, exdyna": "50%", "task, share": "50%", "task, alone": "0%"}
    assert judge([outcome(ACCURACY, 0.9, None)], PAPERS).tables[0].rows[1][2] == "unknown"


def test_bytes_of_the_worst_task() -> None:
    good, bad = outcome(ACCURACY, 0.9, 0.9, 99.0), outcome(ACCURACY, 0.9, 0.9, 101.0)
    assert judge([good], PAPERS).checks[-1].holds
    assert not judge([good, replace(bad, title="other")], PAPERS).checks[-1].holds


def test_what_is_said_of_laggards() -> None:
    late = outcome(ACCURACY, 0.9, 0.8)
    note = judge([late], PAPERS).note
    assert "behind by 0.8 at half of the run, by 0.1 at its end: it closes." in note
    assert "sent 3.0 times on average" in note
    rising = replace(late.curves[DENSE], values=[0.1, 0.5, 0.9])
    ours = replace(late.curves[EXDYNA], values=[0.1, 0.2, 0.3])
    assert (
        "it does not close"
        in judge([replace(late, curves={**late.curves, DENSE: rising, EXDYNA: ours})], PAPERS).note
    )


def test_dense_must_have_learned_something() -> None:
    words = "dense itself learned little"
    assert words in judge([outcome(ACCURACY, 0.105, 0.105)], PAPERS).note
    assert words not in judge([outcome(ACCURACY, 0.3, 0.3)], PAPERS).note


def test_time_is_modelled() -> None:
    run = Run(HEADER, [record(0), record(1)], [metric(0, 0.1), {**metric(2, 0.5), "bytes": 12.5e6}], None, Path())
    assert curve_of("topk", run).seconds == pytest.approx([0.0, 2 * 0.011 + 1.0])  # 100 Mbit


def test_same_tasks_quickly_and_in_full() -> None:
    assert [case.task for case in accuracy.QUICK] == [case.task for case in accuracy.FULL]
    for case in accuracy.QUICK + accuracy.FULL:
        Settings(case.task, dataset=dataset(case.task, case.dataset), width=case.width).make_task()


def test_runs_on_embedded_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    small = tuple(replace(case, width=0.25, steps=4) for case in accuracy.QUICK if case.task in ("lstm", "ncf"))
    monkeypatch.setattr(accuracy, "QUICK", small)
    monkeypatch.setattr(accuracy, "WORKERS", 2)
    monkeypatch.setattr(accuracy, "EVALUATIONS", 2)
    shelf = Shelf(tmp_path, True, lambda told: None, Stop())
    for experiment in EXPERIMENTS:
        finding = experiment.run(shelf)
        assert len(finding.checks) == len(small) + 1
        assert len(finding.figures) == len({figure.key for figure in finding.figures}) == 2 * len(small)
        assert len(finding.tables[0].rows) == 5 * len(small)
    assert len(list((tmp_path / "runs").iterdir())) == 5 * len(small)  # the second claim is about the same runs
