"""Transformers' Trainer in 2 real processes: both ways train, log, save every rank's state, and resume exactly."""

from pathlib import Path
from typing import Any

import pytest
from launching import launch

from helpers import skip_without

skip_without("transformers", "accelerate", "tensorboard")

MODES = ("gradients", "weights")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transformers")


@pytest.fixture(scope="module")
def both(folder: Path) -> list[dict[str, Any]]:
    return launch("with_transformers.py", folder)


@pytest.fixture(params=MODES)
def ranks(request: pytest.FixtureRequest, both: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**each[request.param], "mode": request.param} for each in both]


def test_resumes_to_the_last_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["resumed"] == rank["whole"]
        assert rank["same model saved"]
        assert rank["refused"]["mode"] == "mode must be one of gradients, weights, got 'both'"
        assert "the checkpoint has no state of gradsieve" in rank["refused"]["without state"]
    assert ranks[0]["weights"] == ranks[1]["weights"], "replicas are equal after training"
    if ranks[0]["mode"] == "weights":
        assert ranks[0]["whole"] != ranks[1]["whole"], "their optimizers are not"


def test_sends_a_part_per_optimizer_step(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (
            rank["steps"] == {"gradients": 7, "weights": 8}[rank["mode"]]
        )  # the last, or completed, of 16 batches
        assert 0.045 <= rank["report"]["gradsieve/density"] <= 0.055
    assert [name for name in ranks[0]["files"] if name.startswith("rank-1")], "every rank has its file"


def test_numbers_are_in_the_logs_and_in_tensorboard(ranks: list[dict[str, Any]], folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = [entry for entry in ranks[0]["history"] if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6, 8]
    assert all(0.045 <= entry["gradsieve/density"] <= 0.055 for entry in logged)
    assert logged[-1]["loss"] < logged[0]["loss"]
    (events,) = (folder / ranks[0]["mode"] / "whole" / "tensorboard").rglob("events*")
    shown = EventAccumulator(str(events)).Reload()
    assert [event.step for event in shown.Scalars("train/gradsieve/density")] == [2, 4, 6, 8]


def test_evaluates_the_agreed_weights(ranks: list[dict[str, Any]]) -> None:
    if ranks[0]["mode"] == "gradients":
        return
    found = [[entry["eval_loss"] for entry in rank["history"] if "eval_loss" in entry] for rank in ranks]
    assert found[0] == found[1]
    assert len(found[0]) == 2
