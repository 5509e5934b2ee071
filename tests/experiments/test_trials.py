"""Trials: each method gets its best rate, all seeds get that one, and what was run is kept."""

from pathlib import Path
from typing import Any

import pytest

from gradsieve_lab.runs.settings import Settings
from helpers import load

METRIC = {0.1: 0.5, 0.05: 0.75, 0.025: 0.25}


@pytest.fixture(scope="module")
def script() -> Any:
    return load("benchmarks/trials.py")


@pytest.fixture
def trials(script: Any) -> Any:
    common = Settings("mlp", virtual=True, steps=4, eval_every=4, workers=2, density=0.05, save=False)
    methods = {"exdyna": "exdyna", "alone": "alone"}
    return script.Trials(("mlp",), common, methods, list(METRIC), {"alone": [0.05, 0.1]})


def run(script: Any, trials: Any, out: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[Any]:
    """The runs that are made, in their order."""
    made = []

    def measure(trials: Any, task: str, method: str, lr: float, seed: int) -> Any:
        made.append((method, lr, seed))
        return script.Row(task, method, lr, seed, METRIC[lr], 1.0, 9.5, 3.0, 1.0, 1.0, 2, 4, 0.05)

    monkeypatch.setattr(script, "measure", measure)
    monkeypatch.setattr("sys.argv", ["trials", "--out", str(out), *arguments])
    script.compare(trials, out, None)
    return made


def test_the_best_rate_is_for_all_seeds(
    script: Any, trials: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(script, trials, tmp_path / "rows.csv", monkeypatch)
    first = [("exdyna", 0.1, 0), ("alone", 0.05, 0), ("exdyna", 0.05, 0), ("alone", 0.1, 0), ("exdyna", 0.025, 0)]
    assert made == [*first, ("exdyna", 0.05, 1), ("alone", 0.05, 1), ("exdyna", 0.05, 2), ("alone", 0.05, 2)]


def test_runs_are_kept(script: Any, trials: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.csv"
    assert len(run(script, trials, out, monkeypatch, "--seeds", "1", "--rates", "1")) == 2
    assert len(run(script, trials, out, monkeypatch, "--seeds", "1")) == 3
    assert run(script, trials, out, monkeypatch, "--seeds", "2") == [("exdyna", 0.05, 1), ("alone", 0.05, 1)]
    assert not run(script, trials, out, monkeypatch, "--method", "alone", "--seeds", "2")
    assert len(script.Rows(out).found) == 7


def test_a_lower_perplexity_is_better(script: Any) -> None:
    assert script.worse("gpt") == -script.worse("cnn") == 1


def test_a_run(script: Any, trials: Any) -> None:
    row = script.measure(trials, "mlp", "exdyna", 0.1, 0)
    assert (row.workers, row.steps, row.density, row.lowest, row.highest) == (2, 4, 0.05, 1.0, 1.0)
    assert 0 < row.metric < 1 < row.ring_bytes
