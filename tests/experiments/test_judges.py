"""The comparison of judges: its trial obeys the law."""

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
