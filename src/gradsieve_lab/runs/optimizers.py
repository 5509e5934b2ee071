"""The optimizer of a run, and its learning rate in every step."""

import math

import torch
from torch import nn

from gradsieve.share.adamw import ReplicaAdamW
from gradsieve_lab.runs.methods import has_momentum
from gradsieve_lab.runs.settings import Settings


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    if settings.optimizer == "adam" and settings.options.get("noise") == "averaged":
        decay = settings.weight_decay or 0.0
        return ReplicaAdamW(model.parameters(), settings.lr, weight_decay=decay, workers=settings.workers)
    if settings.optimizer == "adam":
        return torch.optim.AdamW(model.parameters(), settings.lr, weight_decay=settings.weight_decay or 0.0)
    return torch.optim.SGD(
        model.parameters(),
        settings.lr,
        momentum=0.0 if has_momentum(settings.sparsifier) else settings.momentum or 0.0,
        weight_decay=settings.weight_decay or 0.0,
    )


def learning_rate(settings: Settings, step: int) -> float:
    """Rises linearly in the warm-up, then stays or falls along a cosine to zero.

    >>> run = Settings("mlp", steps=100, lr=1.0, warm_up=0.1, decay="cosine")
    >>> [round(learning_rate(run, step), 3) for step in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    warm_up = round((settings.warm_up or 0.0) * settings.steps)
    if step < warm_up:
        return settings.lr * (step + 1) / warm_up
    if settings.decay != "cosine":
        return settings.lr
    return settings.lr * (1 + math.cos(math.pi * (step - warm_up) / (settings.steps - warm_up))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
