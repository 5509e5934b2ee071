"""Imbalance: streams, both sides of every criterion, and a small run."""

from pathlib import Path

import pytest
import torch
from studies.reproduce import _registry, imbalance
from studies.reproduce._streams import HOT, LAYERS, Stream, imbalance_by_chance, play
from studies.reproduce.imbalance import OURS, STATIC, Measured, judge
from studies.reproduce.shelf import Shelf

from gradsieve_lab.runs.running import Stop


def made_up(ours: float = 1.05, static: float = 4.0, trained: float = 1.3) -> Measured:
    long = [9.0] * 50
    return Measured(
        {(OURS, 4): long + [ours] * 10, (STATIC, 4): long + [static] * 10},
        {(OURS, 0.01): long + [trained] * 10, (STATIC, 0.01): long + [1.5] * 10},
        {4: 1.02},
        "Made up.",
    )


def test_verdicts() -> None:
    assert [check.holds for check in judge(made_up()).checks] == [True] * 3
    assert [check.holds for check in judge(made_up(ours=1.2)).checks] == [True, True, False]
    assert [check.holds for check in judge(made_up(static=1.04)).checks] == [False, True, True]
    failed = judge(made_up(trained=1.6))
    assert [check.holds for check in failed.checks] == [True, False, True]
    assert "density 0.01 moving borders gain nothing" in failed.note


def test_streams_are_the_same_again_and_one_layer_is_louder() -> None:
    stream = Stream(1000, 3, skewed=True)
    first, again = ([torch.stack(grads) for grads in stream.steps(2)] for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    loudness = first[0].square().mean(0).view(LAYERS, -1).mean(1).sqrt()
    assert int(loudness.argmax()) == HOT
    assert loudness[HOT] > 50 * loudness[0]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0][0], first[0][1])
    assert sum(Stream(1003, 2).sizes) == len(Stream(1003, 2).profile()) == 1003


def test_the_oracle_captures_all_there_is_and_chance_less() -> None:
    stream = Stream(5000, 4)
    caught = {
        name: play(stream, name, 0.01, 5, weigh_last=2)[-1].energy for name in ("oracle", "exdyna", "randomk")
    }
    assert caught["oracle"] == pytest.approx(1, rel=1e-4)
    assert 1 > (caught["exdyna"] or 0) > (caught["randomk"] or 0) > 0
    assert play(stream, "exdyna", 0.01, 1)[0].energy is None


def test_chance_balances_more_elements_better() -> None:
    assert 1 < imbalance_by_chance(16_000, 16) < imbalance_by_chance(160, 16)


def test_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    monkeypatch.setattr(_registry, "QUICK", 4)
    for name, value in {"WORKERS": (2,), "ELEMENTS": 20_000, "QUICK": 30, "SETTLED": 3, "TRAINED": 2}.items():
        monkeypatch.setattr(imbalance, name, value)
    finding = imbalance.EXPERIMENT.run(Shelf(tmp_path, True, lambda _: None, Stop()))
    assert finding.checks[0].holds  # the hot layer lies in one of two halves
    assert len(finding.figures) == 3
    assert len(finding.tables[0].rows) == 6
