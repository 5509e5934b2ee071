"""Fabric with weights: one line after `setup`; `fabric.save` and `fabric.load` keep every rank's replica.

Run it:  torchrun --nproc-per-node 2 examples/fabric_share.py
"""

import tempfile

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradsieve import ReplicaAdamW
from gradsieve.integrations.lightning import share  # or sparsify, for gradients


def train(fabric: Fabric, path: str, epochs: range) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    model, optimizer = fabric.setup(model, ReplicaAdamW(model.parameters(), lr=3e-3))
    sieve = share(fabric, model, optimizer, density=0.01, delay=1)
    inputs = torch.randn(1024, 64)
    loader = DataLoader(TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(1)), batch_size=32)
    loader = fabric.setup_dataloaders(loader)
    state = {"model": model, "optimizer": optimizer}
    if epochs.start:
        fabric.load(path, state)

    for _ in epochs:
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch), targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if sieve.report is not None:
                fabric.log_dict({"loss": loss.item(), **sieve.report.scalars()})
    fabric.save(path, state)  # the model file has the agreed weights
    with sieve.shared():
        agreed = nn.functional.cross_entropy(model(batch), targets)
    fabric.print(f"step {sieve.report.step}: loss {loss:.3f}, of the agreed weights {agreed:.3f}")


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    path = fabric.broadcast(f"{tempfile.mkdtemp()}/state.ckpt")  # one for all ranks
    train(fabric, path, range(2))
    train(fabric, path, range(2, 3))
