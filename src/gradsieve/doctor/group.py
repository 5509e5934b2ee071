"""The workers that take part: those of torchrun, or this process alone."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradsieve._check import BadInput
from gradsieve.worlds.process_group import ProcessGroupWorld

DEVICES = ("auto", "cpu", "cuda")
TIMEOUT = timedelta(seconds=60)  # of a collective: a worker that hangs must not hang the others for long


@dataclass(frozen=True)
class Group:
    """This worker's rank, world size and device."""

    world: ProcessGroupWorld
    device: torch.device
    backend: str

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def gather(self, value: Any) -> list[Any]:
        """The values of all workers, in rank order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def agreed(self, number: int) -> int:
        """The number of worker 0, so that all workers repeat a collective equally often."""
        return int(self.gather(number)[0])

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self) -> float:
        self.synchronize()
        return time.perf_counter()


@contextmanager
def joined(device: str, backend: str) -> Iterator[Group]:
    """Join the workers that torchrun started; without torchrun a group of one."""
    where = _device(device)
    name = _backend(backend, where)
    setting: dict[str, Any] = {}
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        setting = {"store": store, "rank": 0, "world_size": 1}
    if where.type == "cuda":
        torch.cuda.set_device(where)
        setting["device_id"] = where
    dist.init_process_group(name, timeout=TIMEOUT, **setting)
    try:
        yield Group(ProcessGroupWorld(), where, name)
    finally:
        dist.destroy_process_group()


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device must be one that torch can use, got cuda: this torch sees no GPU")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise BadInput(f"workers per machine must be at most its {torch.cuda.device_count()} GPUs, got {local + 1}")
    return torch.device("cuda", local)


def _backend(wanted: str, device: torch.device) -> str:
    if wanted == "nccl" and device.type != "cuda":
        raise BadInput("--backend must be gloo or auto without a GPU, got nccl")
    if wanted == "auto":
        return "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    return wanted
