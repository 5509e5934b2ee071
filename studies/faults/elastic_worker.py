"""A worker of torchrun's elastic agent: trains from the last checkpoint, with as many workers as there are now."""

import dataclasses
import json
import os
import sys
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve

WAYS = ("share", "sparsify")
BATCH, RATE, DENSITY = 16, 0.05, 0.02
SAVE_EVERY, TIMEOUT_S = 10, 10


@dataclass(frozen=True)
class Job:
    """What to train, and where its files are."""

    scratch: str  # holds the data
    name: str
    way: str
    steps: int
    seed: int = 0
    pause: float = 0.0  # seconds between steps

    def __post_init__(self) -> None:
        Path(self.folder).mkdir(exist_ok=True)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def folder(self) -> str:
        return str(Path(self.scratch) / self.name)

    def progress(self) -> dict[str, Any]:
        """The step that was completed last, and the launch, its first step and its number of workers."""
        path = Path(self.folder) / "progress.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def write(self, name: str, content: dict[str, Any]) -> None:
        path = Path(self.folder) / name
        path.with_suffix(".partial").write_text(json.dumps(content))
        path.with_suffix(".partial").rename(path)


def train(job: Job) -> dict[str, Any] | None:
    """Train in the process group that exists; rank 0 returns the metrics."""
    data = load_file(Path(job.scratch) / "data.safetensors")
    torch.manual_seed(0)
    inputs, classes = data["train x"][0].numel(), int(data["train y"].max()) + 1
    net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, classes))
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    model: nn.Module = net
    sieve: Any
    if job.way == "sparsify":
        model = DistributedDataParallel(net)
        sieve = gradsieve.sparsify(model, density=DENSITY, timeout=TIMEOUT_S, advise=False)
    else:
        sieve = gradsieve.share(net, optimizer, density=DENSITY, timeout=TIMEOUT_S)
    checkpoint = Path(job.folder) / "checkpoint"
    if (checkpoint / "latest.json").exists():
        extra = sieve.load(checkpoint)
        if job.way == "sparsify":
            net.load_state_dict(extra["model"])
    rank, workers = dist.get_rank(), dist.get_world_size()
    first = _steps(job, sieve)
    launch = [uuid.uuid4().hex]
    dist.broadcast_object_list(launch)
    for step in range(first, job.steps):
        chance = torch.Generator().manual_seed((job.seed * job.steps + step) * 64 + rank)
        picked = torch.randint(len(data["train y"]), (BATCH,), generator=chance)
        optimizer.zero_grad()
        _loss(model, data["train x"][picked], data["train y"][picked]).backward()
        optimizer.step()
        if rank == 0:
            done = {"launch": launch[0], "first": first, "step": step + 1, "workers": workers}
            job.write("progress.json", done)
        if (step + 1) % SAVE_EVERY == 0:
            sieve.save(checkpoint, {"model": net.state_dict()} if job.way == "sparsify" else None)
        time.sleep(job.pause)
    if job.way == "share":
        sieve.finish()
    if rank:
        return None
    with torch.no_grad():
        outputs = net(data["test x"])
        right = (outputs.argmax(1) == data["test y"]).float().mean()
        loss = nn.functional.cross_entropy(outputs, data["test y"])
    return {"accuracy": round(float(right), 4), "loss": round(float(loss), 4)}


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def _steps(job: Job, sieve: Any) -> int:
    return int(sieve.reducer.step if job.way == "sparsify" else sieve.replica.steps)


def main() -> None:
    torch.set_num_threads(1)
    job = Job(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    result = train(job)
    if result is not None:
        job.write("result.json", result)
    dist.barrier()
    os._exit(0)  # nothing is left to do, and connections of the past may take their time


if __name__ == "__main__":
    main()
