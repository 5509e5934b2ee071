"""A DDP training script, made sparse in one line.

Run it:  torchrun --nproc-per-node 2 examples/ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve


def train() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
    sieve = gradsieve.sparsify(model, "exdyna", density=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    teacher = nn.Linear(64, 10)

    for step in range(60):
        inputs = torch.randn(32, 64)  # a real script draws another batch on each rank: DistributedSampler
        targets = teacher(inputs).argmax(1)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step}: loss {loss:.3f}, sent {sieve.report.density:.2%}, {sieve.report.bytes_sent} bytes")

    sieve.check_replicas()
    if dist.get_rank() == 0:
        print(sieve.summary())


def main() -> None:
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
