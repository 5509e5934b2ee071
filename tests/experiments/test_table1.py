"""The table of sparsifiers: both sides of every check, and a small run."""

from dataclasses import replace
from pathlib import Path

import pytest
from studies.reproduce import _registry, table1
from studies.reproduce._registry import every_method
from studies.reproduce.shelf import Shelf
from studies.reproduce.table1 import Row, judge

from gradsieve_lab.runs.running import Stop

PLAIN = Row(
    method="exdyna",
    buildup=1.0,
    overlap=8.0,
    density_off=0.0,
    imbalance=1.1,
    idle=0.0,
    scale_factor=1.0,
    passes=1.5,
    energy=0.8,
)
GOOD = {
    "exdyna": PLAIN,
    "micro": replace(PLAIN, method="micro", imbalance=2.0),
    "cltk": replace(PLAIN, method="cltk", imbalance=8.0, idle=0.875, passes=9.0),
    "topk": replace(PLAIN, method="topk", buildup=7.4, overlap=7.4, density_off=6.4, passes=9.0),
    "sidco": replace(PLAIN, method="sidco", buildup=6.0, overlap=7.0, density_off=5.0, passes=6.0),
    "hard_threshold": replace(
        PLAIN, method="hard_threshold", buildup=50.0, overlap=6.0, density_off=49.0, scale_factor=None
    ),
    "other": replace(PLAIN, method="other", scale_factor=3.0, passes=99.0),
}


@pytest.mark.parametrize(
    ("check", "method", "changes"),
    [
        (None, "exdyna", {}),
        (0, "sidco", {"overlap": 1.2}),
        (1, "micro", {"buildup": 1.1}),
        (2, "cltk", {"density_off": 0.06}),
        (2, "sidco", {"density_off": 0.04}),
        (3, "micro", {"imbalance": 1.1}),
        (4, "cltk", {"idle": 0.5}),
        (4, "topk", {"idle": 0.01}),
        (5, "hard_threshold", {"scale_factor": 1.9}),
        (5, "sidco", {"scale_factor": 2.0}),
        (6, "topk", {"passes": 1.5}),
    ],
)
def test_verdicts(check: int | None, method: str, changes: dict[str, float]) -> None:
    rows = {**GOOD, method: replace(GOOD[method], **changes)}
    finding = judge(list(rows.values()), "Made up.")
    assert [each.holds for each in finding.checks] == [index != check for index in range(7)]
    assert "(also for" in finding.note
    assert "other" in finding.note


def test_every_sparsifier_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    monkeypatch.setattr(_registry, "QUICK", 2)
    for name, value in {"WORKERS": 2, "ELEMENTS": 50_000, "QUICK": 6}.items():
        monkeypatch.setattr(table1, name, value)
    finding = table1.EXPERIMENT.run(Shelf(tmp_path, True, lambda _: None, Stop()))
    table = {row[0]: row for row in finding.tables[0].rows}
    assert list(table) == every_method()
    assert table["hard_threshold"][7] == "yes"
    assert table["topk"][7] == "no"
    assert table["oracle"][9] == "1.00"
    assert finding.checks[5].holds
