"""Mixed precision with a GradScaler: hand it to `sparsify`, so that what is kept back follows the loss scale.

Run it:  torchrun --nproc-per-node 2 examples/amp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve


def train() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=10)
    sieve = gradsieve.sparsify(model, "exdyna", density=0.01, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for step in range(40):
        inputs = torch.randn(32, 64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(inputs).squeeze(1) - inputs.sum(1) / 8).square().mean()
        if step == 20 and dist.get_rank() == 1:
            loss = loss * float("inf")  # one rank overflows: all ranks skip this step
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if dist.get_rank() == 0 and step in (0, 20, 39):
            print(f"step {step}: loss {loss:.3f}, scale {scaler.get_scale():g}, all finite: {sieve.report.finite}")

    sieve.check_replicas()


def main() -> None:
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
