"""A driver of Ray Train: worker 1 dies, all are restarted, and the run ends as one that was never stopped."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import nn
from torch.nn.functional import cross_entropy

from gradsieve import ReplicaAdamW
from gradsieve.integrations import ray as integration

STEPS, SAVED_AT, FAILS_AT = 12, 5, 7


def made(way: str) -> tuple[nn.Module, torch.optim.Optimizer, integration.KeptByRay]:
    from small import network

    model = network()
    if way == "share":
        model = ray.train.torch.prepare_model(model, parallel_strategy=None)
        optimizer: torch.optim.Optimizer = ReplicaAdamW(model.parameters(), lr=0.01)
        return model, optimizer, integration.share(model, optimizer, density=0.1, delay=1)
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, integration.sparsify(model, "exdyna", density=0.1)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> float:
    from small import dataset

    inputs, targets = dataset()[16 * (2 * step + rank) : 16 * (2 * step + rank + 1)]
    torch.manual_seed(2 * step + rank)
    loss = cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(config: dict[str, Any]) -> None:
    from small import digest

    rank = ray.train.get_context().get_world_rank()
    model, optimizer, kept = made(config["way"])
    first = 0
    with kept.restored() as folder:
        if folder is not None:
            state = torch.load(folder / "model.pt", weights_only=True)
            first = state["step"]
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    for step in range(first, STEPS):
        if step == FAILS_AT and rank == 1 and first == 0:
            time.sleep(5)  # until Ray has seen the checkpoint
            os._exit(1)
        loss = one_step(model, optimizer, step, rank)
        if step + 1 in (SAVED_AT, STEPS):
            with kept.reported({"loss": loss, "first": first}) as folder:
                if rank == 0:
                    state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, folder / "model.pt")
    whole, other, _ = made(config["way"])
    for step in range(STEPS):
        one_step(whole, other, step, rank)
    found = {"resumed": digest(model, optimizer), "whole": digest(whole, other)}
    (Path(config["folder"]) / f"{rank}.json").write_text(json.dumps(found))


def main(folder: Path, way: str) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    result = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"way": way, "folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder), name="run", failure_config=FailureConfig(max_failures=1)),
    ).fit()
    (folder / "metrics.json").write_text(json.dumps(result.metrics))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
