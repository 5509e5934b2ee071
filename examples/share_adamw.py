"""AdamW on every worker, and only the weights that drifted apart are averaged: no DDP.

Run it:  torchrun --nproc-per-node 2 examples/share_adamw.py
"""

import torch
import torch.distributed as dist
from torch import nn

import gradsieve


def train() -> None:
    torch.manual_seed(0)
    teacher = nn.Linear(64, 10)  # the same on all ranks
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10))
    optimizer = gradsieve.ReplicaAdamW(model.parameters(), lr=3e-3)  # AdamW that knows of the other workers
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    sieve = gradsieve.share(model, optimizer, density=0.01, values="fp8", delay=1)  # from rank 0's weights on

    for step in range(200):
        inputs = torch.randn(32, 64)  # a real script gives every rank another part of the data
        loss = nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # averages 1 % of the weights, beside the next forward and backward pass
        schedule.step()
        if dist.get_rank() == 0 and step % 50 == 49:
            report = sieve.report
            print(f"step {step}: loss {loss:.3f}, averaged {report.density:.2%}, {report.bytes_sent} bytes")

    with sieve.shared():  # the weights that all ranks agree on: to evaluate or save on the way
        agreed = nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1)).item()
    sieve.finish()  # one average of everything: all replicas are equal now
    if dist.get_rank() == 0:
        print(f"loss of the agreed weights: {agreed:.3f}")


def main() -> None:
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
