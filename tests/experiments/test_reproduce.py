"""The experiment on density and budgets: what it plans, how it judges, and that it goes on where it was."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradsieve.cli import app
from gradsieve.experiments.reproduce import density_control
from gradsieve.experiments.reproduce.density_control import BF16, BUDGET, ORACLE, STEADY, Row, judge, plan

GOOD = Row(
    case="mlp",
    method=STEADY,
    seeds=3,
    metric_name="accuracy",
    metric=0.9,
    loss=1.0,
    total_error=100.0,
    sent=1.0,
    worst_sent=1.0,
    within_5pct=1.0,
    density_max=1.0,
    bytes_per_step=1000.0,
    imbalance=1.0,
)


def rows(case: str = "mlp", error: float = 60.0, bf16: float = 0.8) -> list[Row]:
    return [
        replace(GOOD, case=case),
        replace(GOOD, case=case, method=BUDGET, total_error=error),
        replace(GOOD, case=case, method=BF16, loss=bf16),
        replace(GOOD, case=case, method=ORACLE, loss=0.5),
    ]


def test_verdicts() -> None:
    assert all(claim.holds for claim in judge(rows()))
    assert all(claim.holds for claim in judge(rows("cnn")))
    assert not judge(rows("cnn", error=70.0))[2].holds
    assert not judge(rows(error=101.0))[2].holds
    assert not judge(rows(bf16=0.9))[3].holds
    bad = rows()
    bad[0] = replace(bad[0], within_5pct=0.99)
    bad[1] = replace(bad[1], worst_sent=0.97)
    assert [claim.holds for claim in judge(bad)[:2]] == [False, False]
    assert judge(rows()[:1]) == []


def test_plan_has_every_seed_and_as_many_bytes() -> None:
    found = plan(["mlp"], quick=False)
    assert len(found) == len(density_control.METHODS) + 2 * 4
    densities = {label: settings.density for _, label, settings in found}
    assert densities[BF16] == pytest.approx(0.00171, rel=0.01)
    assert densities["topk"] == 0.001 / 8
    assert {settings.seed for _, _, settings in found} == {0, 1, 2}


def test_quick_leaves_slow_cases_out_unless_they_are_named() -> None:
    assert {"cnn", "lstm"}.isdisjoint(case for case, _, _ in plan([], quick=True))
    assert {case for case, _, _ in plan(["cnn"], quick=True)} == {"cnn"}


def test_command_runs_judges_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    monkeypatch.setattr(density_control, "QUICK", (8, (0,)))
    command = ["reproduce", "density-control", "--quick", "--only", "ncf", "--json", "--out", str(tmp_path / "dc")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code in (0, 1), done.output
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "dc" / "density-control.json").read_text())
    assert {row["method"] for row in found["rows"]} == set(density_control.METHODS)
    assert done.exit_code == (0 if all(claim["holds"] for claim in found["claims"]) else 1)
    assert (tmp_path / "dc" / "report.html").stat().st_size > 1_000_000
    record = tmp_path / "dc" / "ncf-steady-0" / "records.jsonl"
    before = record.read_bytes()
    cut = tmp_path / "dc" / "ncf-budget-0" / "records.jsonl"
    cut.write_text("".join(cut.read_text().splitlines(keepends=True)[:4]))  # as if it had been killed
    again = CliRunner().invoke(app, command)
    assert json.loads(again.stdout) == found
    assert record.read_bytes() == before  # not run again


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "mpl"), "case must be one of cnn, mlp, mlp-16, ncf, madelon, w8a, lstm, got 'mpl'"),
        (("--out", "README.md"), "out must be a folder, got the file README.md"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(app, ["reproduce", "density-control", *arguments])
    assert done.exit_code == 2
    assert words in done.stderr
