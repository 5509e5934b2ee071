"""Accelerate in 2 real processes: both ways train, save every rank's state, and resume to the last bit."""

from pathlib import Path
from typing import Any

from launching import launch

from helpers import skip_without

skip_without("accelerate")

WAYS = ("sparsify", "share")


def test_two_processes(tmp_path: Path) -> None:
    """One launch for all of it: a framework takes long to import."""
    both = launch("accelerate", "with_accelerate.py", tmp_path, "accelerate_sparsify")
    for way in WAYS:
        ranks = [{**each[way], "way": way} for each in both]
        resumes_to_the_last_bit(ranks)
        accumulates_clips_and_sends_a_part(ranks)
        every_rank_has_its_files_in_the_checkpoint(ranks)
        bf16(ranks)
        refusals_name_the_way_out(ranks)


def resumes_to_the_last_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["resumed"] == rank["whole"]
    one, other = ranks
    assert (one["weights"] == other["weights"]) == (one["way"] == "sparsify"), "only replicas of share differ"


def accumulates_clips_and_sends_a_part(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["steps"] == 12  # of 24 batches
        assert len(rank["norms"]) == 12
        assert sum(rank["losses"][-4:]) < sum(rank["losses"][:4])
        assert 0.095 <= rank["scalars"]["gradsieve/density"] <= 0.105
        assert 0 < rank["scalars"]["gradsieve/bytes_sent"] < 2 * 2569 * 4 * 0.5
    logged = ranks[0]["logged"]  # trackers are the main process's
    assert len(logged) >= 21
    assert all(0.095 <= entry["gradsieve/density"] <= 0.105 for entry in logged)


def every_rank_has_its_files_in_the_checkpoint(ranks: list[dict[str, Any]]) -> None:
    files = ranks[0]["files"]
    assert {
        "rank-0.safetensors",
        "rank-1.safetensors",
        "manifest.json",
        "model.safetensors",
        "optimizer.bin",
    } <= set(files)
    assert all(rank["model has the agreed weights"] for rank in ranks)


def bf16(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert sum(rank["bf16"]["losses"][-2:]) < sum(rank["bf16"]["losses"][:2])
        assert 0.095 <= rank["bf16"]["density"] <= 0.105


def refusals_name_the_way_out(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        words = rank["refused"]
        assert words["not an accelerator"] == "accelerator must be an Accelerator, got NoneType"
        assert words["not prepared"].startswith(
            "model must be a DistributedDataParallel, got Sequential: pass what"
        )
        assert "must not use DDP's static_graph" in words["static graph"]
        assert "must use DDP, got FSDP: leave its plugin out, or call gradsieve.share" in words["fsdp"]
        assert "the checkpoint has no state of gradsieve" in words["without state"]
        assert "load only the model's weights" in words["without state"]
