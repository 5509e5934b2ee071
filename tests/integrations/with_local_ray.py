"""One rank of Ray Train's local mode, where torchrun starts the workers: trains with each way, and resumes.

Local mode brings no checkpoints to a storage: a folder takes its place here.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from launching import finish
from ray.train import Checkpoint, ScalingConfig
from ray.train.torch import TorchTrainer
from small import digest
from with_ray import SAVED_AT, STEPS, made, one_step


class Storage:
    """What Ray does with reports, in a folder: parts of all ranks are in one checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.metrics = folder, list[dict[str, Any]]()

    def report(self, metrics: dict[str, Any], checkpoint: Checkpoint) -> None:
        with checkpoint.as_directory() as part:
            shutil.copytree(part, self._folder, dirs_exist_ok=True)
        self.metrics.append(metrics)
        dist.barrier()

    def get_checkpoint(self) -> Checkpoint | None:
        return Checkpoint.from_directory(self._folder) if self._folder.exists() else None


def work(folder: Path, way: str) -> dict[str, Any]:
    rank = ray.train.get_context().get_world_rank()
    storage = Storage(folder / way)
    ray.train.report, ray.train.get_checkpoint = storage.report, storage.get_checkpoint
    whole, optimizer, kept = made(way)
    with kept.restored() as fresh:
        assert fresh is None
    dist.barrier()
    losses = [one_step(whole, optimizer, step, rank) for step in range(SAVED_AT)]
    with kept.reported({"loss": losses[-1]}) as place:
        if rank == 0:
            torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, place / "model.pt")
    losses += [one_step(whole, optimizer, step, rank) for step in range(SAVED_AT, STEPS)]
    resumed, other, again = made(way)
    with again.restored() as place:
        assert place is not None
        state = torch.load(place / "model.pt", weights_only=True)
        resumed.load_state_dict(state["model"])
        other.load_state_dict(state["optimizer"])
    for step in range(SAVED_AT, STEPS):
        one_step(resumed, other, step, rank)
    return {
        "whole": digest(whole, optimizer),
        "resumed": digest(resumed, other),
        "losses": losses,
        "metrics": storage.metrics,
        "files": sorted(path.name for path in (folder / way).rglob("*") if path.is_file()),
    }


if __name__ == "__main__":
    FOLDER, FOUND = Path(sys.argv[1]), dict[str, Any]()

    def train() -> None:
        FOUND.update({way: work(FOLDER, way) for way in ("sparsify", "share")})

    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=0)).fit()
    finish(FOLDER, FOUND)
