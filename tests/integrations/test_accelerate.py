"""Accelerate in 2 real processes: both ways train, save every rank's state, and resume to the last bit."""

from typing import Any

import pytest
from launching import launch

from helpers import skip_without

skip_without("accelerate")

WAYS = ("sparsify", "share")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("with_accelerate.py", tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(params=WAYS)
def ranks(request: pytest.FixtureRequest, both: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rank found with one of the ways."""
    return [{**each[request.param], "way": request.param} for each in both]


def test_resumes_to_the_last_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["resumed"] == rank["whole"]
    one, other = ranks
    assert (one["weights"] == other["weights"]) == (one["way"] == "sparsify"), "only replicas of share differ"


def test_accumulates_clips_and_sends_a_part(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["steps"] == 12  # of 24 batches
        assert len(rank["norms"]) == 12
        assert sum(rank["losses"][-4:]) < sum(rank["losses"][:4])
        assert 0.095 <= rank["scalars"]["gradsieve/density"] <= 0.105
        assert 0 < rank["scalars"]["gradsieve/bytes_sent"] < 2 * 2569 * 4 * 0.5


def test_every_rank_has_its_files_in_the_checkpoint(ranks: list[dict[str, Any]]) -> None:
    files = ranks[0]["files"]
    assert {
        "rank-0.safetensors",
        "rank-1.safetensors",
        "manifest.json",
        "model.safetensors",
        "optimizer.bin",
    } <= set(files)
    assert all(rank["model has the agreed weights"] for rank in ranks)


def test_bf16(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert sum(rank["bf16"]["losses"][-2:]) < sum(rank["bf16"]["losses"][:2])
        assert 0.095 <= rank["bf16"]["density"] <= 0.105


def test_refusals_name_the_way_out(ranks: list[dict[str, Any]]) -> None:
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
