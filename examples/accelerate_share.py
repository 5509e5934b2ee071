"""Accelerate with weights: every rank trains its own replica with AdamW, and a part of the weights is averaged.

Run it:  accelerate launch --cpu --num_processes 2 examples/accelerate_share.py   (or torchrun --nproc-per-node 2)
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradsieve import ReplicaAdamW
from gradsieve.integrations.accelerate import share


def train(folder: str, resume: bool) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    optimizer = ReplicaAdamW(model.parameters(), lr=3e-3)  # AdamW that knows of the other workers
    inputs = torch.randn(2048, 64)
    loader = DataLoader(TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(1)), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sieve = share(accelerator, model, optimizer, density=0.01, delay=1)  # DDP averages no gradients from now on
    if resume:
        accelerator.load_state(folder)

    for number, (batch, targets) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(batch), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if sieve.report is not None:
            accelerator.log({"loss": loss.item(), **sieve.report.scalars()}, step=number)
    accelerator.save_state(folder)  # model.safetensors has the agreed weights, gradsieve_0 those of every rank
    with sieve.shared():
        agreed = nn.functional.cross_entropy(model(batch), targets)
    accelerator.print(f"step {sieve.report.step}: loss {loss:.3f}, of the agreed weights {agreed:.3f}")
    sieve.finish()


def main() -> None:
    accelerator = Accelerator(cpu=True)
    folder = broadcast_object_list([tempfile.mkdtemp()])[0]  # one for all ranks
    train(folder, resume=False)
    train(folder, resume=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
