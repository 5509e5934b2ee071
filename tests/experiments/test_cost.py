"""The experiment on what selecting costs: how it judges, and that it can be run."""

from pathlib import Path

import pytest
from studies.reproduce import cost
from studies.reproduce.base import Finding
from studies.reproduce.cost import (
    ADD,
    EXDYNA,
    EXPERIMENT,
    FUSED,
    PLAIN,
    SCAN,
    SORT,
    TOPK,
    WORKERS,
    Timing,
)
from studies.reproduce.shelf import Shelf

from gradsieve_lab.runs.running import Stop


def judged(power: float = -1.0, growth: float = 1.0, topk: float = 40.0, sort: float = 400.0) -> Finding:
    """Times in proportion to n, a scan taking 1 ms for a million elements."""
    costs = {SORT: sort, TOPK: topk, PLAIN: 10.0, SCAN: 1.0, EXDYNA: 0.2, ADD: 1.0}
    lengths = [Timing(method, n, 1, ms * n / 1e6) for n in (1_000_000, 4_000_000) for method, ms in costs.items()]
    workers = [Timing(ADD, 8_000_000, 1, 8.0)]
    for p in WORKERS:
        times = {EXDYNA: 9.0 * p**power, TOPK: 300.0 * (growth if p == 4 else 1.0), FUSED: 10.0}
        workers += [Timing(method, 8_000_000, p, ms) for method, ms in times.items()]
    return cost.judge(lengths, workers, 3)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, [True, True, True]),
        ({"power": -0.72}, [True, True, True]),
        ({"power": -0.68}, [False, True, True]),
        ({"power": -1.32}, [False, True, True]),
        ({"growth": 1.29}, [True, True, True]),
        ({"growth": 1.31}, [True, False, True]),
        ({"growth": 0.76}, [True, False, True]),
        ({"topk": 3.01}, [True, True, True]),
        ({"topk": 2.99}, [True, True, False]),
        ({"sort": 2.99}, [True, True, False]),
    ],
)
def test_verdicts(changes: dict[str, float], holds: list[bool]) -> None:
    assert [check.holds for check in judged(**changes).checks] == holds


def test_runs_and_does_not_measure_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "QUICK", cost.Sizes((20_000, 40_000), 40_000, 1))
    monkeypatch.setattr(cost, "SETTLED", 2)
    monkeypatch.setattr(cost, "OFTEN", 2)
    shelf = Shelf(tmp_path, True, lambda told: None, Stop())
    found = EXPERIMENT.run(shelf)
    assert len(found.checks) == 3
    assert [len(figure.lines) for figure in found.figures] == [6, 5]
    assert all(ms for figure in found.figures for line in figure.lines for ms in line.y)
    assert EXPERIMENT.run(shelf) == found
