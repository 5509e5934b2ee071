"""The experiment on density and budgets: which runs it has, and how it judges."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from studies.reproduce import density_control
from studies.reproduce._scores import Scale
from studies.reproduce.density_control import (
    BF16,
    BUDGET,
    CASES,
    CONSTANT,
    FP8,
    METHODS,
    ORACLE,
    STEADY,
    Row,
    cells,
    judge,
    settings,
)
from studies.reproduce.shelf import Shelf

from gradsieve.density import budget
from gradsieve_lab.runs.methods import DENSE
from gradsieve_lab.runs.running import Stop
from gradsieve_lab.tasks.base import Metric
from helpers import load

GOOD = Row(
    case="mlp",
    workers=8,
    density=0.001,
    method=STEADY,
    metric=Metric("accuracy", higher_is_better=True),
    scores=(89.0, 91.0),
    losses=(1.0, 1.0),
    total_errors=(100.0, 100.0),
    sent=1.0,
    worst_sent=1.0,
    within_5pct=1.0,
    most=1.0,
    bytes_per_step=1000.0,
    imbalance=1.0,
)


def rows(case: str = "mlp", error: float = 60.0, fp8: float = 0.8, worse: float = 0.0) -> list[Row]:
    return [
        replace(GOOD, case=case),
        replace(GOOD, case=case, method=BUDGET, total_errors=(error, error), scores=(89.5 - worse, 90.5 - worse)),
        replace(GOOD, case=case, method=BF16, losses=(0.95,)),
        replace(GOOD, case=case, method=FP8, losses=(fp8,)),
        replace(GOOD, case=case, method=ORACLE, losses=(0.5,)),
    ]


def holds(found: list[Row]) -> list[bool]:
    return [check.holds for check in judge(found)]


def test_verdicts() -> None:
    assert holds(rows()) == [True] * 5
    assert all(holds(rows("cnn")))
    assert holds(rows("cnn", error=70.0)) == [True, True, False, True]
    assert holds(rows(error=101.0)) == [True, True, False, True, True]
    assert holds(rows(worse=0.1)) == [True, True, True, False, True]
    assert holds(rows(fp8=0.9)) == [True, True, True, True, False]
    perplexity = Metric("perplexity", higher_is_better=False)
    scores = {STEADY: Scale(perplexity).score(0.9), BUDGET: Scale(perplexity).score(0.91)}
    lower = [replace(row, metric=perplexity, scores=(scores.get(row.method, 0.0),)) for row in rows()]
    assert holds(lower) == [True, True, True, False, True]
    bad = rows()
    bad[0] = replace(bad[0], within_5pct=0.99)
    bad[1] = replace(bad[1], worst_sent=0.97)
    assert holds(bad) == [False, False, True, True, True]
    assert judge([]) == []


def test_metrics_are_compared_seed_by_seed() -> None:
    check = judge(rows(worse=0.5))[3]
    assert check.found == "0.895 against 0.9: -0.5 ± 0.5 points of accuracy, 2 seeds"


def test_all_cells_count() -> None:
    other = [replace(GOOD, workers=16), replace(GOOD, workers=16, method=BUDGET, total_errors=(300.0,))]
    check = judge([*rows(), *other])[2]
    assert not check.holds
    assert check.found == "0.60x, 1.34x over 2 cells"


def test_only_seeds_that_both_have_are_compared() -> None:
    """Steady has a second seed, with which all is worse: what has the first one only is not better for that."""
    found = [replace(row, losses=(1.0, 9.0), total_errors=(100.0, 900.0)) if row == GOOD else row for row in rows()]
    assert judge(found)[4].found == judge(rows())[4].found == "bf16 10%, fp8 40%"
    one = replace(found[1], scores=(90.0,), total_errors=(60.0,))
    assert judge([replace(found[0], scores=(90.0,)), one])[2].found == "0.60x"


def test_what_came_apart_is_not_compared() -> None:
    other = [
        replace(GOOD, workers=16, total_errors=(math.inf,)),
        replace(GOOD, workers=16, method=BUDGET, total_errors=(math.inf,)),
    ]
    assert judge([*rows(), *other])[2].found == "0.60x"
    called_off = [replace(row, density=0.01, losses=(math.inf, math.inf), worst_sent=1.4) for row in rows()[:2]]
    assert judge(rows() + called_off)[1].holds
    assert not judge(called_off)[1].holds


def test_cells_have_all_methods_once_and_the_grid_has_two() -> None:
    found = list(cells(CASES["mlp"], quick=False))
    assert len(found) == len(set(found)) == len(METHODS) + 2 * 5
    assert {method for workers, density, method in found if workers == 16} == {STEADY, BUDGET}
    assert len(list(cells(CASES["mlp"], quick=True))) == len(METHODS)


def test_methods_send_as_many_bytes(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, True, lambda progress: None, Stop())

    def density(method: str) -> float:
        return settings(shelf, CASES["ncf"], 8, 0.001, METHODS[method], 0).density

    assert density(BF16) == pytest.approx(0.00171, rel=0.01)
    assert density("topk") == 0.001 / 8
    assert density(STEADY) == 0.001


def test_it_runs_and_tunes_the_constant_threshold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    monkeypatch.setattr(density_control, "QUICK", (40, range(1)))
    methods = (STEADY, BUDGET, CONSTANT, FP8, DENSE)
    monkeypatch.setitem(CASES, "ncf", replace(CASES["ncf"], methods=methods, width=0.25))
    shelf = Shelf(tmp_path, True, lambda progress: None, Stop())
    found = density_control.run(shelf, ["ncf"])
    assert [check.criterion.split(":")[0] for check in found.checks] == ["steady", "budget", "ncf", "ncf"]
    assert found.checks[0].holds
    (grid,) = found.tables
    sent = {row[3]: float(row[8].rstrip("x")) for row in grid.rows}
    assert sent[CONSTANT] == pytest.approx(sent[STEADY], rel=0.1)
    assert sent[FP8] == pytest.approx(2.65, rel=0.05)
    assert sent[DENSE] == pytest.approx(1000, rel=0.05)


@pytest.mark.slow
def test_other_constants_of_the_rule_are_judged_by_the_same_criteria(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    monkeypatch.setattr(density_control, "FULL", density_control.FULL)  # so that it is put back
    monkeypatch.setitem(CASES, "ncf", replace(CASES["ncf"], width=0.25))
    monkeypatch.setattr(budget, "RISE", budget.RISE)
    script = load("benchmarks/spending.py")
    options = ["--case", "ncf", "--seeds", "1", "--steps", "120", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["spending.py", *options, "RISE=0.01"])
    script.main()
    assert budget.RISE == 0.01
    error, metric = capsys.readouterr().out.splitlines()
    assert error.startswith("ncf: total error of budget at most 1x steady's: ")
    assert metric.startswith("ncf: hit rate@10 with budget not worse: ")
    assert metric.endswith("one seed")
    assert not [run for run in (tmp_path / "runs").iterdir() if "budget" in run.name], "it must be made anew"


RULE = f"constant must be NAME=NUMBER with a name of {budget.__name__}, got "


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((constant, RULE + constant) for constant in ("RISE", "RISE=much", "UNKNOWN=3", "NOBODY=1")),
        ("--seeds=0", "seeds must be at least 1, got 0"),
        ("--steps=0", "steps must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_tried_is_refused(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["spending.py", arguments])
    with pytest.raises(SystemExit) as refused:
        load("benchmarks/spending.py").main()
    assert refused.value.code == 2
    assert words in capsys.readouterr().err
