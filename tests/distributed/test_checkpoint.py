"""Checkpoints: resumed to the last bit, on other world sizes without loss, and never half there."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from safetensors import SafetensorError
from test_ddp import network, square
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from gradsieve import CheckpointError, Sieve, sparsify

NAMES = ("exdyna", "sidco", "topk", "hard_threshold", "oktopk", "sage", "dgc", "accordion")


def _train(model: DDP, sieve: Sieve, rank: int, first: int, last: int) -> list[Tensor]:
    updates = []
    for step in range(first, last):
        model.zero_grad()
        square(step, rank)(model).backward()
        updates.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return updates


def _same_size(rank: int, world_size: int, folder: Path) -> None:
    for name in NAMES:
        model = DDP(network())
        sieve = sparsify(model, name, density=0.05)
        _train(model, sieve, rank, 0, 11)
        sieve.save(folder / name)
        expected = _train(model, sieve, rank, 11, 20)
        again = DDP(network())
        resumed = sparsify(again, name, density=0.05)
        resumed.load(folder / name)
        assert resumed.reducer.step == 11
        for one, other in zip(expected, _train(again, resumed, rank, 11, 20), strict=True):
            assert torch.equal(one, other), name
        by_hand = DDP(network())
        third = sparsify(by_hand, name, density=0.05)
        third.load_state_dict(state_dict=resumed.state_dict())
        _train(by_hand, third, rank, 20, 22)


def test_resume_is_exact(tmp_path: Path) -> None:
    run_processes(_same_size, 2, tmp_path, tmp_path / "saved")
    files = {path.name for path in (tmp_path / "saved" / "exdyna").rglob("*") if path.is_file()}
    ranks = {f"rank-{rank}.{kind}" for rank in range(2) for kind in ("json", "safetensors")}
    assert files == {"latest.json", "manifest.json"} | ranks


def _save(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    residuals = {}
    for name in NAMES:
        model = DDP(network())
        sieve = sparsify(model, name, density=0.05)
        _train(model, sieve, rank, 0, 11)
        sieve.save(folder / name, extra={"epoch": rank, "model": {3: torch.arange(3) + rank}})
        residuals[name] = sieve.reducer.residual.clone()
        if name == "dgc":
            residuals["velocity"] = sieve.state_dict()["state"]["feedback"]["velocity"]
    return residuals


def _load(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    residuals = {}
    for name in NAMES:
        model = DDP(network())
        sieve = sparsify(model, name, density=0.05)
        extra = sieve.load(folder / name)
        assert extra["epoch"] == 0  # what rank 0 gave, on every rank
        assert extra["model"]["3"].tolist() == [0, 1, 2]
        residuals[name] = sieve.reducer.residual.clone()
        if name == "dgc":
            residuals["velocity"] = sieve.state_dict()["state"]["feedback"]["velocity"]
        assert sieve.reducer.step == 11
        _train(model, sieve, rank, 11, 14)
        sieve.check_replicas()
        if name == "exdyna":
            assert sieve.report is not None
            assert sieve.report.union == sieve.report.k
    return residuals


@pytest.mark.parametrize(
    ("before", "after"),
    [(4, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 2), (2, 4)))],
)
def test_other_world_size(before: int, after: int, tmp_path: Path) -> None:
    folders = [tmp_path / part for part in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    old = run_processes(_save, before, folders[0], tmp_path / "saved")
    new = run_processes(_load, after, folders[1], tmp_path / "saved")
    for name in (*NAMES, "velocity"):
        mean_before = torch.stack([part[name] for part in old]).double().mean(0)
        mean_after = torch.stack([part[name] for part in new]).double().mean(0)
        torch.testing.assert_close(mean_after, mean_before, rtol=1e-6, atol=1e-9)
        assert bool(mean_before.any())


def _damage(kind: str, folder: Path) -> None:
    place = next(folder.glob("step-*"))
    if kind == "bit":
        path = place / "rank-1.safetensors"
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    elif kind == "cut":
        path = place / "rank-0.safetensors"
        path.write_bytes(path.read_bytes()[:100])
    elif kind == "missing":
        (place / "rank-1.json").unlink()
    elif kind == "manifest":
        (place / "manifest.json").write_text("{nonsense")
    elif kind == "version":
        manifest = json.loads((place / "manifest.json").read_text())
        (place / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    elif kind == "latest":
        (folder / "latest.json").write_text('["something else"]')
    elif kind == "nothing":
        shutil.rmtree(folder)


DAMAGES = {
    "bit": "rank-1.safetensors: checksum mismatch, the file is corrupted",
    "cut": "rank-0.safetensors: checksum mismatch",
    "missing": "rank-1.json is missing: the checkpoint is incomplete",
    "manifest": "manifest.json is not JSON",
    "version": "must be a gradsieve checkpoint of version 5, got 99",
    "latest": "latest.json must hold a JSON object",
    "nothing": "latest.json could not be read: no such file",
}


def _damaged(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    found = {}
    model = DDP(network())
    sieve = sparsify(model, "exdyna", density=0.05)
    _train(model, sieve, rank, 0, 3)
    sieve.save(folder / "good")
    torch.distributed.barrier()
    before = sieve.reducer.residual.clone()
    _train(model, sieve, rank, 3, 5)
    for kind in DAMAGES:
        if rank == 0:
            shutil.copytree(folder / "good", folder / kind)
            _damage(kind, folder / kind)
        torch.distributed.barrier()
        state = sieve.state_dict()
        try:
            sieve.load(folder / kind)
        except CheckpointError as error:
            found[kind] = str(error)
        assert torch.equal(sieve.state_dict()["residual"], state["residual"])
        assert sieve.reducer.step == 5
    for key, other in {
        "sparsifier": sparsify(DDP(network()), "topk", density=0.05),
        "options": sparsify(DDP(network()), "exdyna", density=0.05, blocks=64),
        "model": sparsify(DDP(network(3)), "exdyna", density=0.05),
    }.items():
        try:
            other.load(folder / "good")
        except CheckpointError as error:
            found[key] = str(error)
    sieve.load(folder / "good")
    assert torch.equal(sieve.reducer.residual, before)
    return found


def test_damaged_missing_and_foreign_files(tmp_path: Path) -> None:
    for found in run_processes(_damaged, 2, tmp_path, tmp_path / "saved"):
        for kind, words in DAMAGES.items():
            assert words in found[kind]
            assert "(found by rank" in found[kind]
        assert "must have this run's sparsifier, topk, got exdyna" in found["sparsifier"]
        assert "must have this run's options" in found["options"]
        assert "must have this run's n, 1800, got 2400" in found["model"]


def _crash(rank: int, world_size: int, folder: Path) -> list[str]:
    """Saving fails in the middle, at every point where a file is written."""
    import gradsieve.state.checkpoint as module

    model = DDP(network())
    sieve = sparsify(model, "exdyna", density=0.05)
    _train(model, sieve, rank, 0, 3)
    sieve.save(folder)
    first = sieve.reducer.residual.clone()
    found = []
    for name in ("write_part", "_commit", "write_json"):
        _train(model, sieve, rank, 3, 4)
        real = getattr(module, name)

        def fails(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        setattr(module, name, fails if rank == 0 else real)
        try:
            sieve.save(folder)
        except CheckpointError as error:
            found.append(str(error))
        setattr(module, name, real)
        fresh = sparsify(DDP(network()), "exdyna", density=0.05)
        fresh.load(folder)
        assert torch.equal(fresh.reducer.residual, first)
    sieve.save(folder)
    sieve.save(folder)
    fresh = sparsify(DDP(network()), "exdyna", density=0.05)
    fresh.load(folder)
    assert torch.equal(fresh.reducer.residual, sieve.reducer.residual)
    return found


def test_a_crash_while_saving_leaves_the_previous_one(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    for found in run_processes(_crash, 2, tmp_path, folder):
        assert len(found) == 3
        assert all("the previous one is kept: rank 0: [Errno 28] No space left" in words for words in found)
    assert len(list(folder.iterdir())) == 2, "one checkpoint and the pointer to it"


def _killed(rank: int, world_size: int, folder: Path, kill: bool) -> Tensor | None:
    """The process that commits is killed between writing its files and committing them."""
    import os

    import gradsieve.state.checkpoint as module

    model = DDP(network())
    sieve = sparsify(model, "exdyna", density=0.05)
    if not kill:
        sieve.load(folder)
        return sieve.reducer.residual
    _train(model, sieve, rank, 0, 3)
    sieve.save(folder)
    torch.save(sieve.reducer.residual, folder.parent / f"expected-{rank}.pt")
    _train(model, sieve, rank, 3, 5)
    if rank == 0:
        module._commit = lambda *args: os._exit(9)  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        sieve.save(folder)
    return None


def test_a_kill_while_saving_leaves_the_previous_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    with pytest.raises(FileNotFoundError, match=r"0\.pkl"):
        run_processes(_killed, 2, one, tmp_path / "saved", True)
    for rank, residual in enumerate(run_processes(_killed, 2, two, tmp_path / "saved", False)):
        assert torch.equal(residual, torch.load(tmp_path / f"expected-{rank}.pt"))


def _one_rank_fails(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    """What is wrong on one rank only, of a type that nobody expects, ends in one sentence on both."""
    import gradsieve.state.checkpoint as module

    sieve = sparsify(DDP(network()), "exdyna", density=0.05)
    sieve.save(folder / "good", {"step": 1})
    found = {}

    def fails(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("I/O error: No space left on device")

    def refused(kind: str, place: Path, extra: Any = None) -> None:
        try:
            sieve.save(place, extra)
        except CheckpointError as error:
            found[kind] = str(error)

    real = module.write_part
    module.write_part = fails if rank == 1 else real  # type: ignore[assignment]
    refused("full", folder / "good")
    module.write_part = real
    refused("extra", folder / "good", {"model": object()})
    refused("apart", folder / f"own-{rank}")
    module.read_part, kept = (fails if rank == 1 else module.read_part), module.read_part  # type: ignore[assignment]
    try:
        sieve.load(folder / "good")
    except CheckpointError as error:
        found["load"] = str(error)
    module.read_part = kept
    assert sieve.load(folder / "good") == {"step": 1}
    sieve.save(folder / f"own-{rank}", {"mine": rank}, shared=False)
    assert sieve.load(folder / f"own-{rank}") == {"mine": rank}
    module._commit, kept_commit = (fails if rank == 1 else module._commit), module._commit  # type: ignore[assignment]
    try:
        sieve.save(folder / f"own-{rank}", {"mine": 10 + rank}, shared=False)
    except CheckpointError as error:
        found["commit"] = str(error)
    module._commit = kept_commit
    assert sieve.load(folder / f"own-{rank}") == {"mine": rank}
    assert not list(folder.rglob("*.partial"))
    return found


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    for found in run_processes(_one_rank_fails, 2, tmp_path, tmp_path / "saved"):
        full = "the previous one is kept: rank 1: SafetensorError: I/O error: No space left on device"
        assert full in found["full"]
        assert full in found["commit"]
        assert "rank 0: a checkpoint holds dicts, lists, numbers, strings and tensors, got object" in found["extra"]
        assert "all ranks must write to one folder that all of them see" in found["apart"]
        assert "save with shared=False" in found["apart"]
        assert "SafetensorError: I/O error: No space left on device (found by rank 1)" in found["load"]
    assert not list((tmp_path / "saved" / "good").glob(".*"))
