"""Accelerate: one line after `prepare`; `save_state` and `load_state` keep every rank's residual.

Run it:  accelerate launch --cpu --num_processes 2 examples/accelerate_sparsify.py, or with torchrun
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradsieve.integrations.accelerate import sparsify


def train(folder: str, resume: bool) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(2048, 64)
    loader = DataLoader(TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(1)), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sieve = sparsify(accelerator, model, density=0.01)
    if resume:
        accelerator.load_state(folder)

    for number, (batch, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.log({"loss": loss.item(), **sieve.report.scalars()}, step=number)
    accelerator.save_state(folder)
    accelerator.print(f"step {sieve.report.step}: loss {loss:.3f}, sent {sieve.report.density:.1%} of the gradient")


def main() -> None:
    accelerator = Accelerator(cpu=True)
    folder = broadcast_object_list([tempfile.mkdtemp()])[0]  # one for all ranks
    train(folder, resume=False)
    train(folder, resume=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
