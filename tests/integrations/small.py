"""A small classifier with dropout and running statistics, and its data, for every framework."""

import hashlib

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

FEATURES, CLASSES, EXAMPLES = 32, 5, 512


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, CLASSES)
    )


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(EXAMPLES, FEATURES, generator=generator)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    return TensorDataset(inputs, (inputs @ teacher).argmax(1))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Every bit of weights, buffers and optimizer state."""
    tensors: list[Tensor] = list(model.state_dict().values())
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return _hash(tensors)


def weights_digest(model: nn.Module) -> str:
    return _hash(list(model.parameters()))


def _hash(tensors: list[Tensor]) -> str:
    content = b"".join(
        tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors
    )
    return hashlib.sha256(content).hexdigest()
