"""The comparison of judges: its trial obeys the law, *alone* has one shard of eight, and what was run is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gradsieve import SPARSIFIERS
from helpers import Group, gradients, load


@pytest.fixture(scope="module")
def script() -> Any:
    return load("benchmarks/judges.py")


def test_votes_lose_nothing(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPARSIFIERS, "votes", script.Votes)
    group = Group("votes", 0.01, 4)
    for step in range(6):
        group.step_lawfully(gradients("normal", 5_000, 4, step))
        assert group.reports[0].union == 50
        assert group.reports[0].counts == [25] * 4


def test_votes_with_other_signs_cancel(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPARSIFIERS, "votes", script.Votes)
    grads = [torch.zeros(400) for _ in range(2)]
    for grad, sign in zip(grads, (1.0, -1.0), strict=True):
        grad[:2], grad[10:12] = sign, 0.5
    update = Group("votes", 0.005, 2).step(grads)[0]  # two candidates of each worker, and two are sent
    assert update[:2].tolist() == [0, 0]
    grads[1][:2] = 1.0
    assert Group("votes", 0.005, 2).step(grads)[0][:2].tolist() == [1, 1]


def test_runs_are_kept(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = {0.1: 0.5, 0.05: 0.75}
    monkeypatch.setattr(
        script,
        "measure",
        lambda task, method, lr, seed: script.Row(task, method, lr, seed, accuracy[lr], 1, 9.5, 3, 1, 1),
    )
    rows = script.Rows(tmp_path / "judges.csv")
    for lr in accuracy:
        rows.get("mlp", "exdyna", lr, 0)
    monkeypatch.setattr(script, "measure", None)
    again = script.Rows(tmp_path / "judges.csv")
    assert again.get("mlp", "exdyna", 0.1, 0) == rows.get("mlp", "exdyna", 0.1, 0)
    assert again.best_rate("mlp", "exdyna") == 0.05
