"""Save and resume: the model and the sieve in one checkpoint, which is whole or not there at all.

Run it:  torchrun --nproc-per-node 2 examples/checkpoint.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve


def train(folder: Path, steps: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(100, 100))
    sieve = gradsieve.sparsify(model, "exdyna", density=0.01)
    if (folder / "latest.json").exists():
        extra = sieve.load(folder)  # also if it was saved by another number of workers
        model.module.load_state_dict(extra["model"])
    first = sieve.reducer.step

    for step in range(first, steps):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        model.zero_grad()
        model(torch.randn(8, 100, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    if dist.get_rank() == 0:
        print(f"steps {first} to {steps}: residual norm {sieve.reducer.residual.norm():.4f}")
    sieve.save(folder, {"model": model.module.state_dict()})


def main() -> None:
    dist.init_process_group("gloo")
    folders = [sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)  # one folder for all ranks
    train(Path(folders[0]), 10)
    train(Path(folders[0]), 20)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
