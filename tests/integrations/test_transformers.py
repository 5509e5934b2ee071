"""Transformers' Trainer in 2 real processes: both ways train, log, save every rank's state, and resume exactly."""

from pathlib import Path
from typing import Any

from launching import launch

from helpers import skip_without

skip_without("transformers", "accelerate", "tensorboard")

MODES = ("gradients", "weights")


IMPORTED = "transformers.trainer,transformers.models.gpt2.modeling_gpt2,torch.utils.tensorboard"


def test_two_processes(tmp_path: Path) -> None:
    """One launch for all of it: a framework takes long to import."""
    both = launch(IMPORTED, "with_transformers.py", tmp_path, "trainer_sparsify")
    for mode in MODES:
        ranks = [{**each[mode], "mode": mode} for each in both]
        resumes_to_the_last_bit(ranks)
        sends_a_part_per_optimizer_step(ranks)
        numbers_are_in_the_logs_and_in_tensorboard(ranks, tmp_path)
        if mode == "weights":
            evaluates_the_agreed_weights(ranks)


def resumes_to_the_last_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["resumed"] == rank["whole"]
        assert rank["same model saved"]
        assert rank["refused"]["mode"] == "mode must be one of gradients, weights, got 'both'"
        assert "the checkpoint has no state of gradsieve" in rank["refused"]["without state"]
    assert ranks[0]["weights"] == ranks[1]["weights"], "replicas are equal after training"
    if ranks[0]["mode"] == "weights":
        assert ranks[0]["whole"] != ranks[1]["whole"], "their optimizers are not"


def sends_a_part_per_optimizer_step(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (
            rank["steps"] == {"gradients": 7, "weights": 8}[rank["mode"]]
        )  # the last, or completed, of 16 batches
        assert 0.045 <= rank["report"]["gradsieve/density"] <= 0.055
    assert [name for name in ranks[0]["files"] if name.startswith("rank-1")], "every rank has its file"


def numbers_are_in_the_logs_and_in_tensorboard(ranks: list[dict[str, Any]], folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = [entry for entry in ranks[0]["history"] if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6, 8]
    assert all(0.045 <= entry["gradsieve/density"] <= 0.055 for entry in logged)
    assert logged[-1]["loss"] < logged[0]["loss"]
    (events,) = (folder / ranks[0]["mode"] / "whole" / "tensorboard").rglob("events*")
    shown = EventAccumulator(str(events)).Reload()
    assert [event.step for event in shown.Scalars("train/gradsieve/density")] == [2, 4, 6, 8]


def evaluates_the_agreed_weights(ranks: list[dict[str, Any]]) -> None:
    found = [[entry["eval_loss"] for entry in rank["history"] if "eval_loss" in entry] for rank in ranks]
    assert found[0] == found[1]
    assert len(found[0]) == 2
