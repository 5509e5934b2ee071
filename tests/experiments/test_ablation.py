"""The ablation: both sides of every check, and a small run."""

from dataclasses import replace
from pathlib import Path

import pytest
from studies.reproduce import _registry, ablation, imbalance
from studies.reproduce.ablation import STATIC, STILL, WHOLE, Measured, Trained, judge
from studies.reproduce.shelf import Shelf

from gradsieve_lab.runs.running import Stop

FIXED = "fixed_exdyna:threshold=0.1"
TRAINED = Trained(total_error=10.0, residual_norm=1.0, metric=0.9, density_off=0.0, imbalance=1.1)
GOOD = Measured(
    rotation={("alike", WHOLE): TRAINED, ("alike", STILL): replace(TRAINED, total_error=11.0)},
    parts={WHOLE: TRAINED, STATIC: TRAINED, FIXED: replace(TRAINED, density_off=0.5)},
    static={WHOLE: 1.05, STATIC: 3.0},
    blocks={64: 1.4, 4096: 1.05},
    fixed=FIXED,
    conditions="Made up.",
)


@pytest.mark.parametrize(
    ("check", "changed"),
    [
        (None, GOOD),
        (0, replace(GOOD, rotation={("alike", WHOLE): TRAINED, ("alike", STILL): TRAINED})),
        (1, replace(GOOD, static={WHOLE: 3.0, STATIC: 3.0})),
        (2, replace(GOOD, parts={**GOOD.parts, FIXED: TRAINED})),
        (3, replace(GOOD, blocks={64: 1.0, 4096: 1.05})),
    ],
)
def test_verdicts(check: int | None, changed: Measured) -> None:
    assert [each.holds for each in judge(changed).checks] == [index != check for index in range(4)]


def test_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    monkeypatch.setattr(_registry, "QUICK", 6)
    for module in (ablation, imbalance):
        monkeypatch.setattr(module, "SETTLED", 2)
    for name, value in {"ELEMENTS": 20_000, "QUICK": 12}.items():
        monkeypatch.setattr(imbalance, name, value)
    monkeypatch.setattr(ablation, "WORKERS", 2)
    monkeypatch.setattr(ablation, "QUICK_BLOCKS", (8, 512))
    finding = ablation.EXPERIMENT.run(Shelf(tmp_path, True, lambda _: None, Stop()))
    assert len(finding.checks) == 5
    assert [check.holds for check in finding.checks[2:4]] == [True, True]
    assert finding.figures[0].lines[0].x == [8.0, 512.0]
