"""Lightning's Trainer and Fabric in 2 real processes: both ways train, log, save all ranks' state, resume."""

import csv
from pathlib import Path
from typing import Any

from launching import launch

from helpers import skip_without

skip_without("lightning")

MODES = ("gradients", "weights")
Ranks = list[dict[str, Any]]


def test_two_processes(tmp_path: Path) -> None:
    """One launch for all of it: a framework takes long to import."""
    both = launch("lightning", "with_lightning.py", tmp_path, "lightning_strategy", "fabric_share")
    for mode in MODES:
        trained = [{**each[f"trainer {mode}"], "mode": mode} for each in both]
        trainer_resumes_to_the_last_bit(trained)
        trainer_sends_and_logs_a_part(trained)
        trainer_removes_old_states_with_old_checkpoints(trained)
        trainer_refusals_name_the_way_out(trained)
        fabric = [{**each[f"fabric {mode}"], "mode": mode} for each in both]
        fabric_resumes_to_the_last_bit(fabric)
        fabric_refusals_name_the_way_out(fabric)


def trainer_resumes_to_the_last_bit(trained: Ranks) -> None:
    for rank in trained:
        assert rank["resumed"] == rank["whole"]
        assert rank["same model saved"]
    assert trained[0]["weights"] == trained[1]["weights"], "replicas are equal after fit"
    assert trained[0]["validated"] == trained[1]["validated"], "all ranks validate the same weights"
    assert len(trained[0]["validated"]) == 3


def trainer_sends_and_logs_a_part(trained: Ranks) -> None:
    for rank in trained:
        assert rank["steps"] == 12  # of 24 batches
        assert 0.095 <= rank["report"]["gradsieve/density"] <= 0.105
    rows = list(csv.DictReader(trained[0]["log"].splitlines()))
    densities = [float(row["gradsieve/density"]) for row in rows if row["gradsieve/density"]]
    assert len(densities) >= 11  # share with delay=1 has no report in the first step
    assert all(0.095 <= density <= 0.105 for density in densities)
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    assert sum(losses[-4:]) < sum(losses[:4])


def trainer_removes_old_states_with_old_checkpoints(trained: Ranks) -> None:
    assert trained[0]["folders"] == [
        "gradsieve-epoch=1.ckpt",
        "gradsieve-epoch=2.ckpt",
        "gradsieve-last.ckpt",
        "log",
    ]


def trainer_refusals_name_the_way_out(trained: Ranks) -> None:
    for rank in trained:
        words = rank["refused"]
        assert words["mode"] == "mode must be one of gradients, weights, got 'both'"
        assert "the checkpoint has no state of gradsieve" in words["without state"]
        assert "must be in a folder that all ranks see, got memory://gone: mount it" in words["elsewhere"]


def fabric_resumes_to_the_last_bit(fabric: Ranks) -> None:
    for rank in fabric:
        assert rank["resumed"] == rank["whole"]
        assert rank["saved"] == rank["agreed"]
        assert 0.095 <= rank["report"]["gradsieve/density"] <= 0.105
    rows = list(csv.DictReader(fabric[0]["log"].splitlines()))
    assert len(rows) >= 11
    assert all(0.095 <= float(row["gradsieve/density"]) <= 0.105 for row in rows)
    one, other = fabric
    assert (one["weights"] == other["weights"]) == (one["mode"] == "gradients"), "only replicas of share differ"


def fabric_refusals_name_the_way_out(fabric: Ranks) -> None:
    for rank in fabric:
        assert rank["refused"]["not set up"].startswith(
            "model must be a DistributedDataParallel, got Sequential: pass"
        )
        assert rank["refused"]["not a fabric"] == "fabric must be a Fabric, got NoneType"
