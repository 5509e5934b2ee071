"""Ray Train: a worker dies, Ray restarts all of them, and the run goes on from its checkpoint, residuals included.

Run it:  python examples/ray_train.py
"""

import os
import tempfile
import time

import ray
import ray.train.torch
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import nn

from gradsieve.integrations.ray import sparsify  # or share, for weights


def train(config: dict[str, int]) -> None:
    torch.manual_seed(0)
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = sparsify(model, density=0.01)
    first, teacher = 0, torch.randn(64, 10)
    with kept.restored() as folder:
        if folder is not None:
            state = torch.load(folder / "model.pt", weights_only=True)
            first = state["step"]
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

    for step in range(first, config["steps"]):
        if step == config["fails_at"] and rank == 1 and first == 0:
            time.sleep(5)  # until Ray has seen the last checkpoint
            os._exit(1)  # a machine is gone
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + rank))
        loss = nn.functional.cross_entropy(model(inputs), (inputs @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 10 == 0:
            with kept.reported({"loss": loss.item(), "step": step, "first": first}) as folder:
                if rank == 0:
                    state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, folder / "model.pt")


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    result = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"steps": 30, "fails_at": 15},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tempfile.mkdtemp(), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    print("resumed at step {first}, loss at step {step}: {loss:.3f}".format(**result.metrics))
    print(f"sent {result.metrics['gradsieve/density']:.1%} of the gradient")
